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

    @classmethod
    def of(cls, lines: Iterable[GraphLine], numbers: Numbers) -> Side:
        graph = dataflow_of(lines)
        return cls(graph, digests_of(graph, numbers))

    def digested(self) -> Iterator[tuple[int, Value]]:
        """Each value with its digest."""
        return zip(self.digests.values, self.graph.values, strict=True)


class ValuePairs:
    """For each value of one side its place on the other, None if it has none there.

    Attributes:
        places: on both sides, in the order of the old schedule.
        elsewhere: those of ``places`` that may be in another module than before.
        left: the places of either side that have no partner.
    """

    def __init__(self, old: Side, new: Side) -> None:
        self.to_new: list[int | None] = [None] * len(old.graph.values)
        self.to_old: list[int | None] = [None] * len(new.graph.values)
        self.left = (list(range(len(self.to_new))), list(range(len(self.to_old))))
        self.elsewhere: list[tuple[int, int]] = []
        self._pair(*[[(value.scope, digest) for digest, value in side.digested()] for side in (old, new)])
        if any(self.left):
            self._pair_inexactly(old, new)
        self.places = [(place, partner) for place, partner in enumerate(self.to_new) if partner is not None]

    def _pair_inexactly(self, old: Side, new: Side) -> None:
        numbers = Numbers()
        (ours, ours_around), (theirs, theirs_around) = (_rings(side.graph, numbers) for side in (old, new))
        self._pair(ours_around, theirs_around)  # the inner ring says the module, too
        kept = [place if partner is not None else None for place, partner in enumerate(self.to_new)]
        self._pair(_with_operands(ours, old.graph, kept), _with_operands(theirs, new.graph, self.to_old))
        self._pair(ours, theirs)
        for by_name in (True, False):
            self._pair(*[
                [(value.scope, value.operator, value.name if by_name else "") for value in side.graph.values]
                for side in (old, new)
            ])  # fmt: skip
        self.elsewhere = sorted(self._pair(old.digests.values, new.digests.values))

    def _pair(self, ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Pair what is left and has equal keys, in the order of the schedules. A value without key has no partner."""
        first: dict[Hashable, int] = {}
        later: dict[int, int] = {}  # the next place with the same key
        for place in reversed(self.left[0]):
            key = ours[place]
            if key in first:
                later[place] = first[key]
            first[key] = place
        found: list[tuple[int, int]] = []
        for place in self.left[1]:
            key = theirs[place]
            partner = None if key is None else first.pop(key, None)
            if partner is not None:
                found.append((partner, place))
                self.to_new[partner], self.to_old[place] = place, partner
                if partner in later:
                    first[key] = later[partner]
        for left, partners in zip(self.left, (self.to_new, self.to_old), strict=True):
            left[:] = [place for place in left if partners[place] is None]
        return found


def _rings(graph: Dataflow, numbers: Numbers) -> tuple[list[int], list[int]]:
    """Of all values the number of one ring, and that of two."""
    own: list[int] = []
    for scope, _, operator, kind, arguments, operands, *_ in graph.values:
        literals = tuple([operand for operand in operands if isinstance(operand, str)])
        own.append(numbers.of((scope, operator, kind, arguments, literals)))
    around = zip(own, graph.values, strict=True)
    return own, [numbers.of((number, *[own[source] for source in value.sources])) for number, value in around]


def _with_operands(rings: Sequence[int], graph: Dataflow, names: Sequence[int | None]) -> list[Hashable]:
    """Each ring with those operands that have a partner, by their ``names``; no key without any."""
    keys: list[Hashable] = []
    for ring, value in zip(rings, graph.values, strict=True):
        operands = [names[source] for source in value.sources]
        keys.append((ring, *operands) if operands.count(None) < len(operands) else None)
    return keys


@dataclass(frozen=True, slots=True)
class Comparison:
    """The sides, their pairs, and the scopes whose change a bucket's explains.

    ``definitions`` has for each definition of the old side the one of the new side that stands for it.
    """

    before: Side
    after: Side
    pairs: ValuePairs
    definitions: dict[int, int]
    explained: frozenset[Scope] = frozenset()

    @classmethod
    def of(cls, old: Iterable[GraphLine], new: Iterable[GraphLine]) -> Comparison:
        numbers = Numbers()
        before, after = Side.of(old, numbers), Side.of(new, numbers)
        pairs = ValuePairs(before, after)
        return cls(before, after, pairs, _definitions(before.graph, after.graph, pairs))

    @property
    def old(self) -> Dataflow:
        return self.before.graph

    @property
    def new(self) -> Dataflow:
        return self.after.graph

    @property
    def same_dataflow(self) -> bool:
        return self.before.digests.whole == self.after.digests.whole

    def changed(self) -> Iterator[tuple[int, Value, Value]]:
        """Pairs of values that do not compute the same, apart from explained ones, with the place of the new one."""
        ours, theirs = self.before.digests.values, self.after.digests.values
        for place, other in self.pairs.places:
            was, now = self.old.values[place], self.new.values[other]
            if ours[place] != theirs[other] and self.explained.isdisjoint((was.scope, now.scope)):
                yield other, was, now

    def left(self) -> Iterator[tuple[str, Value]]:
        """Values without a partner: those that were "lost", then those that were "gained"."""
        for verb, graph, left in zip(("lost", "gained"), (self.old, self.new), self.pairs.left, strict=True):
            for place in left:
                yield verb, graph.values[place]

    def renumbered(self, old: Sequence[GraphLine], new: Sequence[GraphLine]) -> Iterator[tuple[int, int]]:
        """Lines that differ and yet say the same in both graphs, with other names for values."""
        for place, other in self.pairs.places:
            was, now = self.old.values[place], self.new.values[other]
            is_same = own(was) == own(now) and self.same_operands(was.operands, now.operands)
            if is_same and old[was.line] != new[now.line]:
                yield was.line, now.line
        for one, another in zip(self.old.results, self.new.results, strict=False):
            if one[:2] == another[:2] and self.same_operands(one.operands, another.operands):
                yield one.line, another.line

    def same_operands(self, old: Sequence[Operand], new: Sequence[Operand]) -> bool:
        return len(old) == len(new) and all(map(self.same_operand, old, new))

    def same_operand(self, old: Operand, new: Operand) -> bool:
        """Whether an operand is the same value, definition or literal on both sides."""
        if isinstance(old, int) and isinstance(new, int):
            if old >= 0:
                return self.pairs.to_new[old] == new
            return new < 0 and self.definitions.get(~old, ~new) == ~new
        if isinstance(old, tuple) and isinstance(new, tuple):
            return old.number == new.number and self.pairs.to_new[old.value] == new.value
        return old == new

    def is_said(self, old: Operand, new: Operand) -> bool:
        """Whether other sentences say why an operand is another: it was lost, gained or in a bucket that changed."""
        sides = ((old, self.old, self.pairs.to_new), (new, self.new, self.pairs.to_old))
        return any(
            isinstance(operand, int)
            and operand >= 0
            and (partners[operand] is None or graph.values[operand].scope in self.explained)
            for operand, graph, partners in sides
        )


def own(value: Value) -> tuple[object, ...]:
    """What a value says of itself."""
    return value.scope, value.operator, value.type, value.arguments, value.tags


def _definitions(old: Dataflow, new: Dataflow, pairs: ValuePairs) -> dict[int, int]:
    """Definitions of one name stand for one another if anything uses both; else those used in the same places."""
    uses: Counter[tuple[int, int]] = Counter()
    for place in old.users:
        other = pairs.to_new[place]
        operands = () if other is None else new.values[other].operands
        for was, now in zip(old.values[place].operands, operands, strict=False):
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
