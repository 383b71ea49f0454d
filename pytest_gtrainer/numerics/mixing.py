"""A hash of bytes in torch's own integer operators: it runs where the tensor lies and depends on nothing else.

Each 8-byte word is mixed with its position (the finaliser of splitmix64, Steele, Lea and Flood 2014), and the
mixed words are added up modulo 2^64, twice, with different constants. Integer addition is associative, so every
device and every number of threads gives the same sum; positions are mixed in, so a swapped pair gives another.
Not made against an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 8
_POSITION = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31


def mix128(view: Tensor) -> bytes:
    """Sixteen bytes for a byte view ``uint8[n]``, on any device.

    >>> a = torch.arange(40, dtype=torch.uint8)
    >>> mix128(a) == mix128(a.clone()), mix128(a) == mix128(a.flip(0))
    (True, False)
    """
    words = _words(view)
    positions = torch.arange(1, words.numel() + 1, device=view.device)
    sums = [_mixed(words ^ _mixed(positions * _signed(constant))).sum() for constant in _POSITION]
    return b"".join(int(total).to_bytes(_WORD, "little", signed=True) for total in torch.stack(sums).tolist())


def _words(view: Tensor) -> Tensor:
    """The bytes as ``int64``, with zeros behind the last; copied where they do not lie on a word."""
    rest = -view.numel() % _WORD
    if rest:
        view = torch.nn.functional.pad(view, (0, rest))
    elif view.storage_offset() % _WORD:
        view = view.clone()
    return view.view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    for shift, factor in _STEPS:
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    return words ^ _shifted(words, _LAST)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shifted right, with zeros coming in: torch's own shift of a negative number brings in ones."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(constant: int) -> int:
    """The 64-bit constant as torch takes it.

    >>> _signed(2**64 - 1)
    -1
    """
    return constant - 2**64 if constant >= 2**63 else constant
