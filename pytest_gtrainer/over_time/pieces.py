"""The pieces of a trainer's state, as attributes show them: what a load changes, and what can be
put back to before it.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

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

    These are attributes with a ``state_dict``, numbers, numbers of attributes that are plain
    objects, and the random states of the process.
    """
    found = {}
    for name, holder, key, value in _values(trainer):
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            state = pytree.tree_map(_copy, value.state_dict())
            found[name] = Piece(state, partial(value.load_state_dict, state))
        elif type(value) in (int, float):
            found[name] = Piece(value, partial(setattr, holder, key, value))
    found[RANDOM] = Piece(random_state(), GeneratorStates.now().put_back)
    return found


def _values(trainer: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield values by name, with the object that has them and the attribute's name."""
    for key, value in vars(trainer).items():
        yield key, trainer, key, value
        if isinstance(value, list | tuple):
            for place, part in enumerate(value):
                yield f"{key}.{place}", trainer, "", None if type(part) in (int, float) else part
        elif not hasattr(value, "load_state_dict") and hasattr(value, "__dict__"):
            for inner, part in vars(value).items():
                yield f"{key}.{inner}", value, inner, part


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and same_bytes(byte_view(a), byte_view(b))
    return type(a) is type(b) and bool(a == b)
