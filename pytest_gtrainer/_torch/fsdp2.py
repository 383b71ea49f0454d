"""FSDP2: its parameter groups, and what their collectives carry.

The groups exist after a model's first forward, and each holds its parameters in payload order.
Sizes, casts and pads come from FSDP2's own functions, so that a layout is FSDP2's and no guess.
``collect_grad_tensors`` finds the inputs of a forward that FSDP2 passes through its autograd
function.
"""

import sys
from typing import Any

import torch

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.process_groups import spell_reduction

with private_names():
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
    from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        _get_all_gather_input_metadatas,
        _get_gradient_divide_factors,
        _get_param_all_gather_inputs,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import _get_dim0_padded_size

ATTRIBUTES = {
    "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": (
        "_fsdp_param_groups",
        "_mp_policy",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": (
        "fsdp_params",
        "gradient_divide_factor",
        "force_sum_reduction_for_comms",
        "_all_gather_process_group",
        "_reduce_scatter_process_group",
        "_all_reduce_process_group",
        "_is_hsdp",
        "_reduce_dtype",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": ("_orig_size",),
}

__all__ = [
    "FSDP2Policy",
    "FSDPModule",
    "collect_grad_tensors",
    "fully_shard",
    "replace_grad_tensors",
]


def is_block_mask(value: Any) -> bool:
    """Return whether ``value`` is a ``BlockMask`` of FlexAttention."""
    # A module that nobody has imported has made no masks.
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")
    return flex_attention is not None and isinstance(value, flex_attention.BlockMask)


def split_block_mask(mask: Any, num_chunks: int) -> list[Any]:
    """Cut a ``BlockMask`` along the batch, as pipelining does; a broadcast mask is given whole."""
    from torch.distributed.pipelining.microbatch import _split_block_mask

    return list(_split_block_mask(mask, num_chunks))


def parameter_groups(model: torch.nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups, each once, in module order."""
    groups = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if group is not None:
                    groups[id(group)] = group
    return list(groups.values())


def precisions(model: torch.nn.Module) -> list[str]:
    """Return the mixed-precision policies of a model that change dtypes, each once, in words."""
    found: dict[str, None] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy = module._get_fsdp_state()._mp_policy
            dtypes = []
            for name in ("param_dtype", "reduce_dtype", "output_dtype"):
                if getattr(policy, name) is not None:
                    dtypes.append(f"{name}={getattr(policy, name)}")
            if dtypes:
                found[f"MixedPrecisionPolicy({', '.join(dtypes)})"] = None
    return list(found)


def all_gather_inputs(group: Any) -> tuple[list[int], torch.dtype]:
    """Return the bytes that each parameter sends, in payload order, and the payload's dtype.

    The dtype of a payload of mixed dtypes is uint8.
    """
    inputs = _get_param_all_gather_inputs(group.fsdp_params)
    _, _, dtype = _get_all_gather_input_metadatas(inputs)
    return [sum(t.numel() * t.element_size() for t in tensors) for tensors in inputs], dtype


def groups_of(group: Any) -> tuple[Any, Any, Any]:
    """Return the process groups of all-gather, reduce-scatter and all-reduce.

    The last is None without replicas.
    """
    replicas = group._all_reduce_process_group if group._is_hsdp else None
    return group._all_gather_process_group, group._reduce_scatter_process_group, replicas


def reduce_dtype(group: Any) -> torch.dtype | None:
    """Return the dtype that gradients are reduced in; None for that of the parameters."""
    return group._reduce_dtype


def shard_numel(parameter: Any, ranks: int) -> int:
    """Return the elements of an ``FSDPParam``'s gradient on each rank, with padding of dim 0."""
    size, dim = list(parameter._orig_size), parameter.fsdp_placement.dim
    # FSDP2 chunks along the sharded dim, and concatenates on dim 0 first.
    if dim:
        size[0], size[dim] = size[0] * ranks, size[dim] // ranks
    return int(_get_dim0_padded_size(torch.Size(size), ranks).numel()) // ranks


def reduce_ops(group: Any, dtype: torch.dtype, device_type: str) -> tuple[str, str]:
    """Return the reductions of reduce-scatter and all-reduce, such as "premul_sum(0.25)" and "sum".

    Both are "avg", unless the user has set a divide factor: then the reduce-scatter divides alone.
    """
    _, scatters, replicas = groups_of(group)
    _, _, *ops = _get_gradient_divide_factors(
        scatters,
        replicas,
        dtype,
        device_type,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )
    scatter, reduce = (str(spell_reduction(op)) for op in ops)
    return scatter, reduce
