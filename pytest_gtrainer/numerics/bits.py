"""Read and compare the raw bytes of tensors, whatever their dtype, layout or device.

A tensor is its bytes in row-major order of its elements, and nothing looks at values. So ``-0.0``
is not ``0.0``, and a NaN equals a NaN only with the same payload.

Of many narrow dtypes (``uint4``, ``bits8``, ``float4_e2m1fn_x2``) torch can neither copy, index nor
print an element. So a tensor is viewed as integers of the same width before anything else.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8
_PIECE = 4 << 20  # elements

# Significant decimal digits after which two neighbours of the format never look the same.
_DIGITS = {torch.float64: 17, torch.float32: 9, torch.float16: 5, torch.bfloat16: 4}
_FEW_DIGITS = 3


class NoBytes(TypeError):
    """The tensor holds no bytes that could be looked at: meta, fake, sparse or wrapped."""


def plain(tensor: Tensor) -> Tensor:
    """Return the detached, strided tensor of this rank's values; of a DTensor the local shard.

    Raises:
        NoBytes: the tensor holds no values.
    """
    return held(tensor).resolve_conj().resolve_neg()


def held(tensor: Tensor) -> Tensor:
    """Do as ``plain``, but keep strides, and conjugates and negations that torch has put off."""
    if is_dtensor(tensor):
        tensor = tensor.detach().to_local()
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.detach().wait()
    kind = type(tensor).__name__
    if tensor.is_nested:
        raise NoBytes("a nested tensor has no plain bytes: compare its unbind(), or its values()")
    if kind == "FakeTensor" or tensor.is_meta:
        raise NoBytes(f"a {'fake' if kind == 'FakeTensor' else 'meta'} tensor holds no values")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NoBytes(
            f"a {tensor.layout} tensor of {tensor.dtype} has no plain bytes: convert it first"
        )

    # Also of a class that says no parts, whose own memory holds nothing.
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise NoBytes(f"a {kind} wraps other tensors: compare its parts")
    if tensor.numel() and not tensor.untyped_storage().nbytes():  # reading would crash the process
        raise NoBytes("its memory was freed, as FSDP does with parameters that it has resharded")
    return tensor.detach()


def parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that a tensor consists of, with their names.

    That is the tensor itself, unless it is quantised: then its integers, its scales and its zero
    points.
    """
    if not tensor.is_quantized:
        yield name, tensor
        return
    begin = ""
    if name:
        begin = f"{name}."
    tensor = tensor.detach()
    yield f"{begin}int_repr", torch.int_repr(tensor)
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield f"{begin}q_scale", torch.tensor(tensor.q_scale(), dtype=torch.float64)
        yield f"{begin}q_zero_point", torch.tensor(tensor.q_zero_point())
    else:
        # Copies, because they cannot be written to: a clone of a quantised tensor shares its
        # scales.
        yield f"{begin}q_per_channel_scales", tensor.q_per_channel_scales().clone()
        yield f"{begin}q_per_channel_zero_points", tensor.q_per_channel_zero_points().clone()
        yield f"{begin}q_per_channel_axis", torch.tensor(tensor.q_per_channel_axis())


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, without importing DTensor, which takes 0.8 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def byte_view(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor as ``uint8[numel * element_size]``, row-major.

    This is a view if the tensor is contiguous.
    """
    row = as_integers(plain(tensor)).contiguous().view(-1)
    # A slice of one element is contiguous whatever its stride is, but only a stride of 1 can be
    # viewed as bytes.
    return row.as_strided((row.numel(),), (1,)).view(torch.uint8)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy on the same device, of any dtype; of a DTensor a copy of its local shard."""
    tensor = plain(tensor)
    return as_integers(tensor).clone().view(tensor.dtype)


def as_integers(tensor: Tensor) -> Tensor:
    """View a tensor as integers as wide as its elements; complex128, wider than any, stays."""
    integers = _INTEGERS.get(tensor.element_size())
    if integers is None:
        return tensor
    return tensor.view(integers)


def memory(view: Tensor) -> bytes | ctypes.Array[ctypes.c_ubyte]:
    """Return the memory of a contiguous byte view on the host, which must outlive its use."""
    if not view.numel():
        return b""
    return (ctypes.c_ubyte * view.numel()).from_address(view.data_ptr())


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two byte views (``uint8[n]``) are equal, read in the widest words that fit."""
    if a.numel() != b.numel():
        return False
    # ``view`` demands that the storage offset is a multiple of the wider element.
    width = max(w for w in _INTEGERS if a.storage_offset() % w == b.storage_offset() % w == 0)
    head, word = a.numel() // width * width, _INTEGERS[width]
    same_words = torch.equal(a[:head].view(word), b[:head].view(word))
    return same_words and torch.equal(a[head:], b[head:])


def count_differing(a: Tensor, b: Tensor) -> tuple[int, int]:
    """Return how many elements differ, and the place of the first in row-major order, or -1.

    It goes piece by piece, since a mask over a whole large tensor may not fit into memory.
    """
    total, first, size = 0, -1, a.element_size()
    word = _INTEGERS[min(size, _WORD)]
    pieces = byte_view(a).split(_PIECE * size), byte_view(b).split(_PIECE * size)
    for number, (ours, theirs) in enumerate(zip(*pieces, strict=True)):
        # An element wider than a word is several words.
        words = ours.view(word) != theirs.view(word)
        differs = words.reshape(-1, max(1, size // _WORD)).any(dim=1)
        found = int(differs.sum())
        if found and first < 0:
            first = number * _PIECE + int(differs.to(torch.uint8).argmax())
        total += found
    return total, first


def count_not_finite(tensor: Tensor) -> int:
    """Return how many elements are NaN or infinite; 0 for dtypes that cannot be."""
    tensor = plain(tensor)
    if not _can_be_infinite(tensor):
        return 0
    pieces = byte_view(tensor).view(tensor.dtype).split(_PIECE)
    count = 0
    for piece in pieces:
        if not _has_finite_ends(piece):
            count += piece.numel() - int(_is_finite(piece).sum())
    return count


def differ_where_finite(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape differ in an element that is a finite
    number in both.
    """
    if not _can_be_infinite(a):
        return not same_bytes(byte_view(a), byte_view(b))
    views = byte_view(a).cpu(), byte_view(b).cpu()
    finite = _is_finite(views[0].view(a.dtype)) & _is_finite(views[1].view(a.dtype))
    rows = [view.view(finite.numel(), a.element_size())[finite] for view in views]
    return not torch.equal(*rows)


def _can_be_infinite(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype is not _PACKED


def _has_finite_ends(row: Tensor) -> bool:
    """Return whether the least and the largest element are finite, and so all others.

    ``torch.aminmax`` propagates NaN and reads as fast as memory does. Of bfloat16
    ``torch.isfinite`` takes forty times as long, which was felt where models are compared.
    """
    if row.element_size() == 1 or not row.numel():
        return False
    if row.is_complex():
        row = torch.view_as_real(row)
    least, largest = torch.aminmax(row)
    return bool(torch.isfinite(least) and torch.isfinite(largest))


def _is_finite(row: Tensor) -> Tensor:
    """Do as ``torch.isfinite``, which does not take float8 and narrower dtypes."""
    if row.element_size() == 1:
        row = row.to(torch.float32)
    return torch.isfinite(row)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether some byte in memory belongs to both tensors."""
    try:
        sides = held(a), held(b)
    except NoBytes:
        return False

    if not (a.numel() and b.numel()) or sides[0].device != sides[1].device:
        return False
    starts, stops = [], []
    for side in sides:
        starts.append(side.data_ptr())
        stops.append(side.data_ptr() + span(side.shape, side.stride()) * side.element_size())
    if max(starts) >= min(stops):
        return False

    # Views of one storage may lie between each other, as columns do: mark the bytes of one, and
    # look for the other's.
    first = min(starts)
    marks = torch.zeros(max(stops) - first, dtype=torch.bool)
    views = []
    for side, start in zip(sides, starts, strict=True):
        width = side.element_size()
        strides = (*(stride * width for stride in side.stride()), 1)
        views.append(marks.as_strided((*side.shape, width), strides, start - first))

    views[0].fill_(True)
    return bool(views[1].any())


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one of a tensor that is not empty.

    >>> span((2, 3), (8, 1))
    11
    """
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def element_at(tensor: Tensor, place: int) -> Tensor:
    """Return the element at a place in row-major order as a tensor without dimensions, of any
    dtype.
    """
    tensor = plain(tensor)
    size = tensor.element_size()
    raw = byte_view(tensor)[place * size : (place + 1) * size]
    return raw.clone().view(tensor.dtype).view(())


def pattern(element: Tensor) -> str:
    """Return the bits of a one-element tensor in hexadecimal, most significant first.

    >>> pattern(torch.tensor(1.0, dtype=torch.bfloat16))
    '0x3f80'
    >>> pattern(torch.tensor(1 - 0j, dtype=torch.complex64))
    '(0x3f800000, 0x00000000)'
    """
    if element.is_complex():
        real, imaginary = torch.view_as_real(plain(element)).reshape(-1)
        return f"({pattern(real)}, {pattern(imaginary)})"
    raw = bytes(byte_view(element).tolist())
    return f"0x{int.from_bytes(raw, sys.byteorder):0{2 * len(raw)}x}"


def value(element: Tensor) -> str:
    """Return a one-element tensor as a decimal that no neighbour shares.

    Returns its bits if torch knows no number for them.

    >>> value(torch.tensor(0.1)), value(torch.tensor(-0.0)), value(torch.tensor(7))
    ('0.100000001', '-0', '7')
    """
    try:
        item: Any = plain(element).item()
    except (NotImplementedError, RuntimeError):  # of uint4, bits8, float4_e2m1fn_x2 and the like
        return pattern(element)
    if not element.is_floating_point():
        return str(item)
    return format(item, f".{_DIGITS.get(element.dtype, _FEW_DIGITS)}g")


# A power of two without a sign, whose bits count its numbers.
_MAGNITUDE = torch.float8_e8m0fnu
_PACKED = torch.float4_e2m1fn_x2  # two numbers a byte, none of them NaN or infinite


def ulp_distance(a: Tensor, b: Tensor) -> int | None:
    """Return the ULPs between two one-element tensors.

    Returns None for NaN, for different dtypes, and for dtypes that are not floating point.
    """
    if a.dtype != b.dtype or not a.is_floating_point() or a.dtype is _PACKED:
        return None
    if a.to(torch.float64).isnan() or b.to(torch.float64).isnan():
        return None
    return abs(_place(a) - _place(b))


def _place(element: Tensor) -> int:
    """Return the signed place of a number among all numbers of its format; 0 for both zeros."""
    raw = bytes(byte_view(element).tolist())
    sign = 1 << (8 * len(raw) - 1)
    unsigned = int.from_bytes(raw, sys.byteorder)
    if element.dtype is _MAGNITUDE:
        return unsigned
    # Floats keep their sign apart; so their magnitudes count away from zero on either side.
    if unsigned & sign:
        return sign - unsigned
    return unsigned
