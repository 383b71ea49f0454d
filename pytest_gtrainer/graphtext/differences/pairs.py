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

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.dataflow import Dataflow
from pytest_gtrainer.graphtext.dataflow import dataflow as dataflow_of
from pytest_gtrainer.graphtext.dataflow_digests import Digests, Numbers, digests_of
from pytest_gtrainer.graphtext.sections import Record


@dataclass(frozen=True, slots=True)
class Side:
    """One of two graphs; what has equal digests has equal numbers on both sides."""

    graph: Dataflow
    digests: Digests[int]


def sides_of(old: Iterable[Record], new: Iterable[Record]) -> tuple[Side, Side]:
    """The two graphs to compare."""
    numbers = Numbers()
    before, after = dataflow_of(old), dataflow_of(new)
    return Side(before, digests_of(before, numbers)), Side(after, digests_of(after, numbers))


@dataclass(frozen=True, slots=True)
class Pairs:
    """For each value of one side its place on the other, None if it has none there.

    Attributes:
        places: on both sides, in the order of the old schedule.
        elsewhere: those of ``places`` that may be in another module than before.
        left: the places of either side that have none on the other.
    """

    to_new: list[int | None]
    to_old: list[int | None]
    places: list[tuple[int, int]]
    elsewhere: list[tuple[int, int]]
    left: tuple[list[int], list[int]]

    def lost(self, old: Dataflow) -> list[int]:
        return [place for place in self.left[0] if old.values[place].operator]

    def gained(self, new: Dataflow) -> list[int]:
        return [place for place in self.left[1] if new.values[place].operator]


def paired(old: Side, new: Side) -> Pairs:
    """Pair the values of two graphs."""
    search = _Search((old, new))
    elsewhere = search.run()
    to_new, to_old = search.partners
    places = [(place, partner) for place, partner in enumerate(to_new) if partner is not None]
    return Pairs(to_new, to_old, places, sorted(elsewhere), search.left)


_Keys = Sequence[Hashable]


class _Search:
    """The partners found so far, and the places that are left; the old side first.

    Keys are those of the places that are left, one list a side.
    """

    def __init__(self, sides: tuple[Side, Side]) -> None:
        old, new = (len(side.graph.values) for side in sides)
        self._sides = sides
        self.partners: tuple[list[int | None], list[int | None]] = ([None] * old, [None] * new)
        self.left = (list(range(old)), list(range(new)))

    def run(self) -> list[tuple[int, int]]:
        """Find partners; returns the pairs that were found in any module."""
        digests = [side.digests.values for side in self._sides]
        scopes = [[value.scope for value in side.graph.values] for side in self._sides]
        self._pair([list(zip(*told, strict=True)) for told in zip(scopes, digests, strict=True)])
        if not any(self.left):
            return []
        known: dict[Hashable, int] = {}
        own, around = zip(*[_rings(side.graph, known) for side in self._sides], strict=True)
        self._pair(self._of_left(around))  # the inner ring says the module, too
        self._pair(self._by_operands(own))
        self._pair(self._of_left(own))
        for by_name in (True, False):
            self._pair(self._by_operator(by_name))
        return self._pair(self._of_left(digests))

    def _pair(self, keys: Sequence[_Keys]) -> list[tuple[int, int]]:
        """Pair what is left and has equal keys, in the order of the schedules."""
        first: dict[Hashable, int] = {}
        later: dict[int, int] = {}  # the next place with the same key
        for place, key in zip(reversed(self.left[0]), reversed(keys[0]), strict=True):
            if key in first:
                later[place] = first[key]
            first[key] = place
        found: list[tuple[int, int]] = []
        for place, key in zip(self.left[1], keys[1], strict=True):
            partner = first.pop(key, None)
            if partner is not None:
                found.append((partner, place))
                if partner in later:
                    first[key] = later[partner]
        self._keep(found)
        return found

    def _keep(self, found: Iterable[tuple[int, int]]) -> None:
        to_new, to_old = self.partners
        for old, new in found:
            to_new[old], to_old[new] = new, old
        for left, partners in zip(self.left, self.partners, strict=True):
            left[:] = [place for place in left if partners[place] is None]

    def _of_left(self, keys: Sequence[_Keys]) -> list[_Keys]:
        return [[of[place] for place in left] for of, left in zip(keys, self.left, strict=True)]

    def _by_operands(self, own: Sequence[Sequence[int]]) -> list[_Keys]:
        """By the value itself and those of its operands that have a partner; without any it is like no other."""
        to_new, to_old = self.partners
        ours = [None if partner is None else place for place, partner in enumerate(to_new)]
        keys: list[_Keys] = []
        for side, rings, names, left in zip(self._sides, own, (ours, to_old), self.left, strict=True):
            told = [(rings[place], [names[source] for source in side.graph.values[place].sources]) for place in left]
            unlike = [("like no other", id(side), place) for place in left]
            keys.append([
                (ring, *known) if known.count(None) < len(known) else alone
                for (ring, known), alone in zip(told, unlike, strict=True)
            ])  # fmt: skip
        return keys

    def _by_operator(self, by_name: bool) -> list[_Keys]:
        return [
            [
                (value.scope, value.operator, value.name if by_name else "")
                for value in map(side.graph.values.__getitem__, left)
            ]
            for side, left in zip(self._sides, self.left, strict=True)
        ]


def _rings(graph: Dataflow, known: dict[Hashable, int]) -> tuple[list[int], list[int]]:
    """For one ring and for two the numbers of all values; ``known`` hands out equal numbers to equal keys."""
    own: list[int] = []
    for scope, _, operator, kind, arguments, operands, sources, *_ in graph.values:
        literals: tuple[str, ...] = ()
        if operands is not sources:
            literals = tuple([operand for operand in operands if isinstance(operand, str)])
        own.append(known.setdefault((scope, operator, kind, arguments, literals), len(known)))
    around = [
        known.setdefault((number, *[own[source] for source in value.sources]), len(known))
        for number, value in zip(own, graph.values, strict=True)
    ]
    return own, around
