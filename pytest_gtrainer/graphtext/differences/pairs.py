"""Which value of one graph is which of the other.

Names and places do not tell it: one more operator renumbers names, and a schedule moves places. So values
are paired by what they compute, from the most exact to the least, each within its module:

1. the digest: all that it is computed from is equal;
2. *two rings*: operator, type and literals of the value and of its operands, as what is computed before
   these may have changed;
3. one ring, and those operands that have a partner by now; then the ring alone;
4. name and operator, then operator only: something of the value itself has changed;
5. the digest, in any module: it has moved to another one.

What is left has been lost or gained. Cost: one walk for each of these.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.dataflow import Dataflow
from pytest_gtrainer.graphtext.dataflow import dataflow as dataflow_of
from pytest_gtrainer.graphtext.dataflow_digests import Digests, digests_of
from pytest_gtrainer.graphtext.sections import Record

Keys = Callable[[int], Hashable]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two graphs."""

    graph: Dataflow
    digests: Digests

    @classmethod
    def of(cls, records: Iterable[Record]) -> Side:
        graph = dataflow_of(records)
        return cls(graph, digests_of(graph))


@dataclass(frozen=True, slots=True)
class Pairs:
    """For each value of one side its place on the other, None if it has none there; and these on either side."""

    to_new: list[int | None]
    to_old: list[int | None]
    left: tuple[list[int], list[int]]

    @property
    def places(self) -> Iterable[tuple[int, int]]:
        """Places on both sides, in the order of the old schedule."""
        return ((old, new) for old, new in enumerate(self.to_new) if new is not None)

    def lost(self, old: Dataflow) -> list[int]:
        return [place for place in self.left[0] if old.values[place].operator]

    def gained(self, new: Dataflow) -> list[int]:
        return [place for place in self.left[1] if new.values[place].operator]


def paired(old: Side, new: Side) -> Pairs:
    """Pair the values of two graphs."""
    sides = (old, new)
    counts = [len(side.graph.values) for side in sides]
    pairs = Pairs([None] * counts[0], [None] * counts[1], (list(range(counts[0])), list(range(counts[1]))))
    _pair(pairs, [_in_scope(side, side.digests.values) for side in sides])
    if not any(pairs.left):
        return pairs
    known: dict[Hashable, int] = {}
    rings = [_rings(side, known) for side in sides]
    _pair(pairs, [of[1].__getitem__ for of in rings])  # the inner ring says the module, too
    _pair(pairs, [_by_operands(*each) for each in zip(sides, rings, _names(pairs), strict=True)])
    _pair(pairs, [of[0].__getitem__ for of in rings])
    for name in (True, False):
        _pair(pairs, [_by_operator(side, name) for side in sides])
    _pair(pairs, [side.digests.values.__getitem__ for side in sides])
    return pairs


def _pair(pairs: Pairs, keys: Sequence[Keys]) -> None:
    """Pair what is left and has equal keys, in the order of the schedules."""
    ours, theirs = keys
    waiting: dict[Hashable, deque[int]] = defaultdict(deque)
    for place in pairs.left[0]:
        waiting[ours(place)].append(place)
    for place in pairs.left[1]:
        if found := waiting.get(theirs(place)):
            pairs.to_old[place] = found[0]
            pairs.to_new[found.popleft()] = place
    for left, partners in zip(pairs.left, (pairs.to_new, pairs.to_old), strict=True):
        left[:] = [place for place in left if partners[place] is None]


def _in_scope(side: Side, told: Sequence[Hashable]) -> Keys:
    values = side.graph.values
    return lambda place: (values[place].scope, told[place])


def _names(pairs: Pairs) -> tuple[list[int | None], list[int | None]]:
    """What both sides call a value that has a partner: its place on the old side."""
    ours = [None if partner is None else place for place, partner in enumerate(pairs.to_new)]
    return ours, list(pairs.to_old)


def _by_operands(side: Side, rings: Sequence[Sequence[int]], names: Sequence[int | None]) -> Keys:
    """By the value itself and those of its operands that have a partner; without any it is like no other."""
    values, own = side.graph.values, rings[0]

    def key(place: int) -> Hashable:
        known = [names[source] for source in values[place].sources]
        is_told = any(name is not None for name in known)
        return (own[place], *known) if is_told else (id(side), place)

    return key


def _by_operator(side: Side, by_name: bool) -> Keys:
    values = side.graph.values

    def key(place: int) -> Hashable:
        value = values[place]
        return value.scope, value.operator, value.name if by_name else ""

    return key


def _rings(side: Side, known: dict[Hashable, int]) -> list[list[int]]:
    """For one ring and for two the numbers of all values; ``known`` hands out equal numbers to equal keys."""
    own: list[int] = []
    for scope, _, operator, kind, arguments, operands, *_ in side.graph.values:
        literals = tuple([operand for operand in operands if isinstance(operand, str)])
        own.append(known.setdefault((scope, operator, kind, arguments, literals), len(known)))
    sources = (value.sources for value in side.graph.values)
    around = [(number, *[own[source] for source in of]) for number, of in zip(own, sources, strict=True)]
    return [own, [known.setdefault(numbers, len(known)) for numbers in around]]
