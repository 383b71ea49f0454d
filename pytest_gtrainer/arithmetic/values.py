"""The value that an arithmetic has for a tensor: elements, and the dtype that they stand for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class NoMeaning(NotImplementedError):
    """An operator, or the way in which it is called, has no meaning in an arithmetic."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor in an arithmetic.

    Attributes:
        elements: int64, with the shape and strides of the tensor.
        dtype: that of the tensor.
        fits: a dtype that holds every element exactly: a cast to it and back changes nothing.
    """

    elements: Tensor
    dtype: torch.dtype
    fits: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.elements.shape


def spell(argument: Any) -> Any:
    """Return what a kernel depends on besides elements; equal ones have equal reprs."""
    if isinstance(argument, Value):
        return ("tensor", tuple(argument.shape), argument.elements.stride(), str(argument.dtype))
    if isinstance(argument, Tensor):
        return ("tensor", tuple(argument.shape), argument.stride(), str(argument.dtype))
    if isinstance(argument, list | tuple):
        return tuple(map(spell, argument))
    if isinstance(argument, dict):
        return tuple(sorted((name, spell(value)) for name, value in argument.items()))
    return (
        argument if isinstance(argument, bool | int | str) or argument is None else repr(argument)
    )
