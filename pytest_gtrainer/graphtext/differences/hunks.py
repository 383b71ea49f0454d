"""Bounded differences in lines: of texts, and of graphs section by section.

The same change in many layers is shown once. Every line fits a terminal; a pair of lines that differ far
to the right is cut on the left.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from pytest_gtrainer.graphtext.differences.lines import CONTEXT, Change, hunks
from pytest_gtrainer.graphtext.differences.remarks import WIDTH, cut, ranges
from pytest_gtrainer.graphtext.sections import Record

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
    old: Sequence[Record], new: Sequence[Record], same: Iterable[tuple[int, int]] = (), limit: int = LIMIT
) -> list[str]:
    """Differences section by section; what is the same in many layers is shown once.

    Args:
        old, new: the records.
        same: places of records that are equal but for the numbers in names, which are not shown.
        limit: the most lines.
    """
    keys = list(new)
    for was, now in same:
        if old[was].section == new[now].section:
            keys[now] = old[was]
    shown = _section_diffs(old, new, new if tuple(keys) == tuple(old) else keys)
    first = next(shown, None)
    if first is None:  # the same lines of the same sections, cut otherwise where the schedule comes back
        return text_diff([str(record) for record in old], [str(record) for record in new], limit)
    return _bounded(itertools.chain([first], shown), limit)


def _bounded(lines: Iterator[str], limit: int) -> list[str]:
    shown = [*_HEAD, *itertools.islice(lines, limit - len(_HEAD))]
    return [*shown, "… and more"] if next(lines, None) is not None else shown


# -- sections


def _section_diffs(old: Sequence[Record], new: Sequence[Record], keys: Sequence[Record]) -> Iterator[str]:
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
    visits = [[section for section, _ in itertools.groupby(record.section for record in side)] for side in (old, new)]
    if visits[0] != visits[1] and set(before) == set(after):
        yield "@@ order of the sections @@"
        left, right = ([section or "definitions" for section in side] for side in visits)
        yield from _body(left, right, hunks(left, right))


def _by_section(records: Iterable[Record]) -> dict[str, _Lines]:
    """Lines by section, all visits of the schedule to it together."""
    sections: dict[str, list[str]] = defaultdict(list)
    for section, heading, text in records:
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
    if len(lost) == len(gained):
        pairs = [_fitted(*pair) for pair in zip(lost[:_MOST_LINES], gained[:_MOST_LINES], strict=True)]
        lost_shown, gained_shown = [old for old, _ in pairs], [new for _, new in pairs]
    else:
        lost_shown, gained_shown = list(lost[:_MOST_LINES]), list(gained[:_MOST_LINES])
    for sign, lines, count in (("-", lost_shown, len(lost)), ("+", gained_shown, len(gained))):
        yield from (cut(sign + line) for line in lines)
        if count > len(lines):
            yield f"{sign}… {count - len(lines)} more lines"


def _fitted(old: str, new: str) -> tuple[str, str]:
    """Two lines, cut in the middle where they begin to differ out of sight."""
    same = next((place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    if same <= WIDTH - _LEAD or max(len(old), len(new)) < WIDTH:
        return old, new
    start = same - _LEAD
    head = old[:_LEAD]
    return f"{head}…{old[start:]}", f"{head}…{new[start:]}"
