"""Two graphs and what each of their values has become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.dataflow import Dataflow, Operand, Value
from pytest_gtrainer.graphtext.differences.pairs import Pairs, Side, paired, sides_of
from pytest_gtrainer.graphtext.references import Scope
from pytest_gtrainer.graphtext.sections import Record


@dataclass(frozen=True, slots=True)
class Comparison:
    """The sides, their pairs, and the scopes whose change a bucket's explains.

    ``definitions`` has for each definition of the old side the one of the new side that stands for it;
    ``others`` are the pairs of values that do not compute the same, places first.
    """

    before: Side
    after: Side
    pairs: Pairs
    definitions: dict[int, int]
    others: list[tuple[int, int, Value, Value]]
    explained: frozenset[Scope] = frozenset()

    @classmethod
    def of(cls, old: Iterable[Record], new: Iterable[Record]) -> Comparison:
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

    def renumbered(self, old: Sequence[Record], new: Sequence[Record]) -> Iterator[tuple[int, int]]:
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


def _others(before: Side, after: Side, pairs: Pairs) -> list[tuple[int, int, Value, Value]]:
    ours, theirs = before.digests.values, after.digests.values
    old, new = before.graph.values, after.graph.values
    return [(was, now, old[was], new[now]) for was, now in pairs.places if ours[was] != theirs[now]]


def _definitions(old: Dataflow, new: Dataflow, pairs: Pairs) -> dict[int, int]:
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
