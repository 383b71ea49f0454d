"""Copies of a trainer's state, found through its attributes, that can be compared and put back."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pytest_gtrainer._torch.random_states import GeneratorStates, random_state
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.numerics.bits import byte_view, same_bytes

RANDOM = "random states"


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy of one piece of state, and what puts it back."""

    state: Any
    put_back: Callable[[], object]

    def equals(self, other: "Piece") -> bool:
        """Return whether both have the same bits."""
        own, spec = pytree.tree_flatten(self.state)
        others, other_spec = pytree.tree_flatten(other.state)
        return spec == other_spec and all(map(_same, own, others))


def pieces_of(trainer: Any) -> dict[str, Piece]:
    """Return the pieces of a trainer by name, as they are now.

    These are attributes with a ``state_dict``, tensors and numbers; those inside of its lists,
    dicts and plain objects; and the random states of the process.
    """
    found = {}
    for name, get, put in _places(trainer):
        value = get()
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            state = pytree.tree_map(_copy, value.state_dict())
            found[name] = Piece(state, partial(_load, get, state))
        elif isinstance(value, Tensor):
            kept = _copy(value)
            found[name] = Piece(kept, partial(_write, get, put, kept))
        elif type(value) in (int, float):
            found[name] = Piece(value, partial(put, value))
    found[RANDOM] = Piece(random_state(), GeneratorStates.now().put_back)
    return found


Get: TypeAlias = Callable[[], Any]
Put: TypeAlias = Callable[[Any], None]


def _places(trainer: Any) -> Iterator[tuple[str, Get, Put]]:
    """Yield the places of values by name, each as functions that read and write it.

    They go through the trainer, as a load may replace its lists and objects.
    """
    for key, value in vars(trainer).items():
        get = partial(getattr, trainer, key)
        yield key, get, partial(setattr, trainer, key)
        if isinstance(value, list | tuple):
            for place, part in enumerate(value):
                # Nothing can be put into a tuple.
                if isinstance(value, tuple) and not hasattr(part, "load_state_dict"):
                    continue
                yield f"{key}.{place}", partial(_item, get, place), partial(_put_item, get, place)
        elif isinstance(value, dict):
            for name in value:
                yield f"{key}.{name}", partial(_item, get, name), partial(_put_item, get, name)
        elif not hasattr(value, "load_state_dict") and hasattr(value, "__dict__"):
            for name in vars(value):
                yield f"{key}.{name}", partial(_part, get, name), partial(_put_part, get, name)


def _item(get: Get, key: Any) -> Any:
    return get()[key]


def _put_item(get: Get, key: Any, value: Any) -> None:
    get()[key] = value


def _part(get: Get, name: str) -> Any:
    return getattr(get(), name)


def _put_part(get: Get, name: str, value: Any) -> None:
    setattr(get(), name, value)


def _load(get: Get, state: Any) -> None:
    get().load_state_dict(state)


def _write(get: Get, put: Put, value: Tensor) -> None:
    """Write into the tensor, which others may hold, or put another one where it does not fit."""
    now = get()
    if isinstance(now, Tensor) and now.shape == value.shape:
        with torch.no_grad():
            now.copy_(value)
    else:
        put(value)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        are_alike = (a.dtype, a.shape) == (b.dtype, b.shape)
        return are_alike and same_bytes(byte_view(a), byte_view(b))
    if type(a) is not type(b):
        return False
    # Objects without ``__eq__`` compare by identity: a copy would always differ.
    if type(a).__eq__ is object.__eq__:
        return True
    same = a == b
    return bool(same.all() if hasattr(same, "all") else same)  # of an array of NumPy
