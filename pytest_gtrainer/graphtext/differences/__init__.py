"""What differs between two graph texts: in words first, then in bounded, folded lines. No torch here.

In come two sequences of records, out go sentences and lines. Read ``comparison`` first: it says which value of one
graph is which of the other. From it, ``words`` puts at most a dozen sentences together:

- ``moves``: the verdict (dataflow, schedule or spelling), effects, collectives moved against compute;
- ``buckets``: which parameters travel in which collective;
- ``values``: operators, types, operands, and the boundary (inputs, outputs, process groups);
- ``remarks``: how things are called, and one sentence of what holds for many layers.

``lines`` then shows the lines, by a diff in about linear time.

Cost: linear in the number of lines but for sorting; two graphs of 40,000 nodes take under 2 s.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from pytest_gtrainer.graphtext.differences.buckets import (
    LaunchedBucket,
    bucket_remarks,
    buckets_of,
    line_remarks,
    payloads_of,
)
from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.lines import LIMIT, graph_diff, text_diff
from pytest_gtrainer.graphtext.differences.moves import effect_remarks, move_remarks, verdict
from pytest_gtrainer.graphtext.differences.remarks import Remark, Weight, sentences
from pytest_gtrainer.graphtext.differences.values import (
    argument_remarks,
    boundary_remarks,
    collective_remarks,
    group_remarks,
    module_remarks,
    operator_remarks,
    tag_remarks,
    type_remarks,
)
from pytest_gtrainer.graphtext.sections import GraphLine
from pytest_gtrainer.graphtext.unfolding import unfold

__all__ = ["LIMIT", "diff", "explain", "text_diff"]


def diff(old_text: str, new_text: str, limit: int = LIMIT) -> str:
    """How two graph texts differ, in words and then in at most ``limit`` lines; "" if they do not.

    Headers, comments and the way of folding count for nothing.

    Raises:
        TextError: one of them is not graph text.
    """
    with _uncollected():
        old, new = unfold(old_text), unfold(new_text)
        return "" if old == new else "\n".join(explain(old, new, limit=limit))


def explain(
    old: Sequence[GraphLine], new: Sequence[GraphLine], notes: Iterable[str] = (), limit: int = LIMIT
) -> list[str]:
    """How two sequences of records that are not equal differ: sentences, notes, an empty line, a diff."""
    with _uncollected():
        comparison = Comparison.of(old, new)
        return [*words(comparison), *notes, "", *graph_diff(old, new, comparison.renumbered(old, new), limit)]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Half of the time would go into looking for garbage among lines and values that are all in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_MOST_SENTENCES = 12
_MOST = 5_000
"""Of so many differences of one sort the rest is not looked at, so that time stays bounded."""


def words(comparison: Comparison) -> list[str]:
    """At most a dozen sentences, the weightiest first; at least one if the records differ."""
    is_graph = comparison.old.values or comparison.new.values
    return sentences(_graph_remarks(comparison) if is_graph else _view_remarks(comparison), _MOST_SENTENCES)


def _graph_remarks(comparison: Comparison) -> Iterator[Remark]:
    yield verdict(comparison)
    yield from effect_remarks(comparison)
    said, explained = bucket_remarks(buckets_of(comparison.old), buckets_of(comparison.new))
    yield from said
    comparison = replace(comparison, explained=frozenset(explained))
    yield from boundary_remarks(comparison)
    yield from group_remarks(comparison)
    yield from collective_remarks(comparison)
    yield from operator_remarks(comparison)
    for find in (type_remarks, argument_remarks, module_remarks, tag_remarks, move_remarks):
        yield from islice(find(comparison), _MOST)
    yield from _body_remarks(comparison)
    yield from line_remarks(comparison.old.others, comparison.new.others)


def _body_remarks(comparison: Comparison) -> Iterator[Remark]:
    """What differs inside of bodies."""
    for place, other in comparison.definitions.items():
        was, now = comparison.old.definitions[place].name, comparison.new.definitions[other].name
        if was in comparison.old.bodies and comparison.old.bodies[was] != comparison.new.bodies[now]:
            inside = Comparison.of(comparison.old.bodies[was], comparison.new.bodies[now])
            for sentence in words(inside)[:3]:
                yield Remark(Weight.OPERATOR, f"in {now}: {sentence}")


def _view_remarks(comparison: Comparison) -> Iterator[Remark]:
    sides = [payloads_of(graph.others) for graph in (comparison.old, comparison.new)]
    yield from bucket_remarks(*sides)[0]
    yield from _launches_reordered(*sides)
    yield from boundary_remarks(comparison)
    yield from line_remarks(comparison.old.others, comparison.new.others)


def _launches_reordered(old: Sequence[LaunchedBucket], new: Sequence[LaunchedBucket]) -> Iterator[Remark]:
    kept = [bucket for bucket in old if bucket in set(new)]
    order = [bucket for bucket in new if bucket in set(old)]
    if kept != order:
        yield Remark(Weight.BUCKET, "payloads are issued in another order")
