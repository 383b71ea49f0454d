"""Bounded line diffs of texts, and of graphs section by section.

In the diff of two graphs, a change that many layers have in common is shown once.

Lines are compared in about linear time, as by patience diff (Bram Cohen): lines that stand once on
either side, in the same order, are anchors, and what lies between two of them is compared on its
own. Where no line stands once, a greedy search (Myers 1986) finds the shortest way if it has few
steps. ``difflib``, which takes quadratic time and more, sees only gaps of a few lines. What none of
them resolves is one replacement: right, only not the shortest. Each of ``_DEPTH`` levels reads a
line a few times; the greedy search at most ``2 * _STEPS`` times.
"""

import difflib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pytest_gtrainer.facts import counted, escaped, spell_some
from pytest_gtrainer.graphtext.differences.remarks import (
    WIDTH,
    Remark,
    Weight,
    cut,
    ranges,
    same_start,
)
from pytest_gtrainer.graphtext.folding import rising_pairs
from pytest_gtrainer.graphtext.sections import GraphLine
from pytest_gtrainer.graphtext.syntax import absolute

_SMALL = 2048  # ``difflib`` compares gaps of at most so many pairs of lines
_DEPTH = 6
_STEPS = 32  # the greedy search ends after so many lines lost or gained
CONTEXT = 3


class Change(NamedTuple):
    """Lines ``old[first:last]`` became ``new[begin:end]``."""

    first: int
    last: int
    begin: int
    end: int


def changes(old: Sequence[str], new: Sequence[str]) -> list[Change]:
    """Return where two lists differ, in order."""
    joined: list[Change] = []
    for change in _changes(old, new, 0, 0, 0):
        # Stretches are compared each on its own, so a change may go on over the edge of one.
        if joined and joined[-1][1::2] == (change.first, change.begin):
            joined[-1] = joined[-1]._replace(last=change.last, end=change.end)
        else:
            joined.append(change)
    return joined


def _changes(
    old: Sequence[str], new: Sequence[str], first: int, begin: int, depth: int
) -> Iterator[Change]:
    """Yield the changes between two stretches, which begin at ``first`` and ``begin``."""
    start = same_start(old, new)
    end = same_start(old[start:][::-1], new[start:][::-1])
    old, new = old[start : len(old) - end], new[start : len(new) - end]
    first, begin = first + start, begin + start
    if not old and not new:
        return
    if len(old) * len(new) <= _SMALL:
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        found = [Change(*places) for tag, *places in matcher.get_opcodes() if tag != "equal"]
    elif depth < _DEPTH and (anchors := _anchors(old, new)):
        ends = [(0, 0), *anchors, (len(old), len(new))]
        for (at, to), (place, other) in itertools.pairwise(ends):
            yield from _changes(old[at:place], new[to:other], first + at, begin + to, depth + 1)
        return
    else:
        found = _shortest(old, new) or [Change(0, len(old), 0, len(new))]

    for i, j, k, m in found:
        yield Change(first + i, first + j, begin + k, begin + m)


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of lines that stand once on either side, rising on both."""
    ours, theirs = Counter(old), Counter(new)
    places = {line: place for place, line in enumerate(new) if theirs[line] == ours[line] == 1}
    common = [(place, places[line]) for place, line in enumerate(old) if line in places]
    return rising_pairs(common)


def _shortest(old: Sequence[str], new: Sequence[str]) -> list[Change] | None:
    """Return the shortest way from one side to the other; None if it has too many steps.

    Each step loses or gains one line. ``k`` is the number of lines lost minus those gained. After
    each step, ``ends[k]`` has the furthest line of the old side, and the changes that lead there.
    """
    # Each of these lines costs a step.
    if len(set(old) ^ set(new)) > _STEPS:
        return None
    ends: dict[int, tuple[int, list[Change]]] = {1: (0, [])}
    for step in range(_STEPS):
        for k in range(-step, step + 1, 2):
            if k == -step or (k != step and ends[k - 1][0] < ends[k + 1][0]):
                x, way = ends[k + 1]
                change = Change(x, x, x - k - 1, x - k)
            else:
                x, way = ends[k - 1]
                x += 1
                change = Change(x - 1, x, x - k, x - k)

            # The first step only finds the lines that both sides begin with.
            if step:
                way = [*way, change]
            while x < len(old) and x - k < len(new) and old[x] == new[x - k]:
                x += 1
            if x >= len(old) and x - k >= len(new):
                return way
            ends[k] = x, way

    return None


LIMIT = 60
_MOST_LINES = 16  # of more lines lost or gained in one place than this, the first are shown
_HEAD = ["--- golden", "+++ obtained"]
_LEAD = 40
_NUMBERED = re.compile(r"(?P<container>.+)\[(?P<number>\d+)\]")
_Lines = tuple[str, ...]


def text_diff(old: Sequence[str], new: Sequence[str], limit: int = LIMIT) -> list[str]:
    """Return a unified diff of at most ``limit`` lines and a note."""
    return _bounded(itertools.chain.from_iterable(_hunks(old, new)), limit)


def graph_diff(
    old: Sequence[GraphLine],
    new: Sequence[GraphLine],
    same: Iterable[tuple[int, int]] = (),
    limit: int = LIMIT,
) -> list[str]:
    """Return the differences section by section, those of many layers once.

    ``same`` has the places of lines that differ only in spelling; these are not shown, unless
    nothing else differs.
    """
    keys = list(new)
    for was, now in same:
        if old[was].section == new[now].section:
            keys[now] = old[was]
    if tuple(keys) == tuple(old):  # nothing else differs
        keys = list(new)
    shown = list(_section_diffs(old, new, keys))
    if shown:
        return _bounded(iter(shown), limit)
    # A schedule may come back to a section at another place; then all sections have equal lines.
    return text_diff(list(map(str, old)), list(map(str, new)), limit)


def _bounded(lines: Iterator[str], limit: int) -> list[str]:
    shown = [*_HEAD, *map(escaped, itertools.islice(lines, limit - len(_HEAD)))]
    if next(lines, None) is not None:
        shown.append("… and more")
    return shown


def _section_diffs(
    old: Sequence[GraphLine], new: Sequence[GraphLine], keys: Sequence[GraphLine]
) -> Iterator[str]:
    """Yield the diffs of sections by ``keys``, then the order of the sections.

    The order is shown if it has changed and no section was lost or gained.
    """
    before, after, by = _by_section(old), _by_section(new), _by_section(keys)
    # The changed lines of a section, the first body that has them, and all sections that do.
    found: dict[_Lines, tuple[list[str], list[str]]] = {}
    for section in dict.fromkeys([*before, *after]):
        was, now, key = before.get(section, ()), after.get(section, ()), by.get(section, ())
        if was != key:
            body = list(_body(was, now, key))
            changed = tuple(line for line in body if not line.startswith(" "))
            found.setdefault(changed, (body, []))[1].append(section)

    for body, names in found.values():
        yield cut(f"@@ {spell_sections(names)} @@")
        yield from body
    ours, theirs = _visits(old), _visits(new)
    if ours != theirs and set(before) == set(after):
        yield "@@ order of the sections @@"
        yield from _body(ours, theirs, theirs)


def _visits(lines: Sequence[GraphLine]) -> list[str]:
    """Return the sections in the order of the schedule, a section again where it comes back."""
    sections = itertools.groupby(lines, lambda line: line.section)
    return [section or "definitions" for section, _ in sections]


def _by_section(lines: Iterable[GraphLine]) -> dict[str, _Lines]:
    """Return the lines of each section, those of all visits of the schedule together."""
    sections: dict[str, list[str]] = defaultdict(list)
    for section, heading, text in lines:
        sections[section].append(f"{heading} | {text}" if heading else text)
    return {section: tuple(lines) for section, lines in sections.items()}


def _body(old: Sequence[str], new: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    """Yield hunks without their headings, with a mark between two of them."""
    for number, (_, *lines) in enumerate(_hunks(old, keys, new)):
        if number:
            yield " …"
        yield from lines


def spell_sections(sections: Sequence[str]) -> str:
    """Return sections by name, layers as ranges.

    >>> spell_sections(["", "fwd.layers[0]", "fwd.layers[1]", "fwd.layers[2]", "fwd"])
    'definitions, fwd.layers[0..2], fwd'
    """
    numbers: dict[str, list[int]] = defaultdict(list)
    for section in sections:
        if found := _NUMBERED.fullmatch(section):
            numbers[found["container"]].append(int(found["number"]))
        else:
            numbers.setdefault(section or "definitions", [])

    spelled = []
    for name, layers in numbers.items():
        if layers:
            name += f"[{', '.join(ranges(sorted(layers)))}]"
        spelled.append(name)

    return ", ".join(spelled)


def _hunks(
    old: Sequence[str], new: Sequence[str], shown: Sequence[str] | None = None
) -> Iterator[list[str]]:
    """Yield the hunks of a unified diff, each with its heading.

    Changes whose lines of context meet are in one hunk. ``shown`` has what to show for each of the
    ``new`` lines, if not the line itself.
    """
    if shown is None:
        shown = new
    groups: list[list[Change]] = []
    for change in changes(old, new):
        if groups and change.first - groups[-1][-1].last <= 2 * CONTEXT:
            groups[-1].append(change)
        else:
            groups.append([change])

    for group in groups:
        lead, tail = min(CONTEXT, group[0].first), min(CONTEXT, len(old) - group[-1].last)
        place, stop = group[0].first - lead, group[-1].last + tail
        ours = _span(place, stop)
        theirs = _span(group[0].begin - lead, group[-1].end + tail)
        lines = [f"@@ -{ours} +{theirs} @@"]
        for change in group:
            lines += [cut(f" {line}") for line in old[place : change.first]]
            lines += _replaced(old[change.first : change.last], shown[change.begin : change.end])
            place = change.last
        yield [*lines, *[cut(f" {line}") for line in old[place:stop]]]


def _span(start: int, stop: int) -> str:
    """Spell a stretch of lines as ``diff -u`` does: counted from 1, or from the line before."""
    count = stop - start
    if count == 1:
        return f"{start + 1}"
    return f"{start + bool(count)},{count}"


def _replaced(lost: Sequence[str], gained: Sequence[str]) -> Iterator[str]:
    """Yield lines lost and those gained in their place, the first of each."""
    before, after = list(lost[:_MOST_LINES]), list(gained[:_MOST_LINES])
    if len(lost) == len(gained):
        for place, pair in enumerate(zip(before, after, strict=True)):
            # The difference of two long lines has to be in sight, so these are cut in the middle.
            start = same_start(*pair) - _LEAD
            if start > WIDTH - 2 * _LEAD and max(map(len, pair)) >= WIDTH:
                before[place], after[place] = [f"{line[:_LEAD]}…{line[start:]}" for line in pair]
    for sign, lines, count in (("-", before, len(lost)), ("+", after, len(gained))):
        yield from (cut(sign + line) for line in lines)
        if count > len(lines):
            yield f"{sign}… {counted(count - len(lines), 'more line')}"


def line_remarks(old: Sequence[GraphLine], new: Sequence[GraphLine]) -> Iterator[Remark]:
    """Yield remarks on sections of views: lines lost and gained, or in another order."""
    before, after = _by_section(old), _by_section(new)
    for section in dict.fromkeys([*before, *after]):
        was, now = before.get(section, ()), after.get(section, ())
        if was == now:
            continue
        parts = []
        for verb, lines in (
            ("lost", Counter(was) - Counter(now)),
            ("gained", Counter(now) - Counter(was)),
        ):
            if lines:
                parts.append(f"{verb} {spell_some(list(lines), 2)}")
        changed = ", ".join(parts)
        space, _, module = absolute(section, None).partition(".")
        text = f"{space} {module}".rstrip() + f": {changed or 'lines in another order'}"
        yield Remark(Weight.REST, text, module, changed)

    if list(before) != list(after) and set(before) == set(after):
        yield Remark(Weight.REST, "sections are in another order")


_MOST_CHANGES = 2_000


def changed_lines(old: str, new: str) -> list[list[int]]:
    """Return where the lines of two texts differ: ``[first, last, begin, end]`` of each change.

    All changes after the first ``_MOST_CHANGES`` are returned as one.

    >>> changed_lines("a\\nb\\nc", "a\\nx\\nc")
    [[1, 2, 1, 2]]
    """
    found = [list(change) for change in changes(old.splitlines(), new.splitlines())]
    if len(found) > _MOST_CHANGES:
        first, last = found[_MOST_CHANGES], found[-1]
        return [*found[:_MOST_CHANGES], [first[0], last[1], first[2], last[3]]]
    return found
