"""The raw bytes of a tensor, whatever its dtype, layout or device.

``-0.0`` is not ``0.0`` here and a NaN equals a NaN only with the same payload, because
nothing looks at values: a tensor is its bytes in row-major order of its elements.
"""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer._torch.values import is_traceable_wrapper_subclass

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8
_PIECE = 4 << 20  # elements

# Significant decimal digits after which two neighbours of the format never look the same.
_DIGITS = {torch.float64: 17, torch.float32: 9, torch.float16: 5, torch.bfloat16: 4}
_FEW_DIGITS = 3


class NoBytes(TypeError):
    """The tensor holds no bytes that could be looked at: meta, fake, sparse or wrapped."""


def plain(tensor: Tensor) -> Tensor:
    """The detached strided tensor of this rank's values, a DTensor's local shard; a NoBytes where there is none."""
    tensor = tensor.detach()
    if is_dtensor(tensor):
        tensor = tensor.to_local().detach()
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.wait()
    kind = type(tensor).__name__
    if kind == "FakeTensor" or tensor.is_meta:
        raise NoBytes(f"a {'fake' if kind == 'FakeTensor' else 'meta'} tensor holds no values")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NoBytes(f"a {tensor.layout} tensor of {tensor.dtype} has no plain bytes: convert it first")
    if is_traceable_wrapper_subclass(tensor):
        raise NoBytes(f"a {kind} wraps other tensors: compare its parts")
    return tensor.resolve_conj().resolve_neg()


def is_dtensor(tensor: Tensor) -> bool:
    """Whether this is a DTensor; does not import DTensor (0.8 s), whoever made one has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def byte_view(tensor: Tensor) -> Tensor:
    """All bytes of a tensor as ``uint8[numel * element_size]``, row-major; a view where the tensor is contiguous."""
    return plain(tensor).contiguous().reshape(-1).view(torch.uint8)


def memory(view: Tensor) -> bytes | ctypes.Array[ctypes.c_ubyte]:
    """The memory of a contiguous byte view in host memory, not copied; valid as long as ``view`` lives."""
    if not view.numel():
        return b""
    return (ctypes.c_ubyte * view.numel()).from_address(view.data_ptr())


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two byte views (``uint8[n]``) are equal, read in the widest words that fit."""
    if a.numel() != b.numel():
        return False
    width = max(w for w in _INTEGERS if a.storage_offset() % w == b.storage_offset() % w == 0)
    head = a.numel() // width * width
    words = (side[:head].view(_INTEGERS[width]) for side in (a, b))
    return torch.equal(*words) and torch.equal(a[head:], b[head:])


def count_differing(a: Tensor, b: Tensor) -> tuple[int, int]:
    """How many elements differ, and the place of the first in row-major order; piece by piece, -1 if none does."""
    total, first, size = 0, -1, a.element_size()
    pieces = [side.reshape(-1).split(_PIECE) for side in (a, b)]
    for number, pair in enumerate(zip(*pieces, strict=True)):
        rows = [byte_view(side).view(_INTEGERS[min(size, _WORD)]) for side in pair]
        # an element wider than a word is several words
        differs = (rows[0] != rows[1]).reshape(-1, max(1, size // _WORD)).any(dim=1)
        found = int(differs.sum())
        if found and first < 0:
            first = number * _PIECE + int(differs.to(torch.uint8).argmax())
        total += found
    return total, first


def pattern(element: Tensor) -> str:
    """The bits of a one-element tensor in hexadecimal, most significant first.

    >>> pattern(torch.tensor(1.0, dtype=torch.bfloat16)), pattern(torch.tensor(1 - 0j, dtype=torch.complex64))
    ('0x3f80', '(0x3f800000, 0x00000000)')
    """
    if element.is_complex():
        real, imaginary = torch.view_as_real(plain(element)).reshape(-1)
        return f"({pattern(real)}, {pattern(imaginary)})"
    raw = bytes(byte_view(element).tolist())
    return f"0x{int.from_bytes(raw, sys.byteorder):0{2 * len(raw)}x}"


def value(element: Tensor) -> str:
    """A one-element tensor as a decimal that no neighbour shares.

    >>> value(torch.tensor(0.1)), value(torch.tensor(-0.0)), value(torch.tensor(7))
    ('0.100000001', '-0', '7')
    """
    item: Any = plain(element).item()
    if not element.is_floating_point():
        return str(item)
    return format(item, f".{_DIGITS.get(element.dtype, _FEW_DIGITS)}g")


_MAGNITUDE = torch.float8_e8m0fnu  # a power of two without a sign: its bits count its numbers as they are


def ulp_distance(a: Tensor, b: Tensor) -> int | None:
    """ULPs between two one-element tensors; None for NaN, different dtypes, and what is not floating point."""
    if a.dtype != b.dtype or not a.is_floating_point() or a.dtype is torch.float4_e2m1fn_x2:
        return None
    if any(bool(side.to(torch.float64).isnan()) for side in (a, b)):
        return None
    return abs(_place(a) - _place(b))


def _place(element: Tensor) -> int:
    """The signed place of a number among all numbers of its format; 0 for both zeros."""
    raw = bytes(byte_view(element).tolist())
    sign = 1 << (8 * len(raw) - 1)
    unsigned = int.from_bytes(raw, sys.byteorder)
    if element.dtype is _MAGNITUDE:
        return unsigned
    return sign - unsigned if unsigned & sign else unsigned
