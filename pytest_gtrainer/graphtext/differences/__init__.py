"""What differs between two graph texts: in words first, then in bounded, folded lines. No torch here.

In come two sequences of lines, out go sentences and lines. Read ``comparison`` first: it says which value of one
graph is which of the other. From it, ``words`` puts at most a dozen sentences together:

- ``moves``: the verdict (dataflow, schedule or spelling), effects, collectives moved against compute;
- ``buckets``: which parameters travel in which collective;
- ``values``: operators, types, operands, and the boundary (inputs, outputs, process groups);
- ``remarks``: how things are called, and one sentence of what holds for many layers.

``lines`` then shows the lines, by a diff in about linear time.

Cost: linear in the number of lines but for sorting; two graphs of 40,000 nodes take under 3 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pytest_gtrainer.graphtext.differences.buckets import bucket_remarks, buckets_of, payloads_of
from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.lines import LIMIT, escaped, graph_diff, line_remarks, text_diff
from pytest_gtrainer.graphtext.differences.moves import effect_remarks, move_remarks, verdict
from pytest_gtrainer.graphtext.differences.remarks import Remark, Weight, sentences
from pytest_gtrainer.graphtext.differences.values import FINDERS
from pytest_gtrainer.graphtext.folding import unfold
from pytest_gtrainer.graphtext.sections import GraphLine

__all__ = ["LIMIT", "diff", "escaped", "explain", "text_diff"]


def diff(old_text: str, new_text: str, limit: int = LIMIT) -> str:
    """How two graph texts differ, in words and then in at most ``limit`` lines; "" if they do not.

    Headers, comments and the way of folding count for nothing.

    Raises:
        TextError: one of them is not graph text.
    """
    old, new = unfold(old_text), unfold(new_text)
    return "" if old == new else "\n".join(explain(old, new, limit=limit))


def explain(
    old: Sequence[GraphLine], new: Sequence[GraphLine], notes: Iterable[str] = (), limit: int = LIMIT
) -> list[str]:
    """How two sequences of lines that are not equal differ: sentences, notes, an empty line, a diff."""
    comparison = Comparison(old, new)
    return [*words(comparison), *notes, "", *graph_diff(old, new, comparison.renumbered(old, new), limit)]


_MOST = 5_000
"""Of so many differences of one sort the rest is not looked at, so that time stays bounded."""


def words(comparison: Comparison) -> list[str]:
    """At most a dozen sentences, the weightiest first; at least one if the lines differ."""
    return sentences(_remarks(comparison), limit=12)


def _remarks(comparison: Comparison) -> Iterator[Remark]:
    """All that there is to say. A view has no values, so it has neither a verdict nor most of the rest."""
    old, new = comparison.old, comparison.new
    if is_graph := old.values or new.values:
        yield verdict(comparison)
        yield from effect_remarks(comparison)
    buckets, others = [buckets_of(side) if is_graph else payloads_of(side.others) for side in (old, new)]
    said, explained = bucket_remarks(buckets, others)
    yield from said
    common = set(buckets) & set(others)
    if not is_graph and [b for b in buckets if b in common] != [b for b in others if b in common]:
        yield Remark(Weight.BUCKET, "payloads are issued in another order")
    comparison.explained = frozenset(explained)
    for find in (*FINDERS, move_remarks):
        yield from islice(find(comparison), _MOST)
    for place, other in comparison.definitions.items():
        was, now = old.definitions[place].name, new.definitions[other].name
        if was in old.bodies and old.bodies[was] != new.bodies[now]:
            for sentence in words(Comparison(old.bodies[was], new.bodies[now]))[:3]:
                yield Remark(Weight.OPERATOR, f"in {now}: {sentence}")
    yield from line_remarks(old.others, new.others)
