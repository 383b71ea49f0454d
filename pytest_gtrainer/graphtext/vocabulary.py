"""Words that stand for values of torch: dtypes, layouts, memory formats. Read and written by these tables."""

from __future__ import annotations

from typing import TypeVar

import torch

_T = TypeVar("_T")

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint64: "u64", torch.uint32: "u32", torch.uint16: "u16", torch.uint8: "u8", torch.bool: "b8",
    torch.complex128: "c128", torch.complex64: "c64", torch.complex32: "c32",
}  # fmt: skip
"""Dtypes with a short name; the others (``float8_e4m3fn``) have torch's."""


def _named(kind: type[_T]) -> dict[str, _T]:
    return {name: value for name, value in vars(torch).items() if isinstance(value, kind)}


_LONG = {str(dtype).removeprefix("torch."): dtype for dtype in _named(torch.dtype).values()}
DTYPE_OF: dict[str, torch.dtype] = {word: dtype for word, dtype in _LONG.items() if dtype not in DTYPES}
DTYPE_OF |= {word: dtype for dtype, word in DTYPES.items()}

LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in _named(torch.layout).values()}
FORMATS = {str(form).removeprefix("torch."): form for form in _named(torch.memory_format).values()}
CONSTANTS: dict[str, object] = {**DTYPE_OF, **LAYOUTS, **FORMATS, "inf": float("inf"), "nan": float("nan")}
CONSTANTS |= {"infj": complex(0, float("inf")), "nanj": complex(0, float("nan"))}
"""What a bare word that is no value of the graph stands for."""


def spell_dtype(dtype: torch.dtype) -> str:
    """``bf16``; a dtype without a short name has torch's.

    >>> spell_dtype(torch.bfloat16), spell_dtype(torch.float8_e5m2)
    ('bf16', 'float8_e5m2')
    """
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")
