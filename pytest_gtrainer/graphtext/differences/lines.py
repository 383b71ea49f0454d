"""Bounded differences in lines: of texts, and of graphs section by section.

The same change in many layers is shown once. Every line fits a terminal; a pair of lines that differ far
to the right is cut on the left.

Lines are compared in about linear time. The idea is that of patience diff (Bram Cohen): lines that stand once on
either side, in the same order, are anchors, and what lies between two of them is compared on its own. Where no line
stands once, a greedy search (Myers 1986) finds the shortest way if it has few steps. ``difflib``, which takes
quadratic time and more, sees only gaps of a few lines. What none of them resolves is one replacement: the result is
right, only not the shortest. Each of ``_DEPTH`` levels reads a line a few times; the greedy search at most
``2 * _STEPS`` times.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pytest_gtrainer.graphtext.differences.remarks import WIDTH, Remark, Weight, cut, listed, ranges, same_start
from pytest_gtrainer.graphtext.folding import rising
from pytest_gtrainer.graphtext.sections import GraphLine
from pytest_gtrainer.graphtext.syntax import absolute

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
    joined: list[Change] = []
    for change in _changes(old, new, Change(0, len(old), 0, len(new)), 0):
        if joined and (joined[-1].last, joined[-1].end) == (change.first, change.begin):  # no equal line between them
            joined[-1] = joined[-1]._replace(last=change.last, end=change.end)
        else:
            joined.append(change)
    return joined


def _changes(old: Sequence[str], new: Sequence[str], gap: Change, depth: int) -> Iterator[Change]:
    first, last, begin, end = gap
    while first < last and begin < end and old[first] == new[begin]:
        first, begin = first + 1, begin + 1
    while first < last and begin < end and old[last - 1] == new[end - 1]:
        last, end = last - 1, end - 1
    gap = Change(first, last, begin, end)
    if first == last or begin == end:
        if first != last or begin != end:
            yield gap
        return
    ours, theirs = old[first:last], new[begin:end]
    if len(ours) * len(theirs) <= _SMALL:
        for tag, i, j, k, m in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            if tag != "equal":
                yield Change(first + i, first + j, begin + k, begin + m)
        return
    anchors = _anchors(ours, theirs) if depth < _DEPTH else []
    if not anchors:
        yield from _few(old, new, gap) or [gap]
        return
    for at, to in [*anchors, (len(ours), len(theirs))]:
        yield from _changes(old, new, Change(first, gap.first + at, begin, gap.begin + to), depth + 1)
        first, begin = gap.first + at, gap.begin + to


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


LIMIT = 60
_MOST_LINES = 16
"""Of more lines lost or gained in one place than this, the first are shown."""
_HEAD = ["--- golden", "+++ obtained"]
_LEAD = 40
_NUMBERED = re.compile(r"(?P<container>.+)\[(?P<number>\d+)\]")
_Lines = tuple[str, ...]


def text_diff(old: Sequence[str], new: Sequence[str], limit: int = LIMIT) -> list[str]:
    """A unified diff of at most ``limit`` lines and a note.

    >>> text_diff(["a", "b"], ["a", "c"])
    ['--- golden', '+++ obtained', '@@ -1,2 +1,2 @@', ' a', '-b', '+c']
    """
    lines = (line for group in hunks(old, new) for line in [_heading(group, len(old)), *_shown(old, new, group)])
    return _bounded(lines, limit)


def graph_diff(
    old: Sequence[GraphLine], new: Sequence[GraphLine], same: Iterable[tuple[int, int]] = (), limit: int = LIMIT
) -> list[str]:
    """Differences section by section; what is the same in many layers is shown once.

    Args:
        old, new: the graphs' lines.
        same: places of lines that are equal but for the numbers in names, which are not shown.
        limit: the most lines.
    """
    keys = list(new)
    for was, now in same:
        if old[was].section == new[now].section:
            keys[now] = old[was]
    shown = _section_diffs(old, new, new if tuple(keys) == tuple(old) else keys)
    first = next(shown, None)
    if first is None:  # the same lines of the same sections, cut otherwise where the schedule comes back
        return text_diff([str(line) for line in old], [str(line) for line in new], limit)
    return _bounded(itertools.chain([first], shown), limit)


def _bounded(lines: Iterator[str], limit: int) -> list[str]:
    shown = [*_HEAD, *itertools.islice(lines, limit - len(_HEAD))]
    return [*shown, "… and more"] if next(lines, None) is not None else shown


# -- sections


def _section_diffs(old: Sequence[GraphLine], new: Sequence[GraphLine], keys: Sequence[GraphLine]) -> Iterator[str]:
    """The diffs of sections by ``keys``; their order, if that has changed and no section was lost or gained."""
    before, after, by = _by_section(old), _by_section(new), _by_section(keys)
    sections: dict[_Lines, list[str]] = defaultdict(list)
    bodies: dict[_Lines, _Lines] = {}
    for section in dict.fromkeys([*before, *after]):
        was, now, key = (side.get(section, ()) for side in (before, after, by))
        if was == key:
            continue
        body = tuple(_body(was, now, hunks(was, key)))
        changed = tuple(line for line in body if not line.startswith(" "))
        sections[changed].append(section)
        bodies.setdefault(changed, body)
    for changed, names in sections.items():
        yield cut(f"@@ {spell_sections(names)} @@")
        yield from bodies[changed]
    visits = [[section for section, _ in itertools.groupby(line.section for line in side)] for side in (old, new)]
    if visits[0] != visits[1] and set(before) == set(after):
        yield "@@ order of the sections @@"
        left, right = ([section or "definitions" for section in side] for side in visits)
        yield from _body(left, right, hunks(left, right))


def _by_section(lines: Iterable[GraphLine]) -> dict[str, _Lines]:
    """Lines by section, all visits of the schedule to it together."""
    sections: dict[str, list[str]] = defaultdict(list)
    for section, heading, text in lines:
        sections[section].append(f"{heading} | {text}" if heading else text)
    return {section: tuple(lines) for section, lines in sections.items()}


def _body(old: Sequence[str], new: Sequence[str], groups: Iterable[list[Change]]) -> Iterator[str]:
    """Hunks apart from their headings, of which a line stays between two."""
    for number, group in enumerate(groups):
        if number:
            yield " …"
        yield from _shown(old, new, group)


def spell_sections(sections: Sequence[str]) -> str:
    """Sections by name, layers as ranges.

    >>> spell_sections(["fwd.layers[0]", "fwd.layers[1]", "fwd.layers[2]", "bwd", ""])
    'fwd.layers[0..2], bwd, definitions'
    """
    told: dict[str, list[int]] = defaultdict(list)
    for section in sections:
        found = _NUMBERED.fullmatch(section)
        numbers = told[found["container"] if found else section]
        numbers += [int(found["number"])] if found else []
    return ", ".join(
        (name or "definitions") + (f"[{', '.join(ranges(sorted(numbers)))}]" if numbers else "")
        for name, numbers in told.items()
    )


# -- lines


def _heading(group: Sequence[Change], length: int) -> str:
    """``@@ -1,2 +1,2 @@``, as in a unified diff."""
    first, begin = group[0].first, group[0].begin
    lead = min(CONTEXT, first)
    tail = min(CONTEXT, length - group[-1].last)
    ours = _span(first - lead, group[-1].last + tail)
    theirs = _span(begin - lead, group[-1].end + tail)
    return f"@@ -{ours} +{theirs} @@"


def _span(start: int, stop: int) -> str:
    count = stop - start
    if count == 1:
        return f"{start + 1}"
    return f"{start + 1 if count else start},{count}"


def _shown(old: Sequence[str], new: Sequence[str], group: Sequence[Change]) -> Iterator[str]:
    """The lines of a hunk with their context."""
    place = max(group[0].first - CONTEXT, 0)
    for change in group:
        yield from (cut(f" {line}") for line in old[place : change.first])
        yield from _replaced(old[change.first : change.last], new[change.begin : change.end])
        place = change.last
    yield from (cut(f" {line}") for line in old[place : place + CONTEXT])


def _replaced(lost: Sequence[str], gained: Sequence[str]) -> Iterator[str]:
    """Lines in place of others; a pair that begins to differ out of sight is cut in the middle."""
    shown = list(lost[:_MOST_LINES]), list(gained[:_MOST_LINES])
    for place, pair in enumerate(zip(*shown, strict=True) if len(lost) == len(gained) else ()):
        start = same_start(*pair) - _LEAD
        if start > WIDTH - 2 * _LEAD and max(map(len, pair)) >= WIDTH:
            for lines, line in zip(shown, pair, strict=True):
                lines[place] = f"{line[:_LEAD]}…{line[start:]}"
    for sign, lines, count in (("-", shown[0], len(lost)), ("+", shown[1], len(gained))):
        yield from (cut(sign + line) for line in lines)
        if count > len(lines):
            yield f"{sign}… {count - len(lines)} more lines"


def line_remarks(old: Sequence[GraphLine], new: Sequence[GraphLine]) -> Iterator[Remark]:
    """Lines of views that were lost and gained by section, or that stand in another order."""
    before, after = _by_section(old), _by_section(new)
    for section in dict.fromkeys([*before, *after]):
        was, now = before.get(section, ()), after.get(section, ())
        if was == now:
            continue
        changes = (("lost", Counter(was) - Counter(now)), ("gained", Counter(now) - Counter(was)))
        told = ", ".join(f"{verb} {listed(list(lines), 2)}" for verb, lines in changes if lines)
        space, _, module = absolute(section, None).partition(".")
        text = f"{space} {module}".rstrip() + f": {told or 'lines in another order'}"
        yield Remark(Weight.REST, text, module, told)
    if list(before) != list(after) and set(before) == set(after):
        yield Remark(Weight.REST, "sections stand in another order")
