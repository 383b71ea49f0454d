"""What the schedule does otherwise: the verdict, effects, and what stands in another place.

The *verdict* is the first sentence: has the dataflow changed, or only the schedule, or only how it is spelled? With
it stands what equal dataflow does not promise: that random numbers are drawn and values changed in place in the same
order.

Compute that keeps its order is the ruler of moves: a launch or a wait has moved if another number of its operators
stands before it. What only serves a collective (casts of parameters, packing) moves with it and is not told.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.dataflow import Dataflow, Value
from pytest_gtrainer.graphtext.differences.comparison import Comparison, own
from pytest_gtrainer.graphtext.differences.remarks import (
    NAMESPACE,
    CollectiveEvent,
    Remark,
    Weight,
    about,
    events_of,
    is_collective,
    reference_to,
    unit_of,
    what,
)
from pytest_gtrainer.graphtext.equivalence import Effects, effects, histories_by_digest
from pytest_gtrainer.graphtext.folding import rising


def verdict(comparison: Comparison) -> Remark:
    """What kind of difference it is."""
    if not comparison.same_dataflow:
        return Remark(Weight.VERDICT, f"the dataflow differs{_first_origin(comparison)}")
    annotations = [
        Counter(
            (digest, value.scope, value.tags)
            for digest, value in zip(side.digests.values, side.graph.values, strict=True)
        )
        for side in (comparison.before, comparison.after)
    ]
    places = [new for old, new in comparison.pairs.places if comparison.old.values[old].operator]
    moved = len(places) - len(rising(places))
    notes = "other modules, buckets or tags" if annotations[0] != annotations[1] else ""
    if moved:
        operators = sum(not value.is_input for value in comparison.old.values)
        text = f"same dataflow, other schedule ({moved} of {operators} operators moved)"
        return Remark(Weight.VERDICT, text + (f", {notes}" if notes else ""))
    if notes:
        return Remark(Weight.VERDICT, f"same dataflow, same schedule, {notes}")
    if comparison.old.definitions != comparison.new.definitions:
        return Remark(Weight.VERDICT, "same dataflow, same schedule, other definitions at the head")
    return Remark(Weight.VERDICT, "same dataflow, same schedule: only the spelling differs")


def _first_origin(comparison: Comparison) -> str:
    """The first operator that the other side does not have: all that it is computed from is there."""
    for title, side, other in (
        (", first at", comparison.after, comparison.before),
        (", without", comparison.before, comparison.after),
    ):
        known = set(other.digests.values)
        for digest, value in zip(side.digests.values, side.graph.values, strict=True):
            if digest not in known:
                return f"{title} {what(value)}"
    return ""


# -- effects


def effect_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Changes of order that may change results although the dataflow is the same."""
    if not comparison.same_dataflow:
        return
    old, new = effects(comparison.old), effects(comparison.new)
    yield from _draws(comparison, old, new)
    yield from _histories(comparison, old, new)


def _draws(comparison: Comparison, old: Effects, new: Effects) -> Iterator[Remark]:
    before, after = comparison.before.digests.values, comparison.after.digests.values
    for ours, theirs in zip(old.draws, new.draws, strict=True):
        if before[ours] != after[theirs]:
            was, now = comparison.old.values[ours], comparison.new.values[theirs]
            text = f"random numbers are drawn in another order, so results differ: {what(now)} before {what(was)}"
            yield Remark(Weight.EFFECT, _told_apart(text, was, now), about(now))
            return


def _told_apart(text: str, was: Value, now: Value) -> str:
    if what(was) != what(now):
        return text
    return text.partition(": ")[0] + f": {reference_to(now)} before {reference_to(was)}"


def _histories(comparison: Comparison, old: Effects, new: Effects) -> Iterator[Remark]:
    """Storages with other readers before or after one of their changes."""
    left = Counter(_spelled(new, comparison.after.digests.values).values())
    for storage, history in _spelled(old, comparison.before.digests.values).items():
        if left[history] > 0:
            left[history] -= 1
            continue
        changer = next(place for place, _ in old.histories[storage] if place is not None)
        changed, value = comparison.old.values[storage], comparison.old.values[changer]
        text = f"results may differ: what reads {reference_to(changed)} and {what(value)}, which changes it in place"
        yield Remark(Weight.EFFECT, f"{text}, stand in another order", about(value), "in place")


def _spelled(found: Effects, digests: Sequence[int]) -> dict[int, str]:
    return {storage: repr((digests[storage], history)) for storage, history in histories_by_digest(found, digests)}


_Places = Sequence[tuple[int, int]]
_Events = Mapping[int, CollectiveEvent]
_MOST = 2 / 3
"""The part of a layer's compute that is called most of it."""


def move_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Collectives moved against compute and against each other, then compute, then all else."""
    pairs = [pair for pair in comparison.pairs.places if comparison.old.values[pair[0]].operator]
    if all(one[1] < other[1] for one, other in itertools.pairwise(pairs)):
        return
    serving = _serving(comparison.old)
    compute = [pair for pair in pairs if not serving[pair[0]]]
    ruler = _Ruler.of(comparison.old, compute)
    events = events_of(comparison.old)
    remarks = itertools.chain(
        _events_against_compute(comparison, ruler, events),
        _events_against_events(comparison, ruler, events),
        _compute_moved(comparison, ruler, compute),
    )
    first = next(remarks, None)
    yield _others(comparison, pairs) if first is None else first
    yield from remarks


@dataclass(frozen=True, slots=True)
class _Ruler:
    """Compute in the order that both sides have, by its places.

    ``stretches`` has for each of its places the bounds of the stretch of one layer that it lies in.
    """

    graph: Dataflow
    old: list[int]
    new: list[int]
    stretches: list[tuple[int, int]]

    @classmethod
    def of(cls, graph: Dataflow, compute: _Places) -> _Ruler:
        kept = rising([new for _, new in compute])
        old, new = [compute[place][0] for place in kept], [compute[place][1] for place in kept]
        return cls(graph, old, new, _stretches([unit_of(graph.values[place].scope) for place in old]))

    def has_passed(self, place: int, now: int) -> bool:
        return bisect.bisect(self.old, place) != bisect.bisect(self.new, now)

    def _most(self, mark: int, start: int, end: int) -> tuple[int, str]:
        """The one of two neighbouring stretches of which more was passed, by a place of it, and how much that is."""

        def passed(place: int) -> int:
            first, last = self.stretches[place]
            return min(last, end) - max(first, start)

        first, last = self.stretches[mark]
        other = first - 1 if mark == end - 1 else last
        if start <= other < end and passed(other) > passed(mark):
            mark = other
            first, last = self.stretches[mark]
        part = passed(mark) / (last - first)
        return mark, "the compute of" if part == 1 else "most of the compute of" if part > _MOST else ""

    def way(self, place: int, now: int, subject: str) -> str:
        """That something moved from ``place`` to ``now``: behind or before which compute."""
        was, stands = bisect.bisect(self.old, place), bisect.bisect(self.new, now)
        if stands > was:
            side, mark, start, end = "behind", stands - 1, was, stands
        else:
            side, mark, start, end = "before", stands, stands, was
        value = self.graph.values[place]
        most, amount = self._most(mark, start, end)
        unit = unit_of(self.graph.values[self.old[most]].scope)
        if amount and unit and (is_collective(value) or unit_of(value.scope) != unit):
            return f"{subject} moved {side} {amount} {unit}"
        passed = self.graph.values[self.old[mark]]
        if subject == what(passed):
            return f"{reference_to(value)} moved {side} {reference_to(passed)}"
        return f"{subject} moved {side} {what(passed)}"


def _stretches(units: Sequence[str]) -> list[tuple[int, int]]:
    """For each place the bounds of the equal neighbours.

    >>> _stretches("aab")
    [(0, 2), (0, 2), (2, 3)]
    """
    bounds: list[tuple[int, int]] = []
    for _, members in itertools.groupby(units):
        start, length = len(bounds), len(list(members))
        bounds += [(start, start + length)] * length
    return bounds


def _serving(graph: Dataflow) -> list[bool]:
    """Whether a value is a collective, is in a bucket, or is made of parameters only."""
    communicated = [value.operator.startswith(NAMESPACE) or value.scope.is_bucket for value in graph.values]
    serving: list[bool] = []
    for value, is_communicated in zip(graph.values, communicated, strict=True):
        if is_communicated or not value.operator:
            serving.append(is_communicated or value.scope.space == "P")
            continue
        is_prepared = bool(value.sources)
        for source in value.sources:
            is_prepared = is_prepared and serving[source] and not communicated[source]
        serving.append(is_prepared)
    return serving


def _compute_moved(comparison: Comparison, ruler: _Ruler, compute: _Places) -> Iterator[Remark]:
    """Compute that is the same but for what it reads, in another place."""
    for place, now in compute:
        value = comparison.old.values[place]
        if ruler.has_passed(place, now) and own(value) == own(comparison.new.values[now]):
            yield Remark(Weight.REST, ruler.way(place, now, what(value)), about(value), "compute")


def _events_against_compute(comparison: Comparison, ruler: _Ruler, events: _Events) -> Iterator[Remark]:
    for place, event in events.items():
        now = comparison.pairs.to_new[place]
        if now is not None and ruler.has_passed(place, now):
            text = ruler.way(place, now, str(event))
            gist = f"{event.step} {event.collective.split()[0]} {'behind' if ' moved behind ' in text else 'before'}"
            yield Remark(Weight.MOVE, text, about(comparison.old.values[place]), gist)


def _events_against_events(comparison: Comparison, ruler: _Ruler, events: _Events) -> Iterator[Remark]:
    """Launches and waits that only passed one another: launches against waits, else each kind by itself."""
    paired = [(place, now) for place in events if (now := comparison.pairs.to_new[place]) is not None]
    still = [pair for pair in paired if not ruler.has_passed(*pair)]
    waits = [pair for pair in still if events[pair[0]].step == "wait"]
    launches = [pair for pair in still if events[pair[0]].step == "launch"]
    held = [waits[number] for number in rising([now for _, now in waits])]
    kept = [launches[number] for number in rising([now for _, now in launches])]
    passed = list(_passed(launches, held)) or [*_passed(waits, held), *_passed(launches, kept)]
    for place, side, other in passed:
        text = f"{events[place]} moved {side} the {events[other]}"
        gist = f"{events[place].step} {events[place].collective.split()[0]} {side} event"
        yield Remark(Weight.MOVE, text, about(comparison.old.values[place]), gist)


def _passed(events: _Places, held: _Places) -> Iterator[tuple[int, str, int]]:
    """The events that another number of ``held`` ones stands before: which, on what side, of which one."""
    old, new = [place for place, _ in held], [now for _, now in held]
    for place, now in events:
        was, stands = bisect.bisect(old, place), bisect.bisect(new, now)
        if stands > was:
            yield place, "behind", old[stands - 1]
        elif stands < was:
            yield place, "before", old[stands]


def _others(comparison: Comparison, pairs: _Places) -> Remark:
    """Casts, packing and unpacking that moved on their own."""
    kept = set(rising([new for _, new in pairs]))
    moved = [old for place, (old, _) in enumerate(pairs) if place not in kept]
    first = comparison.old.values[moved[0]]
    text = f"{what(first)} stands in another place"
    more = f" (and {len(moved) - 1} more operators)" if len(moved) > 1 else ""
    return Remark(Weight.REST, text + more, about(first))
