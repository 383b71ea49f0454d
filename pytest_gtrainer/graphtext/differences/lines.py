"""Bounded differences in lines: of texts, and of graphs section by section, the same change in many
layers once.

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

from pytest_gtrainer.facts import counted, escaped
from pytest_gtrainer.graphtext.differences.remarks import (
    WIDTH,
    Remark,
    Weight,
    cut,
    listed,
    ranges,
    same_start,
)
from pytest_gtrainer.graphtext.folding import rising
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
        if joined and (joined[-1].last, joined[-1].end) == (
            change.first,
            change.begin,
        ):  # no equal line between them
            joined[-1] = joined[-1]._replace(last=change.last, end=change.end)
        else:
            joined.append(change)
    return joined


def _changes(
    old: Sequence[str], new: Sequence[str], first: int, begin: int, depth: int
) -> Iterator[Change]:
    """The changes between two stretches, which begin at ``first`` and ``begin``."""
    start = same_start(old, new)
    end = same_start(old[start:][::-1], new[start:][::-1])
    old, new = old[start : len(old) - end], new[start : len(new) - end]
    first, begin = first + start, begin + start
    replaced = Change(first, first + len(old), begin, begin + len(new))
    if not old or not new:
        yield from [replaced] if old or new else []
    elif len(old) * len(new) <= _SMALL:
        for tag, i, j, k, m in difflib.SequenceMatcher(
            None, old, new, autojunk=False
        ).get_opcodes():
            if tag != "equal":
                yield Change(first + i, first + j, begin + k, begin + m)
    elif depth < _DEPTH and (anchors := _anchors(old, new)):
        for (at, to), (place, other) in itertools.pairwise(
            [(0, 0), *anchors, (len(old), len(new))]
        ):
            yield from _changes(old[at:place], new[to:other], first + at, begin + to, depth + 1)
    elif (found := _few(old, new)) is not None:
        yield from (Change(first + i, first + j, begin + k, begin + m) for i, j, k, m in found)
    else:
        yield replaced


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Places of lines that stand once on either side, rising on both."""
    ours, theirs = Counter(old), Counter(new)
    places = {line: place for place, line in enumerate(new) if theirs[line] == 1}
    common = [
        (place, places[line])
        for place, line in enumerate(old)
        if ours[line] == 1 and line in places
    ]
    return [common[place] for place in rising([to for _, to in common])]


def _few(old: Sequence[str], new: Sequence[str]) -> list[Change] | None:
    """The shortest way from one side to the other, a line at a time; None if it has too many steps."""
    if len(set(old) ^ set(new)) > _STEPS:  # a step for each of them at least
        return None
    # by how many more lines were lost than gained: the furthest line of the old side so far, and
    # the steps to it
    ends: dict[int, tuple[int, list[Change]]] = {1: (0, [])}
    for step in range(_STEPS):
        for k in range(-step, step + 1, 2):
            gains = k == -step or (k != step and ends[k - 1][0] < ends[k + 1][0])
            x, way = ends[k + 1] if gains else ends[k - 1]
            if step:
                way = [
                    *way,
                    Change(x, x, x - k - 1, x - k)
                    if gains
                    else Change(x, x + 1, x - k + 1, x - k + 1),
                ]
            x += not gains
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
    """A unified diff of at most ``limit`` lines and a note."""
    return _bounded((line for hunk in _hunks(old, new) for line in hunk), limit)


def graph_diff(
    old: Sequence[GraphLine],
    new: Sequence[GraphLine],
    same: Iterable[tuple[int, int]] = (),
    limit: int = LIMIT,
) -> list[str]:
    """Differences section by section, the same in many layers once; lines that are ``same`` are
    left out.
    """
    keys = list(new)
    for was, now in same:
        if old[was].section == new[now].section:
            keys[now] = old[was]
    if shown := list(_section_diffs(old, new, new if tuple(keys) == tuple(old) else keys)):
        return _bounded(iter(shown), limit)
    # the same lines of the same sections, cut otherwise where the schedule comes back
    return text_diff([str(line) for line in old], [str(line) for line in new], limit)


def _bounded(lines: Iterator[str], limit: int) -> list[str]:
    shown = [*_HEAD, *map(escaped, itertools.islice(lines, limit - len(_HEAD)))]
    return [*shown, "… and more"] if next(lines, None) is not None else shown


def _section_diffs(
    old: Sequence[GraphLine], new: Sequence[GraphLine], keys: Sequence[GraphLine]
) -> Iterator[str]:
    """The diffs of sections by ``keys``; their order, if that has changed and no section was lost
    or gained.
    """
    before, after, by = _by_section(old), _by_section(new), _by_section(keys)
    found: dict[
        _Lines, tuple[list[str], list[str]]
    ] = {}  # by what has changed: the first such body, and sections
    for section in dict.fromkeys([*before, *after]):
        was, now, key = (side.get(section, ()) for side in (before, after, by))
        if was != key:
            body = list(_body(was, now, key))
            changed = tuple(line for line in body if not line.startswith(" "))
            found.setdefault(changed, (body, []))[1].append(section)
    for body, names in found.values():
        yield cut(f"@@ {spell_sections(names)} @@")
        yield from body
    visits = [
        [section for section, _ in itertools.groupby(line.section for line in side)]
        for side in (old, new)
    ]
    if visits[0] != visits[1] and set(before) == set(after):
        yield "@@ order of the sections @@"
        left, right = ([section or "definitions" for section in side] for side in visits)
        yield from _body(left, right, right)


def _by_section(lines: Iterable[GraphLine]) -> dict[str, _Lines]:
    """Lines by section, all visits of the schedule to it together."""
    sections: dict[str, list[str]] = defaultdict(list)
    for section, heading, text in lines:
        sections[section].append(f"{heading} | {text}" if heading else text)
    return {section: tuple(lines) for section, lines in sections.items()}


def _body(old: Sequence[str], new: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    """Hunks apart from their headings, of which a line stays between two."""
    for number, (_, *lines) in enumerate(_hunks(old, keys, new)):
        yield from [" …", *lines] if number else lines


def spell_sections(sections: Sequence[str]) -> str:
    """Sections by name, layers as ranges."""
    told: dict[str, list[int]] = defaultdict(list)
    for section in sections:
        found = _NUMBERED.fullmatch(section)
        numbers = told[found["container"] if found else section]
        numbers += [int(found["number"])] if found else []
    spans = {
        name: f"[{', '.join(ranges(sorted(numbers)))}]" if numbers else ""
        for name, numbers in told.items()
    }
    return ", ".join((name or "definitions") + span for name, span in spans.items())


def _hunks(
    old: Sequence[str], new: Sequence[str], shown: Sequence[str] | None = None
) -> Iterator[list[str]]:
    """Changes that share their lines of context: a heading as in a unified diff, then lines,
    ``shown`` for the new.
    """
    shown = new if shown is None else shown
    groups: list[list[Change]] = []
    for change in changes(old, new):
        if groups and change.first - groups[-1][-1].last <= 2 * CONTEXT:
            groups[-1].append(change)
        else:
            groups.append([change])
    for group in groups:
        lead, tail = min(CONTEXT, group[0].first), min(CONTEXT, len(old) - group[-1].last)
        place, stop = group[0].first - lead, group[-1].last + tail
        lines = [
            f"@@ -{_span(place, stop)} +{_span(group[0].begin - lead, group[-1].end + tail)} @@"
        ]
        for change in group:
            lines += [cut(f" {line}") for line in old[place : change.first]]
            lines += _replaced(old[change.first : change.last], shown[change.begin : change.end])
            place = change.last
        yield [*lines, *[cut(f" {line}") for line in old[place:stop]]]


def _span(start: int, stop: int) -> str:
    count = stop - start
    return f"{start + 1}" if count == 1 else f"{start + 1 if count else start},{count}"


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
            yield f"{sign}… {counted(count - len(lines), 'more line')}"


def line_remarks(old: Sequence[GraphLine], new: Sequence[GraphLine]) -> Iterator[Remark]:
    """Lines of views that were lost and gained by section, or that are in another order."""
    before, after = _by_section(old), _by_section(new)
    for section in dict.fromkeys([*before, *after]):
        was, now = before.get(section, ()), after.get(section, ())
        if was == now:
            continue
        changes = (("lost", Counter(was) - Counter(now)), ("gained", Counter(now) - Counter(was)))
        told = ", ".join(f"{verb} {listed(list(lines), 2)}" for verb, lines in changes if lines)
        space, _, module = absolute(section, None).partition(".")
        yield Remark(
            Weight.REST,
            f"{space} {module}".rstrip() + f": {told or 'lines in another order'}",
            module,
            told,
        )
    if list(before) != list(after) and set(before) == set(after):
        yield Remark(Weight.REST, "sections are in another order")


_MOST_CHANGES = 2_000


def changed_lines(old: str, new: str) -> list[list[int]]:
    """Return where the lines of two texts differ: ``[first, last, begin, end]`` of each side; many changes as one.

    >>> changed_lines("a\\nb\\nc", "a\\nx\\nc")
    [[1, 2, 1, 2]]
    """
    found = [list(change) for change in changes(old.splitlines(), new.splitlines())]
    if len(found) > _MOST_CHANGES:
        first, last = found[_MOST_CHANGES], found[-1]
        return [*found[:_MOST_CHANGES], [first[0], last[1], first[2], last[3]]]
    return found
