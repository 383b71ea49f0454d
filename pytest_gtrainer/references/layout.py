"""The bucket layout of an eager FSDP2 model, read from ``fully_shard``'s own parameter groups."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from pytest_gtrainer._torch import fsdp2
from pytest_gtrainer.graph.layout import (
    ALL_GATHER_NAME,
    ALL_REDUCE_NAME,
    REDUCE_SCATTER_NAME,
    BucketLayout,
    Payload,
    Slot,
)


def eager_bucket_layout(model: nn.Module) -> BucketLayout:
    """Which parameter sits at which byte of FSDP2's all-gathers, reduce-scatters and, of replicas, all-reduces.

    Call it after a backward, while gradients are there: FSDP2 finishes its set-up in the first
    forward, and reduces the parameters that got a gradient.

    Raises:
        ValueError: no module of ``model`` has parameters managed by ``fully_shard``.
    """
    groups = fsdp2.parameter_groups(model)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameters managed by fully_shard: wrap it, and run one step")
    if all(parameter.grad is None for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no gradients: run a backward first, and keep them")
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    payloads = [payload for group in groups for payload in _payloads(group, names)]
    return BucketLayout(tuple(payloads))


def _payloads(group: object, names: dict[int, str]) -> list[Payload]:
    gather = _all_gather(group, names)
    scatter = _reduce_scatter(group, names)
    if scatter is None:
        return [gather]
    between_replicas = fsdp2.all_reduce_group(group)
    if between_replicas is None:
        return [gather, scatter]
    return [gather, scatter, replace(scatter, collective=ALL_REDUCE_NAME, ranks=_ranks(between_replicas))]


def _all_gather(group: object, names: dict[int, str]) -> Payload:
    sizes, dtype = fsdp2.all_gather_inputs(group)
    fqns = [names[id(p.sharded_param)] for p in group.fsdp_params]  # type: ignore[attr-defined]
    ranks = _ranks(fsdp2.all_gather_group(group))
    return Payload(ALL_GATHER_NAME, dtype, ranks, "", _slots(fqns, sizes))


def _reduce_scatter(group: object, names: dict[int, str]) -> Payload | None:
    """Parameters without a gradient, frozen or unused, are gathered and not reduced."""
    trained = [p for p in group.fsdp_params if p.sharded_param.grad is not None]  # type: ignore[attr-defined]
    if not trained:
        return None
    dtype = fsdp2.reduce_dtype(group) or trained[0].param_dtype or trained[0].orig_dtype
    ranks = _ranks(fsdp2.reduce_scatter_group(group))
    sizes = [_shard_bytes(p, len(ranks), dtype) for p in trained]
    fqns = [names[id(p.sharded_param)] for p in trained]
    op = fsdp2.reduce_op(group, dtype, trained[0].sharded_param.device.type)
    return Payload(REDUCE_SCATTER_NAME, dtype, ranks, op, _slots(fqns, sizes))


def _shard_bytes(parameter: object, ranks: int, dtype: torch.dtype) -> int:
    size = fsdp2.unsharded_size(parameter)
    dim = parameter.fsdp_placement.dim  # type: ignore[attr-defined]
    if dim:  # FSDP2 chunks along the sharded dim and concatenates on dim 0 first
        size[0], size[dim] = size[0] * ranks, size[dim] // ranks
    return fsdp2.padded_numel(torch.Size(size), ranks) // ranks * dtype.itemsize


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _slots(fqns: list[str], sizes: list[int]) -> tuple[Slot, ...]:
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(Slot(*row) for row in zip(fqns, offsets, sizes, strict=True))
