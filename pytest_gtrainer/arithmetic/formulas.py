"""Operators made of others, where torch has no decomposition, and meanings that users give."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer._torch.arithmetic import (
    body_of_packing,
    decomposition_table,
    is_taken_apart,
)
from pytest_gtrainer._torch.values import OpOverload, OpOverloadPacket
from pytest_gtrainer.arithmetic.kernels import KERNELS
from pytest_gtrainer.arithmetic.operators import base_name
from pytest_gtrainer.facts import check_callable

aten = torch.ops.aten
# The functions given for an operator; the last one counts.
_given: dict[Any, list[Callable[..., Any]]] = {}


@contextmanager
def meaning(operator: Any, reference: Callable[..., Any]) -> Iterator[None]:
    """Say what an operator computes, for arithmetics: ``meaning("vllm::rms_norm", function)``.

    Args:
        operator: its name, with or without overload, or the operator itself.
        reference: a function of the same arguments, written in torch's operators. It returns what
            the operator returns; what the operator writes to, it writes to, too.

    Raises:
        ValueError: there is no such operator.
    """
    overloads = _overloads(operator)

    check_callable(reference=reference)

    def own(*args: Any, **kwargs: Any) -> Any:
        return reference(*args, **kwargs)

    for overload in overloads:
        _given.setdefault(overload, []).append(own)
    try:
        yield
    finally:
        # By itself: fixtures and generators may end in another order than they began.
        for overload in overloads:
            _given[overload].remove(own)


def _overloads(operator: Any) -> list[OpOverload]:
    found = operator
    if isinstance(operator, str):
        space, _, rest = operator.partition("::")
        name, _, overload = rest.partition(".")
        found = getattr(getattr(torch.ops, space), name, None) if name else None
        if found is not None and overload:
            found = getattr(found, overload, None)
    if isinstance(found, OpOverload):
        return [found]
    if isinstance(found, OpOverloadPacket):
        return [getattr(found, overload) for overload in found.overloads()]
    raise ValueError(
        f'there is no operator {operator!r}: name a registered one, as "vllm::rms_norm" or '
        '"aten::mm.default"'
    )


def given_meaning(operator: Any) -> Callable[..., Any] | None:
    """Return the reference that a user gave for an operator."""
    given = _given.get(operator)
    return given[-1] if given else None


def parts_of(operator: Any, is_exact: bool = False) -> Callable[..., Any] | None:
    """Return a function that computes an operator by others; None if nobody knows one.

    Args:
        is_exact: it may be one that rounds otherwise, as nothing is rounded.
    """
    if is_exact and operator in _EXACT_FORMULAS:
        return _EXACT_FORMULAS[operator]
    if operator in _FORMULAS:
        return _FORMULAS[operator]
    if operator in decomposition_table:
        return decomposition_table[operator]
    is_own = operator.namespace == "prims" and not hasattr(aten, base_name(operator))
    if is_own and hasattr(operator, "impl_aten"):
        # What its kernel calls, as of fma. The others are what aten's are taken apart to.
        kernel: Callable[..., Any] = operator.impl_aten
        return kernel
    if is_taken_apart(operator):
        return operator.decompose
    return body_of_packing(operator)


def _scores(query: Tensor, key: Tensor, mask: Any, is_causal: bool, scale: Any) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.transpose(-2, -1)) * scale
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if mask is not None:
        if mask.dtype == torch.bool:
            return scores.masked_fill(~mask, -torch.inf)
        return scores + mask
    return scores


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Return a head of keys or values for each head of queries."""
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> tuple[Tensor, Tensor]:
    """Attention, computed in float32 or wider and rounded once, as the kernel does."""
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = (_repeat_heads(each, query.shape[1]).to(wide) for each in (key, value))
    scores = _scores(query.to(wide), keys, attn_mask, is_causal, scale)
    weights = aten._safe_softmax(scores, -1)
    logsumexp = torch.logsumexp(scores, -1)
    if attn_mask is not None:
        # The kernel's own of a row without keys: the backward makes weights of 0 with it.
        logsumexp = logsumexp.masked_fill(torch.isneginf(scores).all(-1), 0)
    return (weights @ values).to(query.dtype), logsumexp


def _attention_for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of attention (Dao, 2023, section 2.3), of weights that are made again.

    As in the kernel, ``out`` and ``logsumexp`` say what the whole row is: in ring attention
    the keys are a part of it.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    heads = query.shape[1]
    keys, values = (_repeat_heads(each, heads).to(wide) for each in (key, value))
    gradient, queries = grad_out.to(wide), query.to(wide)
    scores = _scores(queries, keys, attn_mask, is_causal, scale)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    to_weights = gradient @ values.transpose(-2, -1)
    along_rows = (gradient * out.to(wide)).sum(-1, keepdim=True)
    to_scores = weights * (to_weights - along_rows)
    to_scores = to_scores * (query.shape[-1] ** -0.5 if scale is None else scale)

    def by_group(tensor: Tensor) -> Tensor:
        shared = key.shape[1]
        grouped = tensor.unflatten(1, (shared, heads // shared))
        return grouped.sum(2).to(query.dtype)

    return (
        (to_scores @ keys).to(query.dtype),
        by_group(to_scores.transpose(-2, -1) @ queries),
        by_group(weights.transpose(-2, -1) @ gradient),
    )


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    soft = (1 + (x * beta).exp()).log() / beta
    if threshold < 20:
        return torch.where(x * beta > threshold, x, soft)
    return soft  # above the threshold a kernel leaves out what rounding would lose


def _softplus_backward(grad_output: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    soft = grad_output * torch.sigmoid(x * beta)
    return soft if threshold >= 20 else torch.where(x * beta > threshold, grad_output, soft)


def _logaddexp(x: Tensor, other: Tensor) -> Tensor:
    return (x.exp() + other.exp()).log()


def _sign(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def _power_of_number(base: float, exponent: Tensor) -> Tensor:
    if not base > 0:
        return aten.pow.Scalar(base, exponent)
    return (exponent * math.log(base)).exp()


def _rounded_once(formula: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a formula that computes in float32 or wider, as the kernels of narrow dtypes do."""

    def of_wide(x: Tensor) -> Tensor:
        return formula(x.to(torch.promote_types(x.dtype, torch.float32)))

    return of_wide


_OF_ONE: dict[Any, Callable[[Tensor], Tensor]] = {
    aten.exp2.default: lambda x: (x * math.log(2)).exp(),
    aten.log2.default: lambda x: x.log() / math.log(2),
    aten.log10.default: lambda x: x.log() / math.log(10),
    aten.expm1.default: lambda x: x.exp() - 1,
    aten.log1p.default: lambda x: (1 + x).log(),
    aten.sinh.default: lambda x: (x.exp() - (-x).exp()) / 2,
    aten.cosh.default: lambda x: (x.exp() + (-x).exp()) / 2,
    aten.tanh.default: lambda x: 2 / (1 + (-2 * x).exp()) - 1,  # 1 and -1 of infinities
    aten.asinh.default: lambda x: (x + (x * x + 1).sqrt()).log(),
    aten.acosh.default: lambda x: (x + (x * x - 1).sqrt()).log(),
    aten.atanh.default: lambda x: ((1 + x) / (1 - x)).log() / 2,
}
_EXACT_FORMULAS: dict[Any, Callable[..., Any]] = {
    **{operator: _rounded_once(formula) for operator, formula in _OF_ONE.items()},
    aten.pow.Scalar: _power_of_number,
    aten.logaddexp.default: _logaddexp,
    aten.sign.default: _sign,
    aten.softplus.default: _softplus,
    aten.softplus_backward.default: _softplus_backward,
    **KERNELS,
}
_FORMULAS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_for_cpu_backward,
}
