"""Two graphs and what each of their values has become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.dataflow import Dataflow, Operand, Value
from pytest_gtrainer.graphtext.differences.pairs import Pairs, Side, paired
from pytest_gtrainer.graphtext.references import Scope
from pytest_gtrainer.graphtext.sections import Record


@dataclass(frozen=True, slots=True)
class Comparison:
    """The sides, their pairs, and the scopes whose change a bucket's explains.

    ``definitions`` has for each definition of the old side the one of the new side that stands for it.
    """

    before: Side
    after: Side
    pairs: Pairs
    definitions: dict[int, int]
    explained: frozenset[Scope] = frozenset()

    @classmethod
    def of(cls, old: Iterable[Record], new: Iterable[Record]) -> Comparison:
        before, after = Side.of(old), Side.of(new)
        pairs = paired(before, after)
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

    def changed(self) -> Iterator[tuple[int, int, Value, Value]]:
        """Pairs of values that do not compute the same, places first, apart from explained ones."""
        ours, theirs = self.before.digests.values, self.after.digests.values
        for old, new in self.pairs.places:
            if ours[old] != theirs[new]:
                was, now = self.old.values[old], self.new.values[new]
                if was.scope not in self.explained and now.scope not in self.explained:
                    yield old, new, was, now

    def same_operand(self, old: Operand, new: Operand) -> bool:
        """Whether an operand is the same value, definition or literal on both sides."""
        if isinstance(old, int) and isinstance(new, int):
            if old >= 0 and new >= 0:
                return self.pairs.to_new[old] == new
            return self.definitions.get(~old, ~new) == ~new
        if isinstance(old, tuple) and isinstance(new, tuple):
            return old.number == new.number and self.pairs.to_new[old.value] == new.value
        return old == new

    def renumbered(self) -> Iterator[tuple[int, int]]:
        """Records that say the same in both graphs, though with other names for values."""
        for old, new in self.pairs.places:
            was, now = self.old.values[old], self.new.values[new]
            if own(was) == own(now) and self.same_operands(was.operands, now.operands):
                yield was.record, now.record
        for one, other in zip(self.old.results, self.new.results, strict=False):
            if one[:2] == other[:2] and self.same_operands(one.operands, other.operands):
                yield one.record, other.record

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


def _definitions(old: Dataflow, new: Dataflow, pairs: Pairs) -> dict[int, int]:
    """Definitions of one name stand for one another if anything uses both; else those used in the same places."""
    uses: Counter[tuple[int, int]] = Counter()
    for place, other in pairs.places:
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
