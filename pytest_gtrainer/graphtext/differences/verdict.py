"""The first sentence: has the dataflow changed, or only the schedule, or only how it is spelled?

With it stands what equal dataflow does not promise: that random numbers are drawn and values changed in
place in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_gtrainer.graphtext.dataflow import Value
from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.describing import about, reference_to, what
from pytest_gtrainer.graphtext.differences.order import rising
from pytest_gtrainer.graphtext.differences.pairs import Side
from pytest_gtrainer.graphtext.differences.remarks import Remark, Weight
from pytest_gtrainer.graphtext.effects import Effects, effects, histories_by_digest


def verdict(comparison: Comparison) -> Remark:
    """What kind of difference it is."""
    if not comparison.same_dataflow:
        return Remark(Weight.VERDICT, f"the dataflow differs{_first_origin(comparison)}")
    is_annotated = _is_annotated(comparison)
    moved = _moved(comparison)
    notes = "other modules, buckets or tags" if is_annotated else ""
    if moved:
        schedule = f"other schedule ({moved} of {len(list(comparison.old.computed))} operators moved)"
        return Remark(Weight.VERDICT, "same dataflow, " + schedule + (f", {notes}" if notes else ""))
    if notes:
        return Remark(Weight.VERDICT, f"same dataflow, same schedule, {notes}")
    if comparison.old.definitions != comparison.new.definitions:
        return Remark(Weight.VERDICT, "same dataflow, same schedule, other definitions at the head")
    return Remark(Weight.VERDICT, "same dataflow, same schedule: only the spelling differs")


def _is_annotated(comparison: Comparison) -> bool:
    """Whether modules or tags are others; not if all values have partners in their modules, and no tags."""
    pairs = comparison.pairs
    if not any(pairs.left) and not pairs.elsewhere and not comparison.old.tagged and not comparison.new.tagged:
        return False
    return Counter(_annotations(comparison.before)) != Counter(_annotations(comparison.after))


def _annotations(side: Side) -> Iterator[tuple[object, ...]]:
    for digest, value in zip(side.digests.values, side.graph.values, strict=True):
        yield digest, value.scope, value.tags


def _moved(comparison: Comparison) -> int:
    places = [new for old, new in comparison.pairs.places if comparison.old.values[old].operator]
    return len(places) - len(rising(places))


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
