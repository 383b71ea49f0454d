"""Two graphs, and which value of one is which of the other: paired by what they compute, as names and places change.

From the most exact to the least, each within its module:

1. the digest: all that it is computed from is equal;
2. *two rings*: operator, type and literals of the value and of its operands, as what is computed before
   these may have changed;
3. one ring, and those operands that have a partner by now; then the ring alone;
4. name and operator, then operator only: something of the value itself has changed;
5. the digest, in any module: it has moved to another one.

What is left has been lost or gained. Cost: one walk for each of these.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from pytest_gtrainer.graphtext.dataflow import Dataflow, Operand, Value, dataflow
from pytest_gtrainer.graphtext.equivalence import Numbers, digests_of
from pytest_gtrainer.graphtext.sections import GraphLine, Scope


class Comparison:
    """Two graphs, and for each value of one its place in the other, None if it has none there."""

    def __init__(self, old: Sequence[GraphLine], new: Sequence[GraphLine]) -> None:
        numbers = Numbers()
        self.old, self.new = dataflow(old), dataflow(new)
        self.ours, self.theirs = digests_of(self.old, numbers), digests_of(self.new, numbers)
        self.to_new: list[int | None] = [None] * len(self.old.values)
        self.to_old: list[int | None] = [None] * len(self.new.values)
        self.left = (
            list(range(len(self.to_new))),
            list(range(len(self.to_old))),
        )  # places without partner
        self.elsewhere: list[
            tuple[int, int]
        ] = []  # pairs that may be in another module than before
        self._pair(
            *[
                [
                    (value.scope, digest)
                    for digest, value in zip(digests.values, graph.values, strict=True)
                ]
                for digests, graph in ((self.ours, self.old), (self.theirs, self.new))
            ]
        )
        if any(self.left):
            self._pair_inexactly()
        self.places = [
            (place, partner) for place, partner in enumerate(self.to_new) if partner is not None
        ]
        self.definitions = (
            self._definitions()
        )  # of the old side, by those of the new one that stand for them
        self.explained: frozenset[Scope] = (
            frozenset()
        )  # scopes whose change that of a bucket explains

    def _pair_inexactly(self) -> None:
        numbers = Numbers()
        (ours, ours_around), (theirs, theirs_around) = (
            _rings(graph, numbers) for graph in (self.old, self.new)
        )
        self._pair(ours_around, theirs_around)  # the inner ring says the module, too
        kept = [place if partner is not None else None for place, partner in enumerate(self.to_new)]
        self._pair(
            _with_operands(ours, self.old, kept), _with_operands(theirs, self.new, self.to_old)
        )
        self._pair(ours, theirs)
        for by_name in (True, False):
            self._pair(
                *[
                    [
                        (value.scope, value.operator, value.name if by_name else "")
                        for value in graph.values
                    ]
                    for graph in (self.old, self.new)
                ]
            )
        self.elsewhere = sorted(self._pair(self.ours.values, self.theirs.values))

    def _pair(self, ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Pair what is left and has equal keys, in the order of the schedules. A value without key has no partner."""
        waiting: dict[Hashable, list[int]] = {}
        for place in reversed(self.left[0]):
            waiting.setdefault(ours[place], []).append(place)
        found = [
            (same.pop(), place)
            for place in self.left[1]
            if theirs[place] is not None and (same := waiting.get(theirs[place]))
        ]
        for was, now in found:
            self.to_new[was], self.to_old[now] = now, was
        for left, partners in zip(self.left, (self.to_new, self.to_old), strict=True):
            left[:] = [place for place in left if partners[place] is None]
        return found

    def _definitions(self) -> dict[int, int]:
        """Definitions of one name stand for one another if anything uses both; else those used in the same places."""
        old, new = self.old.definitions, self.new.definitions
        named = {definition.name: place for place, definition in enumerate(new)}
        uses = Counter(
            {(place, named[was.name]): 0 for place, was in enumerate(old) if was.name in named}
        )
        for place in self.old.users:
            other = self.to_new[place]
            operands = () if other is None else self.new.values[other].operands
            for was, now in zip(self.old.values[place].operands, operands, strict=False):
                if isinstance(was, int) and isinstance(now, int) and was < 0 and now < 0:
                    uses[~was, ~now] += 1

        def rank(pair: tuple[int, int]) -> tuple[bool, int]:
            return not (old[pair[0]].name == new[pair[1]].name and uses[pair]), -uses[pair]

        found: dict[int, int] = {}
        for was, now in sorted(uses, key=rank):
            if was not in found and now not in found.values() and old[was].kind == new[now].kind:
                found[was] = now
        return found

    @property
    def same_dataflow(self) -> bool:
        return self.ours.whole == self.theirs.whole

    def changed(self) -> Iterator[tuple[int, Value, Value]]:
        """Pairs of values that do not compute the same, apart from explained ones, with the place of the new one."""
        for place, other in self.places:
            was, now = self.old.values[place], self.new.values[other]
            is_same = self.ours.values[place] == self.theirs.values[other]
            if not is_same and self.explained.isdisjoint((was.scope, now.scope)):
                yield other, was, now

    def lost_and_gained(self) -> Iterator[tuple[str, Value]]:
        """Values without a partner: those that were "lost", then those that were "gained"."""
        for verb, graph, left in zip(
            ("lost", "gained"), (self.old, self.new), self.left, strict=True
        ):
            yield from ((verb, graph.values[place]) for place in left)

    def renumbered(
        self, old: Sequence[GraphLine], new: Sequence[GraphLine]
    ) -> Iterator[tuple[int, int]]:
        """Lines that differ and yet say the same in both graphs, with other names for values."""
        for place, other in self.places:
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
                return self.to_new[old] == new
            return new < 0 and self.definitions.get(~old, ~new) == ~new
        if isinstance(old, tuple) and isinstance(new, tuple):
            return old.number == new.number and self.to_new[old.value] == new.value
        return old == new

    def is_said(self, old: Operand, new: Operand) -> bool:
        """Whether other sentences say why an operand is another: it was lost, gained or in a bucket that changed."""
        sides = ((old, self.old, self.to_new), (new, self.new, self.to_old))
        return any(
            isinstance(operand, int)
            and operand >= 0
            and (partners[operand] is None or graph.values[operand].scope in self.explained)
            for operand, graph, partners in sides
        )


def _rings(graph: Dataflow, numbers: Numbers) -> tuple[list[int], list[int]]:
    """Of all values the number of one ring, and that of two."""
    own: list[int] = []
    for scope, _, operator, kind, arguments, operands, *_ in graph.values:
        literals = tuple([operand for operand in operands if isinstance(operand, str)])
        own.append(numbers.of((scope, operator, kind, arguments, literals)))
    around = zip(own, graph.values, strict=True)
    return own, [
        numbers.of((number, *[own[source] for source in value.sources])) for number, value in around
    ]


def _with_operands(
    rings: Sequence[int], graph: Dataflow, names: Sequence[int | None]
) -> list[Hashable]:
    """Each ring with those operands that have a partner, by their ``names``; no key without any."""
    keys: list[Hashable] = []
    for ring, value in zip(rings, graph.values, strict=True):
        operands = [names[source] for source in value.sources]
        keys.append((ring, *operands) if operands.count(None) < len(operands) else None)
    return keys


def own(value: Value) -> tuple[object, ...]:
    """What a value says of itself."""
    return value.scope, value.operator, value.type, value.arguments, value.tags
