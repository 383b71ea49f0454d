"""Two graphs, and which value of one is which of the other.

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

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.dataflow import Dataflow, Operand, Value
from pytest_gtrainer.graphtext.dataflow import dataflow as dataflow_of
from pytest_gtrainer.graphtext.equivalence import Digests, Numbers, digests_of
from pytest_gtrainer.graphtext.sections import GraphLine, Scope


@dataclass(frozen=True, slots=True)
class Side:
    """One of two graphs; what has equal digests has equal numbers on both sides."""

    graph: Dataflow
    digests: Digests

    def digested(self) -> Iterator[tuple[int, Value]]:
        """Each value with its digest."""
        return zip(self.digests.values, self.graph.values, strict=True)


def sides_of(old: Iterable[GraphLine], new: Iterable[GraphLine]) -> tuple[Side, Side]:
    """The two graphs to compare."""
    numbers = Numbers()
    before, after = dataflow_of(old), dataflow_of(new)
    return Side(before, digests_of(before, numbers)), Side(after, digests_of(after, numbers))


@dataclass(frozen=True, slots=True)
class ValuePairs:
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


def paired(old: Side, new: Side) -> ValuePairs:
    """Pair the values of two graphs."""
    search = _PairSearch((old, new))
    elsewhere = search.run()
    to_new, to_old = search.partners
    places = [(place, partner) for place, partner in enumerate(to_new) if partner is not None]
    return ValuePairs(to_new, to_old, places, sorted(elsewhere), search.left)


_Keys = Sequence[Hashable]


class _PairSearch:
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """The sides, their pairs, and the scopes whose change a bucket's explains.

    ``definitions`` has for each definition of the old side the one of the new side that stands for it;
    ``others`` are the pairs of values that do not compute the same, places first.
    """

    before: Side
    after: Side
    pairs: ValuePairs
    definitions: dict[int, int]
    others: list[tuple[int, int, Value, Value]]
    explained: frozenset[Scope] = frozenset()

    @classmethod
    def of(cls, old: Iterable[GraphLine], new: Iterable[GraphLine]) -> Comparison:
        before, after = sides_of(old, new)
        pairs = paired(before, after)
        definitions = _definitions(before.graph, after.graph, pairs)
        return cls(before, after, pairs, definitions, _others(before, after, pairs))

    @property
    def old(self) -> Dataflow:
        return self.before.graph

    @property
    def new(self) -> Dataflow:
        return self.after.graph

    @property
    def same_dataflow(self) -> bool:
        return self.before.digests.whole == self.after.digests.whole

    def changed(self) -> Iterator[tuple[int, int, Value, Value]]:
        """Pairs of values that do not compute the same, places first, apart from explained ones."""
        explained = self.explained
        for pair in self.others:
            if not explained or (pair[2].scope not in explained and pair[3].scope not in explained):
                yield pair

    def same_operand(self, old: Operand, new: Operand) -> bool:
        """Whether an operand is the same value, definition or literal on both sides."""
        if isinstance(old, int) and isinstance(new, int):
            if old >= 0:
                return self.pairs.to_new[old] == new
            return new < 0 and self.definitions.get(~old, ~new) == ~new
        if isinstance(old, tuple) and isinstance(new, tuple):
            return old.number == new.number and self.pairs.to_new[old.value] == new.value
        return old == new

    def renumbered(self, old: Sequence[GraphLine], new: Sequence[GraphLine]) -> Iterator[tuple[int, int]]:
        """Records that differ and yet say the same in both graphs, with other names for values."""
        ours, theirs = self.old.values, self.new.values
        for place, other in self.pairs.places:
            was, now = ours[place], theirs[other]
            if old[was.record] != new[now.record] and self.reads_the_same(was, now) and own(was) == own(now):
                yield was.record, now.record
        for one, another in zip(self.old.results, self.new.results, strict=False):
            if one[:2] == another[:2] and self.same_operands(one.operands, another.operands):
                yield one.record, another.record

    def reads_the_same(self, was: Value, now: Value) -> bool:
        """Whether all operands of a value are the same on both sides."""
        if was.operands is was.sources:  # all are values, as mostly
            to_new = self.pairs.to_new
            return [to_new[source] for source in was.sources] == list(now.operands)
        return self.same_operands(was.operands, now.operands)

    def same_operands(self, old: Sequence[Operand], new: Sequence[Operand]) -> bool:
        return len(old) == len(new) and all(map(self.same_operand, old, new))

    def is_said(self, old: Operand, new: Operand) -> bool:
        """Whether other sentences say why an operand is another: it was lost, gained or in a bucket that changed."""
        return self._is_new(old, self.old, self.pairs.to_new) or self._is_new(new, self.new, self.pairs.to_old)

    def _is_new(self, operand: Operand, graph: Dataflow, partners: list[int | None]) -> bool:
        if not isinstance(operand, int) or operand < 0:
            return False
        return partners[operand] is None or graph.values[operand].scope in self.explained


def own(value: Value) -> tuple[object, ...]:
    """What a value says of itself."""
    return value.scope, value.operator, value.type, value.arguments, value.tags


def _others(before: Side, after: Side, pairs: ValuePairs) -> list[tuple[int, int, Value, Value]]:
    ours, theirs = before.digests.values, after.digests.values
    old, new = before.graph.values, after.graph.values
    return [(was, now, old[was], new[now]) for was, now in pairs.places if ours[was] != theirs[now]]


def _definitions(old: Dataflow, new: Dataflow, pairs: ValuePairs) -> dict[int, int]:
    """Definitions of one name stand for one another if anything uses both; else those used in the same places."""
    uses: Counter[tuple[int, int]] = Counter()
    for place in old.users:
        other = pairs.to_new[place]
        if other is None:
            continue
        for was, now in zip(old.values[place].operands, new.values[other].operands, strict=False):
            if isinstance(was, int) and isinstance(now, int) and was < 0 and now < 0:
                uses[~was, ~now] += 1
    named = {definition.name: place for place, definition in enumerate(new.definitions)}
    uses.update({(place, named[d.name]): 0 for place, d in enumerate(old.definitions) if d.name in named})

    def rank(pair: tuple[int, int]) -> tuple[bool, int]:
        keeps_name = old.definitions[pair[0]].name == new.definitions[pair[1]].name
        return not (keeps_name and uses[pair]), -uses[pair]

    found: dict[int, int] = {}
    taken: set[int] = set()
    for was, now in sorted(uses, key=rank):
        is_free = was not in found and now not in taken
        if is_free and old.definitions[was].kind == new.definitions[now].kind:
            found[was] = now
            taken.add(now)
    return found
