"""Dtypes by their short names, which graph text and verdicts have in common."""

from __future__ import annotations

import torch

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint64: "u64", torch.uint32: "u32", torch.uint16: "u16", torch.uint8: "u8", torch.bool: "b8",
    torch.complex128: "c128", torch.complex64: "c64", torch.complex32: "c32",
}  # fmt: skip
"""Dtypes with a short name; the others (``float8_e4m3fn``) have torch's."""


def spell_dtype(dtype: torch.dtype) -> str:
    """``bf16``; a dtype without a short name has torch's.

    >>> spell_dtype(torch.bfloat16), spell_dtype(torch.float8_e5m2)
    ('bf16', 'float8_e5m2')
    """
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")
