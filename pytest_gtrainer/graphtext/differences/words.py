"""What differs between two graphs, in words of the field, before any line is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from pytest_gtrainer.graphtext.differences.boundary import boundary_remarks
from pytest_gtrainer.graphtext.differences.buckets import Bucket, bucket_remarks, buckets_of
from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.moves import move_remarks
from pytest_gtrainer.graphtext.differences.operators import collective_remarks, operator_remarks
from pytest_gtrainer.graphtext.differences.remarks import Remark, Weight, sentences
from pytest_gtrainer.graphtext.differences.values import (
    argument_remarks,
    group_remarks,
    module_remarks,
    tag_remarks,
    type_remarks,
)
from pytest_gtrainer.graphtext.differences.verdict import effect_remarks, verdict
from pytest_gtrainer.graphtext.differences.views import line_remarks, payloads_of

LIMIT = 12
_MOST = 5_000
"""Of so many differences of one sort the rest is not looked at, so that time stays bounded."""


def words(comparison: Comparison) -> list[str]:
    """At most a dozen sentences, the weightiest first; at least one if the records differ."""
    is_graph = comparison.old.values or comparison.new.values
    return sentences(_graph_remarks(comparison) if is_graph else _view_remarks(comparison), LIMIT)


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


def _launches_reordered(old: Sequence[Bucket], new: Sequence[Bucket]) -> Iterator[Remark]:
    kept = [bucket for bucket in old if bucket in set(new)]
    order = [bucket for bucket in new if bucket in set(old)]
    if kept != order:
        yield Remark(Weight.BUCKET, "payloads are issued in another order")
