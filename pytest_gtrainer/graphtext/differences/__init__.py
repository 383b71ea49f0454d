"""What differs between two graph texts: in words first, then in bounded, folded lines. No torch here.

- ``words``: at most a dozen sentences, put together from what the modules below find: the ``verdict``
  (dataflow, schedule or spelling), ``buckets``, ``operators``, ``values``, ``boundary`` (inputs, outputs,
  process groups), ``moves`` of collectives against compute. ``pairs`` says which value of one graph is
  which of the other; ``remarks`` makes one sentence of what holds for many layers.
- ``hunks``: the lines, by ``lines``, a diff in about linear time.

Cost: linear in the number of lines but for sorting; two graphs of 40,000 nodes take under 2 s.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.hunks import LIMIT, graph_diff, text_diff
from pytest_gtrainer.graphtext.differences.words import words
from pytest_gtrainer.graphtext.sections import Record
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


def explain(old: Sequence[Record], new: Sequence[Record], notes: Iterable[str] = (), limit: int = LIMIT) -> list[str]:
    """How two sequences of records that are not equal differ: sentences, notes, an empty line, a diff."""
    with _uncollected():
        comparison = Comparison.of(old, new)
        return [*words(comparison), *notes, "", *graph_diff(old, new, comparison.renumbered(old, new), limit)]


@contextmanager
def _uncollected() -> Iterator[None]:
    """A fifth of the time would go into looking for garbage among records that are all in use.

    What stays in caches counts as old then, so that the next collection does not walk over all of it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else a user's own objects would be unfrozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
