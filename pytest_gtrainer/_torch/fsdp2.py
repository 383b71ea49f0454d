"""FSDP2: its parameter groups, and what their collectives carry.

After a model's first forward each ``FSDPModule`` holds ``_get_fsdp_state()._fsdp_param_groups``,
and a group its ``fsdp_params`` in payload order, its process groups, and with replicas
(``_is_hsdp``) one more. The all-gather inputs come from FSDP2's own
``_get_param_all_gather_inputs``, casts and pads included; ``_get_dim0_padded_size`` gives a
gradient's padded size; pipelining's ``_split_block_mask`` cuts a ``BlockMask`` along the batch.
Which tensors among the inputs of a forward FSDP2 hands on by its autograd function is
``collect_grad_tensors``' to say.
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
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": ("_fsdp_param_groups",),
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
    """Return whether it is FlexAttention's ``BlockMask``, without importing what nobody has used
    yet.
    """
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")
    return flex_attention is not None and isinstance(value, flex_attention.BlockMask)


def split_block_mask(mask: Any, num_chunks: int) -> list[Any]:
    """A ``BlockMask`` cut along the batch by torch itself; all of it for every chunk where it is
    broadcast.
    """
    from torch.distributed.pipelining.microbatch import _split_block_mask

    return list(_split_block_mask(mask, num_chunks))


def parameter_groups(model: torch.nn.Module) -> list[Any]:
    """FSDP2's parameter groups, each once, in module order."""
    states = (
        module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
    )
    groups = {
        id(group): group
        for state in states
        for group in state._fsdp_param_groups
        if group is not None
    }
    return list(groups.values())


def all_gather_inputs(group: Any) -> tuple[list[int], torch.dtype]:
    """Bytes that each parameter sends, in payload order, and the payload's dtype (uint8 if mixed)."""
    inputs = _get_param_all_gather_inputs(group.fsdp_params)
    _, _, dtype = _get_all_gather_input_metadatas(inputs)
    return [sum(t.numel() * t.element_size() for t in tensors) for tensors in inputs], dtype


def groups_of(group: Any) -> tuple[Any, Any, Any]:
    """The process groups that gather parameters, reduce-scatter gradients, and all-reduce replicas'
    (else None).
    """
    replicas = group._all_reduce_process_group if group._is_hsdp else None
    return group._all_gather_process_group, group._reduce_scatter_process_group, replicas


def reduce_dtype(group: Any) -> torch.dtype | None:
    """The dtype that the policy reduces in; None for that of the parameters."""
    return group._reduce_dtype


def shard_numel(parameter: Any, ranks: int) -> int:
    """Elements that each of so many ranks gets of an ``FSDPParam``'s gradient, padded so that they
    divide dim 0.
    """
    size, dim = list(parameter._orig_size), parameter.fsdp_placement.dim
    if dim:  # FSDP2 chunks along the sharded dim and concatenates on dim 0 first
        size[0], size[dim] = size[0] * ranks, size[dim] // ranks
    return int(_get_dim0_padded_size(torch.Size(size), ranks).numel()) // ranks


def reduce_ops(group: Any, dtype: torch.dtype, device_type: str) -> tuple[str, str]:
    """FSDP2's two reductions, such as "avg" or "premul_sum(0.25)": a reduce-scatter divides, an
    all-reduce is plain.
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
