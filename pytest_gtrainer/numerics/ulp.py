"""Distance of two floating-point numbers in units in the last place.

The bits of an IEEE-like format, read as sign and magnitude, count its numbers in order of
size. The distance of two numbers is the difference of their places in that order, so the
two zeros are 0 apart and infinity is the neighbour of the largest number.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from pytest_gtrainer.numerics.bits import byte_view

_SIGN_AND_MAGNITUDE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    }
)
# A power of two without a sign: its bits count its numbers as they are.
_MAGNITUDE = frozenset({torch.float8_e8m0fnu})


def ulp_distance(a: Tensor, b: Tensor) -> int | None:
    """ULPs between two one-element tensors; None where that means nothing.

    It means nothing for NaN, for different dtypes, and for what is not a floating-point
    format (integers, bool, complex).

    >>> one = torch.tensor(1.0, dtype=torch.bfloat16)
    >>> ulp_distance(one, one + 2**-7), ulp_distance(torch.tensor(0.0), torch.tensor(-0.0))
    (1, 0)
    >>> ulp_distance(torch.tensor(0.0), torch.tensor(float("nan"))) is None
    True
    """
    if a.dtype != b.dtype or a.dtype not in _SIGN_AND_MAGNITUDE | _MAGNITUDE:
        return None
    if any(bool(side.to(torch.float64).isnan()) for side in (a, b)):
        return None
    return abs(_place(a) - _place(b))


def _place(element: Tensor) -> int:
    """The signed place of a number among all numbers of its format; 0 for both zeros."""
    raw = bytes(byte_view(element).tolist())
    sign = 1 << (8 * len(raw) - 1)
    unsigned = int.from_bytes(raw, sys.byteorder)
    if element.dtype in _MAGNITUDE:
        return unsigned
    return sign - unsigned if unsigned & sign else unsigned
