"""Reduce ops: what one hop does, and which dtypes a net can reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.errors import NoModel

__all__ = ["HOPS", "NoModel", "averaging_factor", "check_reduction"]

Hop = Callable[..., Any]

HOPS: dict[str, Hop] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""How a rank combines what arrives with what it has; ``(arrived, own, out=...)``."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_reduction(collective: str, op: str, dtype: torch.dtype) -> None:
    """Refuse what no net models.

    Raises:
        NoModel: naming the collective, the op or the dtype, and what to use instead.
    """
    if op not in HOPS:
        raise NoModel(f"{collective} with op {op!r} has no model in a simulated world: use one of {', '.join(HOPS)}")
    if dtype not in (*_FLOATS, *_INTEGERS):
        raise NoModel(f"{collective} of {dtype} has no model in a simulated world: cast to a floating dtype first")
    if op == "avg" and dtype in _INTEGERS:
        raise NoModel(f"{collective} averages {dtype}, which backends truncate differently: sum it and divide")


def averaging_factor(ranks: int, dtype: torch.dtype) -> Tensor:
    """1 / ranks as a premultiplied average has it: rounded to the dtype of the wire."""
    return torch.tensor(1.0 / ranks, dtype=dtype)
