"""Values of a graph on all ranks.

A value is *uniform*, one object for all ranks, or ``PerRank``. Its *kind* says which ranks share it: those of a group
share what they gathered. An operator runs once for each class of ranks that share all its operands. The state of the
random generator is such a value, too.

Before ranks write into a tensor, memory that they share becomes memory of their own (S7): every live value that looks
into it, through views too, gets a copy for each rank.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import storage_id
from pytest_gtrainer.worlds import ranks_by

Values = dict[fx.Node, Any]
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Which ranks share: the number of every rank's class, and the ranks of each; one instance for equal classes."""

    class_of: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]


class PerRank(list[Any]):
    """One value for each rank, in their order. Whatever is no PerRank is uniform: the same on all ranks."""

    __slots__ = ("kind",)

    def __init__(self, values: Iterable[Any], kind: Kind | None = None) -> None:
        super().__init__(values)
        self.kind = kind


class Kinds:
    """The kinds of a world of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._known: dict[tuple[int, ...], Kind] = {}
        self.uniform = self.by_key([None] * size)

    def by_key(self, keys: Sequence[Hashable]) -> Kind:
        """Ranks with equal keys share."""
        numbers: dict[Hashable, int] = {}
        class_of = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
        if class_of not in self._known:
            self._known[class_of] = Kind(
                class_of, tuple(map(tuple, ranks_by(enumerate(class_of)).values()))
            )
        return self._known[class_of]

    def of(self, value: Any) -> Kind:
        """The kind of a value, by identity of objects (equality of whole numbers) where it is not known yet.

        >>> Kinds(3).of(PerRank([2000, int("2000"), 1])).classes
        ((0, 1), (2,))
        """
        if type(value) is not PerRank:
            return self.uniform
        if value.kind is None:
            value.kind = self.by_key([own if type(own) is int else id(own) for own in value])
        return value.kind

    def common(self, kinds: Iterable[Kind]) -> Kind:
        """Ranks share a result if they share all operands."""
        own = set(kinds) - {self.uniform} or {self.uniform}
        return (
            own.pop()
            if len(own) == 1
            else self.by_key(list(zip(*(kind.class_of for kind in own), strict=True)))
        )

    def value(self, own: Sequence[Any]) -> Any:
        """The value that is ``own[rank]`` on every rank."""
        value = PerRank(own)
        return own[0] if self.of(value) is self.uniform else value


def interned(values: Iterable[Any]) -> list[Any]:
    """The same values, with one list or tuple instead of several that hold the same objects."""
    same: dict[tuple[int, ...], Any] = {}
    return [
        same.setdefault(tuple(map(id, value)), value) if isinstance(value, list | tuple) else value
        for value in values
    ]


def at(value: Any, rank: int) -> Any:
    """What ``rank`` has."""
    return value[rank] if type(value) is PerRank else value


def of_rank(value: Any, rank: int) -> Any:
    """What ``rank`` has of a value that may hold others, uniform or per rank.

    >>> of_rank([1, PerRank([2, 3])], rank=1)
    (1, 3)
    """
    if type(value) is PerRank:
        return value[rank]
    return (
        tuple(of_rank(item, rank) for item in value) if isinstance(value, list | tuple) else value
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value: itself, or those in a tuple, list or dict."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and from which to which of its bytes the tensor reaches."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.storage_offset() * tensor.itemsize
    return (
        storage_id(tensor),
        start,
        start + (last + 1) * tensor.itemsize if tensor.numel() else start,
    )


def make_private(values: Values, written: Iterable[fx.Node], size: int) -> set[int]:
    """Rebind ``values`` so that ranks can write to ``written`` unseen by each other: the storages that were copied."""
    storages = {storage for node in written for storage in storages_of(values[node])}
    shared = [node for node, value in values.items() if reaches(value, storages)]
    if _are_apart([values[node] for node in shared], storages):
        return set()
    copies = [
        _copied([at(values[node], rank) for node in shared], storages) for rank in range(size)
    ]
    for node in shared:
        values[node] = PerRank(_moved(at(values[node], rank), copies[rank]) for rank in range(size))
    return storages


def storages_of(value: Any) -> set[int]:
    """The memory of all tensors in ``value``, of all ranks."""
    return set(map(storage_id, tensors_in(value)))


def reaches(value: Any, storages: set[int]) -> bool:
    """Whether a tensor in ``value``, of any rank, lies in one of ``storages``."""
    return not storages.isdisjoint(map(storage_id, tensors_in(value)))


def _are_apart(values: list[Any], storages: set[int]) -> bool:
    """No uniform value among them, and no two ranks reach the same byte."""
    if any(type(value) is not PerRank for value in values):
        return False
    owned = ((rank, own) for value in values for rank, own in enumerate(value))
    spans = {(*_span(tensor), rank) for rank, own in owned for tensor in tensors_in(own)}
    furthest: dict[
        int, tuple[int, int]
    ] = {}  # of each storage: where the spans so far end, and whose they are
    for storage, start, stop, rank in sorted(span for span in spans if span[0] in storages):
        end, owner = furthest.get(storage, (0, rank))
        if start < end and owner != rank:
            return False
        furthest[storage] = max((end, owner), (stop, rank))
    return True


Copies = dict[
    int, tuple[Tensor, int]
]  # by storage, the copy of a part of it as bytes, and where that part begins


def _copied(own: list[Any], storages: set[int]) -> Copies:
    """Copies of what one rank's values reach in shared storages."""
    bounds: dict[int, tuple[int, int, Tensor]] = {}
    for tensor in tensors_in(own):
        storage, start, stop = _span(tensor)
        if storage in storages:
            first, last, _ = bounds.get(storage, (start, stop, tensor))
            bounds[storage] = (min(first, start), max(last, stop), tensor)
    copies = {}
    for storage, (start, stop, tensor) in bounds.items():
        start -= start % _ALIGNMENT
        window = torch.empty(0, dtype=torch.uint8).set_(
            tensor.untyped_storage(), start, (stop - start,), (1,)
        )
        copies[storage] = window.clone(), start
    return copies


def _moved(own: Any, copies: Copies) -> Any:
    """The value over the copies."""
    if isinstance(own, Tensor) and storage_id(own) in copies:
        copy, start = copies[storage_id(own)]
        offset = own.storage_offset() - start // own.itemsize
        return own.new_empty(0).set_(copy.untyped_storage(), offset, own.shape, own.stride())
    return type(own)(_moved(item, copies) for item in own) if isinstance(own, list | tuple) else own


class RankRandomStates:
    """Generator states, one for all ranks or one for each, by default the process's; a run continues from them."""

    def __init__(self, states: torch.Tensor | Sequence[torch.Tensor] | None = None) -> None:
        if states is None:
            states = torch.get_rng_state()
        self.states: Any = states if isinstance(states, torch.Tensor) else PerRank(states)

    @classmethod
    def of_ranks(cls, states: Sequence[torch.Tensor]) -> "RankRandomStates":
        """These states, one of each rank, as one where all are equal."""
        return cls(states[0] if all(torch.equal(states[0], state) for state in states) else states)

    def copy(self) -> "RankRandomStates":
        """The same states, to continue from apart from these."""
        return RankRandomStates(self.states.clone() if self.uniform else list(self.states))

    @property
    def uniform(self) -> bool:
        return type(self.states) is not PerRank

    @contextmanager
    def drawn_by(self, rank: int | None, size: int) -> Iterator[None]:
        """What is drawn inside, ``rank`` draws, or, for None, all ranks draw alike from uniform states."""
        if rank is not None and self.uniform:
            self.states = PerRank([self.states] * size)
        torch.set_rng_state(at(self.states, rank or 0))
        yield
        if rank is None:
            self.states = torch.get_rng_state()
        else:
            self.states[rank] = torch.get_rng_state()
