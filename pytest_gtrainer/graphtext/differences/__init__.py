"""Differences between two graph texts: sentences first, then bounded, folded lines. No torch here.

Read ``comparison`` first: it pairs the values of the two graphs. ``words`` collects at most a dozen
sentences. First comes the *verdict*: has the dataflow changed, only the schedule, or only the
spelling? Then whether random numbers are drawn, and values changed in place, in the same order.
``buckets`` compares which parameters travel in which collective, ``values`` everything else.
``remarks`` names values and modules, and ``lines`` shows the lines.

Cost: linear in the number of lines but for sorting; two graphs of 40,000 nodes take under 3 s.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pytest_gtrainer.facts import counted
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.graphtext.differences.buckets import bucket_remarks, buckets_of, payloads_of
from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.lines import LIMIT, graph_diff, line_remarks, text_diff
from pytest_gtrainer.graphtext.differences.remarks import (
    Remark,
    Weight,
    about,
    reference_to,
    sentences,
    unit,
    what,
)
from pytest_gtrainer.graphtext.differences.values import FINDERS
from pytest_gtrainer.graphtext.folding import rising, unfold
from pytest_gtrainer.graphtext.sections import GraphLine, Scope

__all__ = ["LIMIT", "diff", "explain", "text_diff"]


def diff(old_text: str, new_text: str, limit: int = LIMIT) -> str:
    """Return how two graph texts differ, in words and then in at most ``limit`` lines.

    Returns "" if they do not. Comments and the way of folding are ignored; of headers, only the
    format, the view and the groups of all ranks count.

    Raises:
        TextError: one of them is not graph text.
    """
    if unlike := header.unlike(old_text, new_text):
        return unlike
    old, new = unfold(old_text), unfold(new_text)
    if old == new:
        return ""
    return "\n".join(explain(old, new, limit=limit))


def explain(
    old: Sequence[GraphLine],
    new: Sequence[GraphLine],
    notes: Iterable[str] = (),
    limit: int = LIMIT,
) -> list[str]:
    """Return how two unequal sequences of lines differ: sentences, notes, an empty line, a diff."""
    comparison = Comparison(old, new)
    return [
        *sentences(_remarks(comparison)),
        *notes,
        "",
        *graph_diff(old, new, comparison.renumbered(old, new), limit),
    ]


# The most differences of one sort that are looked at, so that the time of a failing test is
# bounded.
_MOST = 5_000


def words(old: Sequence[GraphLine], new: Sequence[GraphLine]) -> list[str]:
    """Return at most a dozen sentences, the weightiest first; at least one if the lines differ."""
    return sentences(_remarks(Comparison(old, new)))


def _remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield all remarks. A view has no values, so it has neither a verdict nor most of the rest."""
    if not (comparison.old.values or comparison.new.values):
        yield from _changes(comparison)
        return
    yield verdict(comparison)
    yield from effect_remarks(comparison)
    whole: set[str] = set()
    for remark in module_remarks(comparison):
        whole.add(remark.about)
        yield remark
    for remark in _changes(comparison):
        # A module that is gone or new as a whole needs no sentence for each of its operators.
        if unit(remark.about) not in whole:
            yield remark


def module_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield a remark for each layer or module with parameters of which one graph has nothing."""
    old, new = comparison.old, comparison.new
    for verb, graph, partners, other in (
        ("gone", old, comparison.to_new, new),
        ("new", new, comparison.to_old, old),
    ):
        known = {unit(owner) for value in other.values for owner in value.scope.owners}
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for place, value in enumerate(graph.values):
            if partners[place] is not None:
                # Its work is done elsewhere.
                known.add(unit(value.scope.owners[0]))
            found[unit(value.scope.owners[0])][value.scope.space] += 1

        for module, counts in found.items():
            if module not in known and counts["P"] and (counts["fwd"] or counts["bwd"]):
                parts = [counted(counts["P"], "parameter")]
                for space in ("fwd", "bwd"):
                    if counts[space]:
                        parts.append(f"{counted(counts[space], 'operator')} in {space}")
                yield Remark(Weight.WHOLE, f"{verb}: {module}, with {', '.join(parts)}", module)


def _changes(comparison: Comparison) -> Iterator[Remark]:
    """Yield all remarks but the verdict, effects and whole modules."""
    old, new = comparison.old, comparison.new
    if old.values or new.values:
        buckets, others = buckets_of(old), buckets_of(new)
    else:
        buckets, others = payloads_of(old.others), payloads_of(new.others)

    explained: set[Scope] = set()
    for remark, by_it in bucket_remarks(buckets, others):
        yield remark
        explained.update(bucket.scope for bucket in by_it)
    # A graph has launches, whose moves ``FINDERS`` report; a layout has the order alone.
    if not (old.values or new.values):
        common = set(buckets) & set(others)
        ours = [bucket for bucket in buckets if bucket in common]
        if ours != [bucket for bucket in others if bucket in common]:
            yield Remark(Weight.BUCKET, "payloads are issued in another order")

    comparison.explained = frozenset(explained)
    for find in FINDERS:
        yield from islice(find(comparison), _MOST)
    for place, other in comparison.definitions.items():
        was, now = old.definitions[place].name, new.definitions[other].name
        if was in old.bodies and old.bodies[was] != new.bodies[now]:
            for sentence in words(old.bodies[was], new.bodies[now])[:3]:
                yield Remark(Weight.OPERATOR, f"in {now}: {sentence}")

    yield from line_remarks(old.others, new.others)


def verdict(comparison: Comparison) -> Remark:
    """Return the kind of the difference.

    A changed dataflow is reported at the first operator that the other graph does not compute.
    """
    ours = list(zip(comparison.ours.values, comparison.old.values, strict=True))
    theirs = list(zip(comparison.theirs.values, comparison.new.values, strict=True))
    if not comparison.same_dataflow:
        for title, side, other in ((", first at", theirs, ours), (", without", ours, theirs)):
            known = {digest for digest, _ in other}
            for digest, value in side:
                if digest not in known:
                    return Remark(Weight.VERDICT, f"the dataflow differs{title} {what(value)}")
        return Remark(Weight.VERDICT, "the dataflow differs")

    annotations: Counter[tuple[int, Scope, str]] = Counter()
    for digest, value in ours:
        annotations[digest, value.scope, value.tags] += 1
    for digest, value in theirs:
        annotations[digest, value.scope, value.tags] -= 1
    notes = ", other modules, buckets or tags" if any(annotations.values()) else ""
    places = [new for old, new in comparison.places if comparison.old.values[old].operator]
    if moved := len(places) - len(rising(places)):
        operators = sum(not value.is_input for value in comparison.old.values)
        text = f"same dataflow, other schedule ({moved} of {operators} operators moved)"
        return Remark(Weight.VERDICT, text + notes)

    if not comparison.same_bodies:
        notes += ", other graphs inside"
    elif not notes and comparison.old.definitions == comparison.new.definitions:
        notes = ": only the spelling differs"
    elif not notes:
        notes = ", other definitions at the head"

    return Remark(Weight.VERDICT, f"same dataflow, same schedule{notes}")


def effect_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield changes of order that may change results although the dataflow is the same."""
    if not comparison.same_dataflow or comparison.effects is None:
        return
    before, after = comparison.ours.values, comparison.theirs.values
    old, new = comparison.effects
    for ours, theirs in zip(old.draws, new.draws, strict=True):
        if before[ours] != after[theirs]:
            was, now = comparison.old.values[ours], comparison.new.values[theirs]
            name = what if what(was) != what(now) else reference_to
            text = (
                "random numbers are drawn in another order, so results differ: "
                f"{name(now)} before {name(was)}"
            )
            yield Remark(Weight.EFFECT, text, about(now))
            break

    def history(
        digests: Sequence[int], storage: int, changes: Sequence[tuple[int | None, list[int]]]
    ) -> str:
        # Readers between two changes may stand in any order.
        steps = []
        for change, readers in changes:
            digest = None if change is None else digests[change]
            steps.append((digest, sorted(digests[reader] for reader in readers)))
        return repr((digests[storage], steps))

    left = Counter(history(after, *item) for item in new.histories.items())
    for storage, changes in old.histories.items():
        same = history(before, storage, changes)
        if left[same] > 0:
            left[same] -= 1
            continue
        changer = next(place for place, _ in changes if place is not None)
        changed, value = comparison.old.values[storage], comparison.old.values[changer]
        text = (
            f"results may differ: what reads {reference_to(changed)} and {what(value)}, "
            "which changes it in place, are in another order"
        )
        yield Remark(Weight.EFFECT, text, about(value), "in place")
