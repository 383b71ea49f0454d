"""Values of a graph on all ranks.

A value is *uniform*, one object for all ranks, or ``PerRank``. Its *kind* says which ranks share: the
ranks of a group, for example, share what they gathered. An operator runs once for each class of
ranks that share all its operands, never more often.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Which ranks have one and the same object.

    ``class_of`` numbers the class of every rank, ``classes`` holds the ranks of each; ``Kinds`` makes
    one instance only for the same classes.
    """

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
        self._common: dict[tuple[Kind, Kind], Kind] = {}
        self.uniform = self.by_key([None] * size)
        self.single = self.by_key(range(size))

    def by_key(self, keys: Sequence[Hashable]) -> Kind:
        """Ranks with equal keys share."""
        numbers: dict[Hashable, int] = {}
        class_of = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
        if class_of not in self._known:
            classes: list[list[int]] = [[] for _ in numbers]
            for rank, number in enumerate(class_of):
                classes[number].append(rank)
            self._known[class_of] = Kind(class_of, tuple(map(tuple, classes)))
        return self._known[class_of]

    def of_partition(self, partition: Sequence[Sequence[int]]) -> Kind:
        """The ranks of each part share."""
        keys = {rank: number for number, ranks in enumerate(partition) for rank in ranks}
        return self.by_key([keys[rank] for rank in range(self.size)])

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
        result = self.uniform
        for kind in kinds:
            if kind is not result:
                result = self._refined(result, kind)
        return result

    def _refined(self, one: Kind, other: Kind) -> Kind:
        key = (one, other)
        if key not in self._common:
            self._common[key] = self.by_key(list(zip(one.class_of, other.class_of, strict=True)))
        return self._common[key]

    def value(self, own: Sequence[Any], kind: Kind | None = None) -> Any:
        """The value that is ``own[rank]`` on every rank."""
        value = PerRank(own, kind)
        return own[0] if self.of(value) is self.uniform else value


def interned(values: Iterable[Any]) -> list[Any]:
    """The same values, with one list or tuple instead of several that hold the same objects."""
    same: dict[tuple[int, ...], Any] = {}
    return [
        same.setdefault(tuple(map(id, value)), value) if isinstance(value, list | tuple) else value for value in values
    ]


def at(value: Any, rank: int) -> Any:
    """What ``rank`` has."""
    return value[rank] if type(value) is PerRank else value


def is_per_rank(values: Iterable[Any]) -> bool:
    return any(type(value) is PerRank for value in values)


def of_rank(value: Any, rank: int) -> Any:
    """What ``rank`` has of a value that may hold others, uniform or per rank.

    >>> of_rank([1, PerRank([2, 3])], rank=1)
    (1, 3)
    """
    if type(value) is PerRank:
        return value[rank]
    return tuple(of_rank(item, rank) for item in value) if isinstance(value, list | tuple) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value: itself, or those in a tuple, list or dict."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
