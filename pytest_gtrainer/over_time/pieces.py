"""Copies of a trainer's state, found through its attributes, that can be compared and put back."""

import copy
import enum
import inspect
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from pytest_gtrainer._torch.random_states import GeneratorStates, random_state
from pytest_gtrainer.numerics.bits import byte_view, same_bytes

RANDOM = "random states"
_PLAIN = (
    *(bool, int, float, complex, str, bytes, bytearray, enum.Enum, type(None)),
    *(array, Decimal, Fraction, timedelta),
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Moments stand in a state dict by the numbers of their parameters.
_RECORDED_OF_OPTIMIZER = ("['param_groups']", *(f"['state'][{digit}" for digit in range(10)))

Get: TypeAlias = Callable[[], Any]
Put: TypeAlias = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy of one piece of state, and what puts it back.

    Attributes:
        recorded: places that a record of the training compares, too.
    """

    state: Any
    put_back: Callable[[], object]
    recorded: tuple[str, ...] = ()

    def equals(self, other: "Piece") -> bool:
        """Return whether both have the same bits."""
        return not list(differing(self.state, other.state))


def pieces_of(trainer: Any) -> dict[str, Piece]:
    """Return the pieces of a trainer by name, as they are now.

    These are its attributes, and those of the objects in them and in lists, tuples and dicts, that
    are numbers, texts, tensors, arrays, containers of such, generators of random numbers, or
    objects with a ``state_dict``; and the random states of the process.
    """
    walk = _Walk()
    walk.plan_attributes("", trainer, lambda: trainer)
    while walk.todo:
        walk.visit(*walk.todo.popleft())
    generators = GeneratorStates.now()  # first: it may import NumPy's, which are then read, too
    walk.found[RANDOM] = Piece(random_state(), generators.put_back)
    return walk.found


class _Walk:
    """A walk from a trainer to its pieces, the nearest first, whose names are the shortest.

    Pieces are read and written through the trainer, as a load may replace its lists and objects.
    """

    def __init__(self) -> None:
        self.found: dict[str, Piece] = {}
        self.todo: deque[tuple[str, Get, Put]] = deque()
        self.seen: set[int] = set()

    def visit(self, name: str, get: Get, put: Put) -> None:
        """Find the piece that a value is, or plan to visit its parts."""
        value = get()
        if _is_state(value):
            self.found[name] = Piece(kept := _copy(value), lambda: put(_restored(get(), kept)))
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, list | tuple | deque):
            for place in range(len(value)):
                part = partial(_item, get, place), partial(_put_item, get, put, place)
                self.todo.append((f"{name}.{place}", *part))
        elif isinstance(value, Mapping):
            for key in value:
                part = partial(_item, get, key), partial(_put_item, get, put, key)
                shown = f".{key}" if isinstance(key, str) else f"[{key!r}]"
                self.todo.append((f"{name}{shown}", *part))
        elif access := _generator_access(value):
            read, write = access
            self.found[name] = Piece(drawn := read(value), lambda: write(get(), drawn))
        elif _has_state_dict(value):
            state = _copy(value.state_dict())
            recorded = _RECORDED_OF_OPTIMIZER if isinstance(value, Optimizer) else ()
            self.found[name] = Piece(state, lambda: get().load_state_dict(state), recorded)
            self.plan_attributes(name, value, get, held=state)
            if isinstance(value, nn.Module):
                self.plan_submodules(name, value, get)
        elif _may_have_parts(value):
            self.plan_attributes(name, value, get)

    def plan_attributes(
        self, name: str, owner: Any, get: Get, *, held: Mapping[str, Any] | None = None
    ) -> None:
        """Plan to visit the attributes of an object, but those that its state dict holds.

        Args:
            held: its state dict, if it has one.
        """
        is_torchs = _package(owner) == "torch" or isinstance(owner, Optimizer)
        for key in _attributes(owner):
            # Private attributes of torch are its own affair.
            is_private = is_torchs and key.startswith("_")
            if isinstance(owner, nn.Module):
                is_private |= key in _OF_EVERY_MODULE and key != "training"
            if is_private or key in (held or ()):
                continue
            access = partial(_attribute, get, key), partial(_set_attribute, get, key)
            self.todo.append((f"{name}.{key}".removeprefix("."), *access))

    def plan_submodules(self, name: str, model: nn.Module, get: Get) -> None:
        """Plan to visit plain attributes of all modules, as ``training`` and counters."""
        for path, module in model.named_modules():
            if id(module) not in self.seen:
                self.seen.add(id(module))
                read = partial(_submodule, get, path)
                self.plan_attributes(f"{name}.{path}", module, read, held={})


def _is_state(value: Any, inside: tuple[int, ...] = ()) -> bool:
    """Return whether a value is a number, a text, a tensor, an array, or a container of such."""
    if isinstance(value, Mapping | list | tuple | deque | set | frozenset):
        if id(value) in inside:
            return False  # a container that holds itself
        parts = value.values() if isinstance(value, Mapping) else value
        return all(_is_state(part, (*inside, id(value))) for part in parts)
    return isinstance(value, (*_PLAIN, Tensor)) or _is_of_numpy(value)


def _is_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray))


def _has_state_dict(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _may_have_parts(value: Any) -> bool:
    """Return whether a trainer's author may keep state in the attributes of an object.

    Modules of Python, functions, locks, files, loggers and groups of ranks have no state of a
    training. Data are what steps read, and may be large.
    """
    if isinstance(value, SimpleNamespace):
        return True
    if isinstance(value, Dataset) or _package(value) in sys.stdlib_module_names:
        return False
    return _package(value) != "torch" or type(value).__module__.startswith("torch.utils.data")


def _attributes(owner: Any) -> list[str]:
    """Return the names of all attributes that an object has itself, in slots or not."""
    names = list(getattr(owner, "__dict__", ()))
    for cls in type(owner).__mro__:
        for key, value in vars(cls).items():
            is_slot = inspect.ismemberdescriptor(value) and not key.startswith("__")
            if is_slot and hasattr(owner, key):
                names.append(key)
    return names


def _generator_access(value: Any) -> tuple[Callable[[Any], Any], Callable[..., Any]] | None:
    """Return functions that read and write the state of a random generator; else None."""
    if isinstance(value, torch.Generator):
        return torch.Generator.get_state, torch.Generator.set_state
    if type(value) is random.Random:
        return random.Random.getstate, random.Random.setstate
    if "numpy.random" in sys.modules:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.random.RandomState):
            return numpy.random.RandomState.get_state, numpy.random.RandomState.set_state
        if isinstance(value, numpy.random.Generator):
            return _read_bit_generator, _write_bit_generator
    return None


def _read_bit_generator(generator: Any) -> Any:
    return copy.deepcopy(generator.bit_generator.state)


def _write_bit_generator(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _attribute(get: Get, name: str) -> Any:
    return getattr(get(), name)


def _set_attribute(get: Get, name: str, value: Any) -> None:
    object.__setattr__(get(), name, value)  # of a frozen dataclass, too


def _submodule(get: Get, path: str) -> nn.Module:
    module: nn.Module = get().get_submodule(path)
    return module


def _item(get: Get, key: Any) -> Any:
    return get()[key]


def _put_item(get: Get, put: Put, key: Any, value: Any) -> None:
    container = get()
    if isinstance(container, tuple):
        parts = list(container)
        parts[key] = value
        put(_tuple_like(container, parts))
    else:
        container[key] = value


def _tuple_like(container: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    make: Any = getattr(container, "_make", tuple)  # a named tuple has it
    made: tuple[Any, ...] = make(parts)
    return made


def _copy(value: Any) -> Any:
    """Return a copy whose tensors stand alone."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple | deque):
        parts = [_copy(part) for part in value]
        return _tuple_like(value, parts) if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        return {key: _copy(part) for key, part in value.items()}
    return copy.deepcopy(value)


def _restored(now: Any, kept: Any) -> Any:
    """Return ``kept``, written into the containers and tensors of ``now``, which others may hold,
    where it fits.
    """
    if isinstance(kept, Tensor):
        if isinstance(now, Tensor) and now.shape == kept.shape:
            with torch.no_grad():
                return now.copy_(kept)
        return kept.clone()
    if isinstance(kept, tuple):
        parts = list(kept)
        if isinstance(now, tuple) and len(now) == len(kept):
            parts = [_restored(*pair) for pair in zip(now, kept, strict=True)]
        return _tuple_like(kept, parts)
    if isinstance(kept, list) and isinstance(now, list | deque):
        parts = [_restored(*pair) for pair in zip(now, kept, strict=False)]
        parts += map(_copy, kept[len(parts) :])
        now.clear()
        now.extend(parts)
        return now
    if isinstance(kept, Mapping) and isinstance(now, MutableMapping):
        parts_by_key = {key: _restored(now.get(key), part) for key, part in kept.items()}
        now.clear()
        now.update(parts_by_key)
        return now
    return _copy(kept)


def differing(a: Any, b: Any, place: str = "") -> Iterator[str]:
    """Yield the places, as ``['tokens']``, at which two states have other bits."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            if key in a and key in b:
                yield from differing(a[key], b[key], f"{place}[{key!r}]")
            else:
                yield f"{place}[{key!r}]"
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            yield place
            return
        for number, pair in enumerate(zip(a, b, strict=True)):
            yield from differing(*pair, f"{place}[{number}]")
    elif not _same(a, b):
        yield place


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape, a.layout, a.device) != (b.dtype, b.shape, b.layout, b.device):
            return False
        if a.is_meta:
            return True  # there are no values
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        return same_bytes(byte_view(a), byte_view(b))
    if type(a) is not type(b):
        return False
    if _is_of_numpy(a):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, float | complex):
        return repr(a) == repr(b)  # NaN equals NaN, and -0.0 is not 0.0
    # Objects without ``__eq__`` compare by identity: a copy would always differ.
    if type(a).__eq__ is object.__eq__:
        return True
    return bool(a == b)
