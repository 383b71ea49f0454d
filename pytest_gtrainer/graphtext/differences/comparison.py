"""Pair the values of two graphs by what they compute, because names and places change.

Values are paired in steps, from the most exact to the least, each within its module:

1. equal digests: everything that the value is computed from is equal;
2. equal *two rings*: operator, type and literals of the value and of its operands. What is computed
   before these may have changed;
3. an equal ring, and the same operands among those paired by now; then an equal ring alone;
4. name and operator, then operator only: something of the value itself has changed;
5. equal digests in any module: the value has moved to another one.

The rest has been lost or gained. Invariant: a value has at most one partner, and later steps never
change it. Cost: one walk over both graphs for each step.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from pytest_gtrainer.graphtext.dataflow import Dataflow, Operand, Value, dataflow
from pytest_gtrainer.graphtext.equivalence import Digests, Effects, Numbers, digests_of, effects
from pytest_gtrainer.graphtext.sections import GraphLine, Scope


class Comparison:
    """Two graphs; ``to_new`` and ``to_old`` have the place of each value's partner, or None."""

    def __init__(self, old: Sequence[GraphLine], new: Sequence[GraphLine]) -> None:
        # Digests are comparable only if both graphs get them from the same numbers.
        numbers = Numbers()
        self.old, self.new = dataflow(old), dataflow(new)
        self.ours, self.theirs = digests_of(self.old, numbers), digests_of(self.new, numbers)
        # The effects of both graphs, or None if their dataflow differs without regard to twins.
        self.effects: tuple[Effects, Effects] | None = None
        if self.same_dataflow:
            self.effects = effects(self.old), effects(self.new)
            self._tell_twins_apart(numbers, *self.effects)
        self.to_new: list[int | None] = [None] * len(self.old.values)
        self.to_old: list[int | None] = [None] * len(self.new.values)
        # places without partner, of the old graph and of the new one
        self.left = (list(range(len(self.to_new))), list(range(len(self.to_old))))
        # pairs that may be in another module than before
        self.elsewhere: list[tuple[int, int]] = []
        self._pair(_scoped_digests(self.old, self.ours), _scoped_digests(self.new, self.theirs))
        if any(self.left):
            self._pair_inexactly()
        self.places: list[tuple[int, int]] = []
        for place, partner in enumerate(self.to_new):
            if partner is not None:
                self.places.append((place, partner))
        self.definitions = self._pair_definitions()
        # scopes whose change is explained by that of a bucket
        self.explained: frozenset[Scope] = frozenset()

    def _tell_twins_apart(self, numbers: Numbers, ours: Effects, theirs: Effects) -> None:
        """Take digests that know twins, which decide only where the dataflow is the same.

        What is computed from twins has equal digests until now. Only draws, changed storages and
        graphs inside can make twins.
        """
        effects_of_both = [ours.draws, ours.histories, theirs.draws, theirs.histories]
        if not any([*effects_of_both, self.old.bodies, self.new.bodies]):
            return
        self.ours = digests_of(self.old, numbers, (ours, self.ours))
        self.theirs = digests_of(self.new, numbers, (theirs, self.theirs))

    def _pair_inexactly(self) -> None:
        """Pair by the steps 2 to 5."""
        numbers = Numbers()
        ours, ours_around = _rings(self.old, numbers)
        theirs, theirs_around = _rings(self.new, numbers)
        self._pair(ours_around, theirs_around)  # the inner ring has the module, too
        # An operand is named by its place in the new graph, so that both sides have the same name.
        names_of_new: list[int | None] = list(range(len(self.to_old)))
        for place in self.left[1]:
            names_of_new[place] = None
        self._pair(
            _with_operands(ours, self.old, self.to_new),
            _with_operands(theirs, self.new, names_of_new),
        )
        self._pair(ours, theirs)
        for by_name in (True, False):
            self._pair(_own_names(self.old, by_name), _own_names(self.new, by_name))
        self.elsewhere = sorted(self._pair(self.ours.values, self.theirs.values))

    def _pair(self, ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Pair values without partner that have equal keys, in the order of the schedules.

        A value whose key is None is left alone. Returns the new pairs.
        """
        waiting: dict[Hashable, list[int]] = {}
        for place in reversed(self.left[0]):
            waiting.setdefault(ours[place], []).append(place)
        pairs = []
        for now in self.left[1]:
            candidates = waiting.get(theirs[now])
            if theirs[now] is not None and candidates:
                was = candidates.pop()
                self.to_new[was], self.to_old[now] = now, was
                pairs.append((was, now))

        for left, partners in zip(self.left, (self.to_new, self.to_old), strict=True):
            left[:] = [place for place in left if partners[place] is None]
        return pairs

    def _pair_definitions(self) -> dict[int, int]:
        """Pair definitions of one name that some value uses, then those used in the same places."""
        old, new = self.old.definitions, self.new.definitions
        named = {definition.name: place for place, definition in enumerate(new)}
        uses: Counter[tuple[int, int]] = Counter()
        for place, was in enumerate(old):
            if was.name in named:
                uses[place, named[was.name]] = 0  # a pair, though nothing may use it
        for place in self.old.users:
            other = self.to_new[place]
            if other is None:
                continue
            operands = zip(
                self.old.values[place].operands, self.new.values[other].operands, strict=False
            )
            for before, after in operands:
                if isinstance(before, int) and isinstance(after, int) and before < 0 and after < 0:
                    uses[~before, ~after] += 1

        def rank(pair: tuple[int, int]) -> tuple[bool, int]:
            same_name = old[pair[0]].name == new[pair[1]].name
            return not (same_name and uses[pair]), -uses[pair]

        partners: dict[int, int] = {}
        taken: set[int] = set()
        for place, other in sorted(uses, key=rank):
            is_free = place not in partners and other not in taken
            if is_free and old[place].kind == new[other].kind:
                partners[place] = other
                taken.add(other)

        return partners

    @property
    def same_dataflow(self) -> bool:
        """Return whether both graphs compute the same, in whatever order."""
        return self.ours.whole == self.theirs.whole

    @property
    def same_bodies(self) -> bool:
        """Return whether the lines of all graphs inside are equal, whatever their names."""
        for place, other in self.definitions.items():
            was, now = self.old.definitions[place].name, self.new.definitions[other].name
            if was in self.old.bodies and self.old.bodies[was] != self.new.bodies[now]:
                return False
        return True

    def changed(self) -> Iterator[tuple[int, Value, Value]]:
        """Yield pairs that do not compute the same and are not explained: new place, old, new."""
        for place, other in self.places:
            was, now = self.old.values[place], self.new.values[other]
            is_same = self.ours.values[place] == self.theirs.values[other]
            if not is_same and self.explained.isdisjoint((was.scope, now.scope)):
                yield other, was, now

    def lost_and_gained(self) -> Iterator[tuple[str, Value]]:
        """Yield values without partner: the "lost" ones, then the "gained" ones."""
        for place in self.left[0]:
            yield "lost", self.old.values[place]
        for place in self.left[1]:
            yield "gained", self.new.values[place]

    def renumbered(
        self, old: Sequence[GraphLine], new: Sequence[GraphLine]
    ) -> Iterator[tuple[int, int]]:
        """Yield pairs of lines that differ only in the names of values."""
        for place, other in self.places:
            was, now = self.old.values[place], self.new.values[other]
            is_same = own(was) == own(now) and self.same_operands(was.operands, now.operands)
            if is_same and old[was.line] != new[now.line]:
                yield was.line, now.line
        for one, another in zip(self.old.results, self.new.results, strict=False):
            if one[:2] == another[:2] and self.same_operands(one.operands, another.operands):
                yield one.line, another.line

    def same_operands(self, old: Sequence[Operand], new: Sequence[Operand]) -> bool:
        """Return whether all operands are the same on both sides."""
        return len(old) == len(new) and all(map(self.same_operand, old, new))

    def same_operand(self, old: Operand, new: Operand) -> bool:
        """Return whether an operand is the same value, definition or literal on both sides."""
        if isinstance(old, int) and isinstance(new, int):
            if old >= 0:
                return self.to_new[old] == new
            return new < 0 and self.definitions.get(~old, ~new) == ~new
        if isinstance(old, tuple) and isinstance(new, tuple):
            return old.number == new.number and self.to_new[old.value] == new.value
        return old == new

    def is_explained(self, old: Operand, new: Operand) -> bool:
        """Return whether other sentences explain why an operand is another one.

        They do if it was lost, gained, or in a bucket that changed.
        """
        sides = ((old, self.old, self.to_new), (new, self.new, self.to_old))
        for operand, graph, partners in sides:
            if not isinstance(operand, int) or operand < 0:
                continue
            if partners[operand] is None or graph.values[operand].scope in self.explained:
                return True
        return False


def _scoped_digests(graph: Dataflow, digests: Digests) -> list[Hashable]:
    """Return the key of step 1 for each value."""
    pairs = zip(graph.values, digests.values, strict=True)
    return [(value.scope, digest) for value, digest in pairs]


def _own_names(graph: Dataflow, by_name: bool) -> list[Hashable]:
    """Return the key of step 4 for each value."""
    keys: list[Hashable] = []
    for value in graph.values:
        keys.append((value.scope, value.operator, value.name if by_name else ""))
    return keys


def _rings(graph: Dataflow, numbers: Numbers) -> tuple[list[int], list[int]]:
    """Return the number of one ring of each value, and that of two."""
    inner: list[int] = []
    outer: list[int] = []
    for value in graph.values:
        literals = tuple([operand for operand in value.operands if isinstance(operand, str)])
        key = (value.scope, value.operator, value.type, value.arguments, literals)
        inner.append(numbers.of(key))
        # Operands stand before the value, so their rings are known.
        outer.append(numbers.of((inner[-1], *[inner[source] for source in value.sources])))
    return inner, outer


def _with_operands(
    rings: Sequence[int], graph: Dataflow, names: Sequence[int | None]
) -> list[Hashable]:
    """Return each ring with the names of its paired operands; None if no operand is paired."""
    keys: list[Hashable] = []
    for ring, value in zip(rings, graph.values, strict=True):
        operands = [names[source] for source in value.sources]
        keys.append((ring, *operands) if operands.count(None) < len(operands) else None)
    return keys


def own(value: Value) -> tuple[object, ...]:
    """Return everything of a value but its name, place and operands."""
    return value.scope, value.operator, value.type, value.arguments, value.tags
