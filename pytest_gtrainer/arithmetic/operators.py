"""The one table of aten operators: which kind each is, in every arithmetic.

| kind | what happens to elements | where |
|---|---|---|
| move | they go elsewhere unchanged | views by their schema; ``MOVES`` |
| factory | they are made from numbers that a program writes | ``FACTORIES``, ``UNINITIALISED`` |
| cast | they are rounded to another dtype, or not | ``CASTS`` |
| decision | they are compared or sorted; the result is known | ``COMPARISONS``, ``SORTS``, ... |
| ring | sums and products | the field's own; terms see functions |
| pointwise | each element is a function of those at its place | torch's tag |
| made of others | torch's decomposition, or a formula in ``formulas`` | kernels and field |
| opaque | a function of all arguments | what is left |

Views, writes and randomness come from the schemas and tags of torch, see ``graph.nodes``.
"""

from functools import cache
from typing import Any

import torch

from pytest_gtrainer._torch.values import schema


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


MOVES = names(
    """
    alias_copy as_strided_copy as_strided_scatter cat clone constant_pad_nd contiguous copy
    detach_copy diag_embed diagonal_copy diagonal_scatter embedding expand_copy fill flip
    gather index index_copy index_fill index_put index_select lift lift_fresh_copy masked_fill
    masked_scatter masked_select narrow_copy permute_copy pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave
    replication_pad1d replication_pad2d replication_pad3d roll rot90 scatter select_backward
    select_copy select_scatter slice_backward slice_copy slice_scatter split_copy
    split_with_sizes_copy squeeze_copy stack t_copy take transpose_copy tril triu unbind_copy
    unfold_copy unsqueeze_copy view_copy where zero _reshape_copy _unsafe_index
    _unsafe_index_put _unsafe_masked_index channel_shuffle _chunk_cat
    """
)
"""They run on the elements as they are, unless they add what meets at one place.

A number that they fill in is made an element first.
"""

FILLED = frozenset({"value", "fill_value", "fill", "self", "other"})
"""Arguments of moves that may be such a number."""

UNINITIALISED = names(
    """
    empty empty_like empty_permuted empty_strided new_empty new_empty_strided
    """
)
STABILISED = names(
    """
    _softmax _log_softmax _safe_softmax logsumexp _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward
    """
)
"""Subtract the largest number against overflow: any other would give the same."""
SOFTMAXES = names("_softmax _log_softmax _safe_softmax")
"""Their results have the order of their operands, row by row."""
FACTORIES = names("full_like new_full new_ones new_zeros ones_like zeros_like")
"""They make known numbers, and read no more than the shape of a tensor."""

CASTS = frozenset({"_to_copy", "convert_element_type"})
COMPARISONS = names("eq ge gt le lt ne")
SORTS = names("argmax argmin argsort cummax cummin kthvalue max median min mode sort topk")
TRUTHS = names("logical_and logical_not logical_or logical_xor signbit")
FINITE = names("isfinite isinf isnan isneginf isposinf")

ACCUMULATIONS = names(
    "cumsum embedding_dense_backward index_add index_put scatter_add _unsafe_index_put"
)
"""They add one element after the other in memory, so a narrow dtype rounds after every addition."""

COMMUTATIVE = names("add logical_and logical_or logical_xor maximum minimum mul")
CORRECTLY_ROUNDED = names(
    """
    abs add ceil clamp clamp_max clamp_min div floor maximum minimum mul neg reciprocal relu
    round rsub sign sqrt sub threshold_backward trunc where
    """
)
"""IEEE 754 says what they give, or they only choose: vector and scalar code agree.

The result of other pointwise kernels may depend on the shape, where a rest of a vector is computed
by scalar code.
"""

ROUND_NOTHING = (MOVES | SORTS | CASTS) | names(
    "abs amax amin ceil clamp clamp_max clamp_min floor maximum minimum neg relu round sign trunc"
)
"""They give one of their operands, or its negative, or a whole number."""

BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Binary digits of a significand."""


@cache
def base_name(operator: Any) -> str:
    """Return an operator's name without namespace and overload."""
    return str(schema(operator).name).partition("::")[2]


@cache
def is_pointwise(operator: Any) -> bool:
    """Return whether each element of the result is a function of the elements at its place.

    Torch tags operators of aten. Those of prims, which decompositions call, have their names.
    """
    packet = getattr(torch.ops.aten, base_name(operator), None)
    overloads = [operator]
    if operator.namespace == "prims" and packet is not None:
        overloads = [getattr(packet, name) for name in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether operators round to a dtype what they compute in float32."""
    return BITS.get(dtype, 53) < BITS[torch.float32]


def holds_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether every number of ``narrow`` is one of ``wide``."""
    if wide == narrow:
        return True
    if wide not in BITS or narrow not in BITS or wide.itemsize <= narrow.itemsize:
        return False
    return BITS[wide] > BITS[narrow]
