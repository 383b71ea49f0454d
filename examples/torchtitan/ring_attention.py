"""Context parallelism for the CPU's attention: torch has its ring for the kernels of CUDA only."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention

SEQUENCE = 2
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _forward(op, args, kwargs):
    query, key, value, dropout, is_causal = (*args, 0.0, False)[:5]
    results = _attention._templated_ring_attention(
        query.device_mesh.get_group(),
        SEQUENCE,
        op,
        query.to_local(),
        key.to_local(),
        value.to_local(),
        is_causal=is_causal,
        dropout_p=dropout,
        scale=kwargs.get("scale"),
    )
    return _as_sharded(results, query)


def _backward(op, args, kwargs):
    *tensors, dropout, is_causal = args
    grad, query, key, value, out, logsumexp = (tensor.to_local() for tensor in tensors)
    results = _attention._templated_ring_attention_backward(
        tensors[0].device_mesh.get_group(),
        SEQUENCE,
        op,
        grad_out=grad,
        grad_out_name="grad_out",
        query=query,
        key=key,
        value=value,
        out=out,
        logsumexp=logsumexp,
        is_causal=is_causal,
        dropout_p=dropout,
        scale=kwargs.get("scale"),
    )
    return _as_sharded(results, tensors[1])


def _as_sharded(results, like):
    return tuple(DTensor.from_local(each, like.device_mesh, like.placements) for each in results)


HANDLERS = {FORWARD: _forward, BACKWARD: _backward}
