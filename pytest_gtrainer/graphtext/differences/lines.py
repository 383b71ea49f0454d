"""Differences of two lists of lines in about linear time.

The idea is that of patience diff (Bram Cohen): lines that stand once on either side, in the same order,
are anchors, and what lies between two of them is compared on its own. Where no line stands once, a greedy
search (Myers 1986) finds the shortest way if it has few steps. ``difflib``, which takes quadratic time and
more, sees only gaps of a few lines. What none of them resolves is one replacement: the result is right, only
not the shortest.

Cost: each of ``_DEPTH`` levels reads a line a few times; the greedy search at most ``2 * _STEPS``
times.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pytest_gtrainer.graphtext.differences.order import rising

_SMALL = 2048
"""``difflib`` compares gaps of at most so many pairs of lines."""
_DEPTH = 6
_STEPS = 32
"""The greedy search ends after so many lines lost or gained."""
CONTEXT = 3


class Change(NamedTuple):
    """Lines ``old[first:last]`` became ``new[begin:end]``."""

    first: int
    last: int
    begin: int
    end: int


def changes(old: Sequence[str], new: Sequence[str]) -> list[Change]:
    """Where two lists differ, in order.

    >>> changes("abcd", "axcde")
    [Change(first=1, last=2, begin=1, end=2), Change(first=4, last=4, begin=4, end=5)]
    """
    return list(_joined(_changes(old, new, Change(0, len(old), 0, len(new)), 0)))


def _joined(found: Iterator[Change]) -> Iterator[Change]:
    """Neighbours without an equal line between them are one."""
    last: Change | None = None
    for change in found:
        if last and (last.last, last.end) == (change.first, change.begin):
            last = Change(last.first, change.last, last.begin, change.end)
            continue
        if last:
            yield last
        last = change
    if last:
        yield last


def _changes(old: Sequence[str], new: Sequence[str], gap: Change, depth: int) -> Iterator[Change]:
    gap = _trimmed(old, new, gap)
    first, last, begin, end = gap
    if first == last or begin == end:
        if first != last or begin != end:
            yield gap
        return
    if (last - first) * (end - begin) <= _SMALL:
        yield from _small(old, new, gap)
        return
    anchors = _anchors(old[first:last], new[begin:end]) if depth < _DEPTH else []
    if not anchors:
        yield from _few(old, new, gap) or [gap]
        return
    for at, to in [*anchors, (last - first, end - begin)]:
        yield from _changes(old, new, Change(first, gap.first + at, begin, gap.begin + to), depth + 1)
        first, begin = gap.first + at, gap.begin + to


def _trimmed(old: Sequence[str], new: Sequence[str], gap: Change) -> Change:
    """Without the lines that both sides begin and end with."""
    first, last, begin, end = gap
    while first < last and begin < end and old[first] == new[begin]:
        first, begin = first + 1, begin + 1
    while first < last and begin < end and old[last - 1] == new[end - 1]:
        last, end = last - 1, end - 1
    return Change(first, last, begin, end)


def _small(old: Sequence[str], new: Sequence[str], gap: Change) -> Iterator[Change]:
    first, last, begin, end = gap
    matcher = difflib.SequenceMatcher(None, old[first:last], new[begin:end], autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "equal":
            yield Change(first + i, first + j, begin + k, begin + m)


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Places of lines that stand once on either side, rising on both."""
    ours, theirs = Counter(old), Counter(new)
    places = {line: place for place, line in enumerate(new) if theirs[line] == 1}
    common = [(place, places[line]) for place, line in enumerate(old) if ours[line] == 1 and line in places]
    return [common[place] for place in rising([to for _, to in common])]


def _few(old: Sequence[str], new: Sequence[str], gap: Change) -> list[Change] | None:
    """The shortest way from one side to the other, a line at a time; None if it has too many steps.

    ``reach[k]`` is the furthest line of the old side that ``d`` steps come to on the diagonal ``k``,
    where ``k`` more lines have been lost than gained.
    """
    first, last, begin, end = gap
    if len(set(old[first:last]) ^ set(new[begin:end])) > _STEPS:  # a step for each of them at least
        return None
    reach = {1: first}
    trace: list[dict[int, int]] = []
    for step in range(_STEPS):
        trace.append(dict(reach))
        for k in range(-step, step + 1, 2):
            x = reach[k + 1] if _gains(reach, k, step) else reach[k - 1] + 1
            y = begin + x - first - k
            while x < last and y < end and old[x] == new[y]:
                x, y = x + 1, y + 1
            reach[k] = x
            if x >= last and y >= end:
                return _walked_back(trace, gap)
    return None


def _gains(reach: dict[int, int], k: int, step: int) -> bool:
    """Whether the step to a diagonal is a line gained; else one is lost."""
    return k == -step or (k != step and reach[k - 1] < reach[k + 1])


def _walked_back(trace: list[dict[int, int]], gap: Change) -> list[Change]:
    found: list[Change] = []
    x, y = gap.last, gap.end
    for step in range(len(trace) - 1, 0, -1):
        reach = trace[step]
        k = (x - gap.first) - (y - gap.begin)
        gains = _gains(reach, k, step)
        x = reach[k + 1] if gains else reach[k - 1]
        y = gap.begin + x - gap.first - (k + 1 if gains else k - 1)
        found.append(Change(x, x, y, y + 1) if gains else Change(x, x + 1, y, y))
    return found[::-1]


def hunks(old: Sequence[str], new: Sequence[str]) -> Iterator[list[Change]]:
    """Changes that share their lines of context."""
    group: list[Change] = []
    for change in changes(old, new):
        if group and change.first - group[-1].last > 2 * CONTEXT:
            yield group
            group = []
        group.append(change)
    if group:
        yield group
