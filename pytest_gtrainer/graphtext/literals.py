"""How constants are spelled: those that a text can hold as they are, the others by a digest."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any

import torch

from pytest_gtrainer._torch.operators import HigherOrderOperator, OpOverload
from pytest_gtrainer._torch.values import FakeTensor
from pytest_gtrainer.graphtext.operators import operator_text
from pytest_gtrainer.graphtext.vocabulary import DTYPES, spell_dtype

_SMALL = 8
"""Constant tensors of at most so many elements show their values, larger ones a digest."""
PLAIN = (type(None), bool, int, float, str, complex)


def spell_literal(value: Any) -> str | None:
    """A constant that depends on nothing else; None if it has no spelling.

    >>> spell_literal(torch.bfloat16), spell_literal(-0.0), spell_literal(torch.device("cuda", 1))
    ('bf16', '-0.0', 'device("cuda")')
    """
    spell = SPELLINGS.get(type(value))
    if spell is not None:
        return spell(value)
    return operator_text(value) if isinstance(value, OpOverload | HigherOrderOperator) else None


def _last_word(value: torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


SPELLINGS: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((*PLAIN, range), repr),
    torch.dtype: spell_dtype,
    torch.layout: _last_word,
    torch.memory_format: _last_word,
    torch.device: lambda value: f'device("{value.type}")',
}
"""How constants of a type are spelled; none of these types has subclasses that are spelled alike."""


def tensor_content(value: torch.Tensor) -> str:
    """What a constant holds: by content, not by name, as the tracer's numbering of constants drifts."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return "None"
    if value.numel() <= _SMALL and value.dtype in DTYPES:
        return repr(value.tolist())
    return repr(_tensor_digest(value))


def _tensor_digest(value: torch.Tensor) -> str:
    content = bytes_of(value)
    memory = ctypes.string_at(content.data_ptr(), content.numel())  # `numpy()` would need NumPy
    return "sha256:" + hashlib.sha256(memory).hexdigest()[:16]


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, element by element, whatever its strides."""
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def other_constant(value: Any) -> str:
    """A constant of a type without a spelling, by its digest.

    >>> other_constant(frozenset([3])) == other_constant(frozenset([4]))
    False
    """
    name, digest = type(value).__name__, object_digest(value)
    return f"const({name!r})" if digest == name else f"const({name!r}, {digest!r})"


def object_digest(value: Any) -> str:
    """The digest of an object's ``repr``; the name of its type where that is an address."""
    shown = repr(value)
    return type(value).__name__ if " at 0x" in shown else hashlib.sha256(shown.encode()).hexdigest()[:12]


def digest_of(value: Any) -> str | None:
    """The digest by which a text tells a tensor or an object; None if it tells the value itself."""
    if isinstance(value, torch.Tensor):
        told = tensor_content(value)
        return told.strip("'") if told.startswith("'sha256:") else None
    if spell_literal(value) is not None or isinstance(value, slice | torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    return object_digest(value)
