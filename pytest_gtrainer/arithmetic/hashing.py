"""Fingerprints: 64-bit hashes of expressions, an int64 for each element.

The hash of an expression depends on its operator and on the fingerprints of its operands, so equal
expressions have equal fingerprints, and different ones differ but for one chance in 2**64. Python's
``hash`` would not do: it differs between processes.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MASK = 2**64 - 1
_FIRST, _SECOND = 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F  # odd, with about half of their bits set
_STEP = 0x51ED270B7A3F1B5
_EMPTY = 77


def signed(number: int) -> int:
    """Return the int64 that has the low 64 bits of a number."""
    number &= _MASK
    return number - 2**64 if number >= 2**63 else number


def of_name(*parts: Any) -> int:
    """Return the hash of what has a repr that is equal in all processes."""
    hashed = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def _shifted(elements: Tensor, bits: int) -> Tensor:
    """Return the high bits, with zeros in front: a shift of int64 alone would copy the sign."""
    return (elements >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def scramble(elements: Tensor) -> Tensor:
    """Return a one-to-one function of each element, which keeps 0 where it is."""
    result = (elements ^ _shifted(elements, 32)).mul_(signed(_FIRST))
    result = result.bitwise_xor_(_shifted(result, 29)).mul_(signed(_SECOND))
    return result.bitwise_xor_(_shifted(result, 32))


def mix(seed: int, operands: Sequence[Tensor], *, commutes: bool = False) -> Tensor:
    """Return a hash of the operands, element by element.

    Args:
        operands: tensors that broadcast.
        commutes: give the same for the operands in any order.
    """
    total: Tensor | None = None
    for place, operand in enumerate(operands):
        own = scramble(operand + signed((1 if commutes else place + 1) * _STEP))
        total = own if total is None else total + own
    if total is None:
        return torch.tensor(seed)
    return scramble(total + seed)


# Powers of ``_SECOND`` from the first on: a longer table begins as a shorter one.
_powers = torch.full((1,), signed(_SECOND), dtype=torch.int64)


def _powers_up_to(count: int) -> Tensor:
    global _powers
    if count > len(_powers):
        steps = torch.full((max(count, 2 * len(_powers)),), signed(_SECOND), dtype=torch.int64)
        _powers = steps.cumprod(0)
    return _powers[:count]


def fold(elements: Tensor, dims: Sequence[int]) -> Tensor:
    """Return one hash of the elements along ``dims``, in their order."""
    reduced = sorted(dim % elements.ndim for dim in dims) if elements.ndim else []
    kept = [dim for dim in range(elements.ndim) if dim not in reduced]
    shape = [elements.shape[dim] for dim in kept]
    if not elements.numel():
        return torch.full(shape, signed(_EMPTY), dtype=torch.int64)
    flat = elements.permute(kept + reduced).reshape(*shape, -1)
    count = flat.shape[-1]
    weighted = scramble(flat + _EMPTY) * _powers_up_to(count)
    return scramble(weighted.sum(-1) + count)
