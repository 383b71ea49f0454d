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
from collections.abc import Iterator, Sequence

from pytest_gtrainer.graphtext.dataflow import Dataflow
from pytest_gtrainer.graphtext.differences.comparison import Comparison, own
from pytest_gtrainer.graphtext.differences.remarks import (
    Remark,
    Weight,
    about,
    communicates,
    events_of,
    reference_to,
    unit_of,
    what,
)
from pytest_gtrainer.graphtext.equivalence import effects
from pytest_gtrainer.graphtext.folding import rising


def verdict(comparison: Comparison) -> Remark:
    """What kind of difference it is. Another dataflow begins at an operator that reads only what is on both sides."""
    ours, theirs = [
        list(zip(digests.values, graph.values, strict=True))
        for digests, graph in ((comparison.ours, comparison.old), (comparison.theirs, comparison.new))
    ]
    if not comparison.same_dataflow:
        for title, side, other in ((", first at", theirs, ours), (", without", ours, theirs)):
            known = {digest for digest, _ in other}
            for digest, value in side:
                if digest not in known:
                    return Remark(Weight.VERDICT, f"the dataflow differs{title} {what(value)}")
        return Remark(Weight.VERDICT, "the dataflow differs")
    annotations = [Counter((digest, value.scope, value.tags) for digest, value in side) for side in (ours, theirs)]
    notes = "other modules, buckets or tags" if annotations[0] != annotations[1] else ""
    places = [new for old, new in comparison.places if comparison.old.values[old].operator]
    if moved := len(places) - len(rising(places)):
        operators = sum(not value.is_input for value in comparison.old.values)
        text = f"same dataflow, other schedule ({moved} of {operators} operators moved)"
        return Remark(Weight.VERDICT, text + (f", {notes}" if notes else ""))
    if not notes and comparison.old.definitions != comparison.new.definitions:
        notes = "other definitions at the head"
    return Remark(
        Weight.VERDICT, f"same dataflow, same schedule{f', {notes}' if notes else ': only the spelling differs'}"
    )


def effect_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Changes of order that may change results although the dataflow is the same."""
    if not comparison.same_dataflow:
        return
    before, after = comparison.ours.values, comparison.theirs.values
    old, new = effects(comparison.old), effects(comparison.new)
    for ours, theirs in zip(old.draws, new.draws, strict=True):
        if before[ours] != after[theirs]:
            was, now = comparison.old.values[ours], comparison.new.values[theirs]
            told = what if what(was) != what(now) else reference_to
            text = f"random numbers are drawn in another order, so results differ: {told(now)} before {told(was)}"
            yield Remark(Weight.EFFECT, text, about(now))
            break

    histories = [
        {
            storage: repr((digests[storage], [
                (None if change is None else digests[change], sorted(digests[reader] for reader in readers))
                for change, readers in changes
            ]))
            for storage, changes in found.histories.items()
        }
        for found, digests in ((old, before), (new, after))
    ]  # fmt: skip
    left = Counter(histories[1].values())
    for storage, history in histories[0].items():
        if left[history] > 0:
            left[history] -= 1
            continue
        changer = next(place for place, _ in old.histories[storage] if place is not None)
        changed, value = comparison.old.values[storage], comparison.old.values[changer]
        text = f"results may differ: what reads {reference_to(changed)} and {what(value)}, which changes it in place"
        yield Remark(Weight.EFFECT, f"{text}, stand in another order", about(value), "in place")


_Places = Sequence[tuple[int, int]]
_MOST = 2 / 3
"""The part of a layer's compute that is called most of it."""


def move_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Collectives moved against compute and against each other, then compute; if it is none of these, all else."""
    values = comparison.old.values
    pairs = [pair for pair in comparison.places if values[pair[0]].operator]
    kept = set(rising([new for _, new in pairs]))
    if len(kept) == len(pairs):
        return
    serving = _serving(comparison.old)
    compute = [pair for pair in pairs if not serving[pair[0]]]
    ruler = _Ruler(comparison.old, compute)
    told = list(_event_moves(comparison, ruler))
    for place, now in compute:  # what is the same but for what it reads
        if ruler.has_passed(place, now) and own(values[place]) == own(comparison.new.values[now]):
            text = ruler.way(place, now, what(values[place]))
            told.append(Remark(Weight.REST, text, about(values[place]), "compute"))
    yield from told
    if not told:  # casts, packing and unpacking that moved on their own
        moved = [old for place, (old, _) in enumerate(pairs) if place not in kept]
        more = f" (and {len(moved) - 1} more operators)" if len(moved) > 1 else ""
        first = values[moved[0]]
        yield Remark(Weight.REST, f"{what(first)} stands in another place{more}", about(first))


def _serving(graph: Dataflow) -> list[bool]:
    """Whether a value is a collective, is in a bucket, or is made of parameters only."""
    communicated = [communicates(value) or value.scope.is_bucket for value in graph.values]
    serving: list[bool] = []
    for value, is_communicated in zip(graph.values, communicated, strict=True):
        prepared = [serving[source] and not communicated[source] for source in value.sources]
        is_prepared = value.scope.space == "P" if value.is_input else bool(prepared) and all(prepared)
        serving.append(is_communicated or is_prepared)
    return serving


class _Ruler:
    """Compute in the order that both sides have: its places, their layers, and the bounds of each one's layer."""

    def __init__(self, graph: Dataflow, compute: _Places) -> None:
        kept = [compute[place] for place in rising([new for _, new in compute])]
        self.graph = graph
        self.old, self.new = [old for old, _ in kept], [new for _, new in kept]
        self.units = [unit_of(graph.values[place].scope) for place in self.old]
        self.stretches: list[tuple[int, int]] = []
        for _, members in itertools.groupby(self.units):
            first, length = len(self.stretches), len(list(members))
            self.stretches += [(first, first + length)] * length

    def has_passed(self, place: int, now: int) -> bool:
        return bisect.bisect(self.old, place) != bisect.bisect(self.new, now)

    def way(self, place: int, now: int, subject: str) -> str:
        """That something moved from ``place`` to ``now``: behind or before which compute.

        Of the two layers next to where it stands now, that is the one of which more was passed.
        """
        was, stands = bisect.bisect(self.old, place), bisect.bisect(self.new, now)
        start, end = sorted((was, stands))
        side, mark = ("behind", end - 1) if stands > was else ("before", start)

        def passed(bounds: tuple[int, int]) -> int:
            return min(bounds[1], end) - max(bounds[0], start)

        most = self.stretches[mark]
        other = most[0] - 1 if side == "behind" else most[1]
        if start <= other < end:
            most = max(most, self.stretches[other], key=passed)
        unit, part = self.units[most[0]], passed(most) / (most[1] - most[0])
        value, last = self.graph.values[place], self.graph.values[self.old[mark]]
        if part > _MOST and unit and (communicates(value) or unit_of(value.scope) != unit):
            return f"{subject} moved {side} {'' if part == 1 else 'most of '}the compute of {unit}"
        if subject == what(last):
            return f"{reference_to(value)} moved {side} {reference_to(last)}"
        return f"{subject} moved {side} {what(last)}"


def _event_moves(comparison: Comparison, ruler: _Ruler) -> Iterator[Remark]:
    """Launches and waits that passed compute, then those that only passed one another."""
    values, events = comparison.old.values, events_of(comparison.old)
    still: dict[str, list[tuple[int, int]]] = {"launch": [], "wait": []}
    for place, event in events.items():
        now = comparison.to_new[place]
        if now is not None and ruler.has_passed(place, now):
            text = ruler.way(place, now, str(event))
            side = "behind" if " moved behind " in text else "before"
            yield Remark(Weight.MOVE, text, about(values[place]), f"{event.step} {event.collective.split()[0]} {side}")
        elif now is not None:
            still[event.step].append((place, now))

    launches, waits = still["launch"], still["wait"]
    kept, held = ([side[number] for number in rising([now for _, now in side])] for side in (launches, waits))
    for place, side, other in list(_passed(launches, held)) or [*_passed(waits, held), *_passed(launches, kept)]:
        step, collective = event = events[place]
        text = f"{event} moved {side} the {events[other]}"
        yield Remark(Weight.MOVE, text, about(values[place]), f"{step} {collective.split()[0]} {side} event")


def _passed(events: _Places, held: _Places) -> Iterator[tuple[int, str, int]]:
    """The events that another number of ``held`` ones stands before: which, on what side, of which one."""
    old, new = [place for place, _ in held], [now for _, now in held]
    for place, now in events:
        was, stands = bisect.bisect(old, place), bisect.bisect(new, now)
        if stands > was:
            yield place, "behind", old[stands - 1]
        elif stands < was:
            yield place, "before", old[stands]
