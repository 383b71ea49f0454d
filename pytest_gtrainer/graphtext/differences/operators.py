"""Operators gained and lost per module, and collectives in all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import attrgetter

from pytest_gtrainer.graphtext.dataflow import Dataflow
from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.describing import NAMESPACE, is_collective, where
from pytest_gtrainer.graphtext.differences.remarks import Remark, Weight, listed
from pytest_gtrainer.graphtext.effects import short_name
from pytest_gtrainer.graphtext.references import Scope


def operator_remarks(comparison: Comparison) -> Iterator[Remark]:
    """What values were lost and gained, by module; collectives of changed buckets are told there."""
    old, new, pairs = comparison.old, comparison.new, comparison.pairs
    by_scope: dict[Scope, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for verb, graph, places in (("lost", old, pairs.lost(old)), ("gained", new, pairs.gained(new))):
        for place in places:
            value = graph.values[place]
            if value.scope in comparison.explained and (value.scope.is_bucket or is_collective(value)):
                continue
            by_scope[value.scope][verb][value.operator] += 1
    for scope, changes in by_scope.items():
        told = ", ".join(f"{verb} {_counted(counts)}" for verb, counts in changes.items())
        yield Remark(Weight.OPERATOR, f"{where(scope)}: {told}", scope.modules[0], told)


def _counted(counts: Counter[str]) -> str:
    return listed([f"{count} {operator}" if count > 1 else operator for operator, count in counts.items()], 4)


def collective_remarks(comparison: Comparison) -> Iterator[Remark]:
    """How many of each collective there are, where that has changed."""
    old, new = _collectives(comparison.old), _collectives(comparison.new)
    for name in dict.fromkeys([*old, *new]):
        if old[name] != new[name]:
            yield Remark(Weight.COLLECTIVE, f"{name}: {old[name]} became {new[name]}")


def _collectives(graph: Dataflow) -> Counter[str]:
    counts: Counter[str] = Counter()
    for operator, count in Counter(map(attrgetter("operator"), graph.values)).items():
        if operator.startswith(NAMESPACE):
            counts[short_name(operator)] += count
    return counts
