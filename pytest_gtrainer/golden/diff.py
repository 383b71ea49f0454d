"""Bounded differences in lines, in about linear time."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

from pytest_gtrainer.golden.words import ranges
from pytest_gtrainer.graphtext import Record

LIMIT = 60
_INPUT = 2000
"""Above this, `difflib` takes seconds: the first lines that differ are shown instead."""

_NUMBERED = re.compile(r"(?P<container>.+)\[(?P<number>\d+)\]")
_Lines = tuple[str, ...]


def text_diff(old: Sequence[str], new: Sequence[str], limit: int = LIMIT) -> list[str]:
    """A unified diff of at most ``limit`` lines and a note.

    >>> text_diff(["a", "b"], ["a", "c"])
    ['--- golden', '+++ obtained', '@@ -1,2 +1,2 @@', ' a', '-b', '+c']
    """
    return _bounded(["--- golden", "+++ obtained"], _unified(old, new), limit)


def graph_diff(old: Iterable[Record], new: Iterable[Record], limit: int = LIMIT) -> list[str]:
    """Differences section by section; what is the same in many layers is shown once."""
    return _bounded(["--- golden", "+++ obtained"], _section_diffs(_sections(old), _sections(new)), limit)


def _bounded(head: list[str], lines: Iterator[str], limit: int) -> list[str]:
    shown = [*head, *islice(lines, limit - len(head))]
    return [*shown, "… and more"] if next(lines, None) is not None else shown


def _sections(records: Iterable[Record]) -> dict[tuple[str, int], _Lines]:
    """Lines by section and visit, in the order of the schedule."""
    visits: Counter[str] = Counter()
    sections: dict[tuple[str, int], _Lines] = {}
    for section, members in groupby(records, key=lambda record: record.section):
        visits[section] += 1
        lines = [" | ".join(part for part in record[1:] if part) for record in members]
        sections[section, visits[section]] = tuple(lines)
    return sections


def _section_diffs(old: dict[tuple[str, int], _Lines], new: dict[tuple[str, int], _Lines]) -> Iterator[str]:
    alike: dict[tuple[_Lines, _Lines], list[tuple[str, int]]] = {}
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key, ()), new.get(key, ())
        if before != after:
            alike.setdefault((before, after), []).append(key)
    for (before, after), keys in alike.items():
        yield f"@@ {spell_sections(keys)} @@"
        hunks = islice(_unified(before, after), 1, None)
        yield from (" …" if line.startswith("@@") else line for line in hunks)
    if not alike:
        yield "@@ order of the sections @@"
        yield from _unified([section for section, _ in old], [section for section, _ in new])


def spell_sections(keys: Sequence[tuple[str, int]]) -> str:
    """Sections by name, layers as ranges, and the visit where the schedule comes back.

    >>> spell_sections([("fwd.layers[0]", 1), ("fwd.layers[1]", 1), ("fwd.layers[4]", 2), ("bwd", 1)])
    'fwd.layers[0, 1], fwd.layers[4] (visit 2), bwd'
    """
    told: dict[tuple[str, int], list[int]] = {}
    for section, visit in keys:
        found = _NUMBERED.fullmatch(section)
        numbers = told.setdefault((found["container"] if found else section, visit), [])
        numbers += [int(found["number"])] if found else []
    spelled = []
    for (name, visit), numbers in told.items():
        layers = f"[{', '.join(ranges(sorted(numbers)))}]" if numbers else ""
        spelled.append((name or "definitions") + layers + (f" (visit {visit})" if visit > 1 else ""))
    return ", ".join(spelled)


def _unified(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Hunks of a unified diff, without its two lines of file names."""
    start, old_end, new_end = _differing(old, new)
    if max(old_end, new_end) - start > _INPUT:
        counts = f"{old_end - start} lines became {new_end - start}"
        yield f"@@ from line {start + 1}: {counts}, of which the first @@"
        yield from ("-" + line for line in old[start : min(old_end, start + LIMIT // 2)])
        yield from ("+" + line for line in new[start:new_end])
        return
    lead = max(start - 3, 0)  # three lines of context stay on either side
    sides = list(old[lead : old_end + 3]), list(new[lead : new_end + 3])
    for line in islice(difflib.unified_diff(*sides, lineterm=""), 2, None):
        yield _renumbered(line, lead)


def _differing(old: Sequence[str], new: Sequence[str]) -> tuple[int, int, int]:
    """Bounds of what is left when the common head and tail are cut off."""
    shortest = min(len(old), len(new))
    start = next((place for place in range(shortest) if old[place] != new[place]), shortest)
    tail = 0
    while tail < shortest - start and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    return start, len(old) - tail, len(new) - tail


def _renumbered(line: str, lead: int) -> str:
    """Shift the line numbers of a hunk's heading, as it was made from a part of the text."""
    if not lead or not line.startswith("@@ "):
        return line
    shifted = []
    for side in line.split()[1:3]:
        first, *count = side[1:].split(",")
        shifted.append(side[0] + ",".join([str(int(first) + lead), *count]))
    return f"@@ {' '.join(shifted)} @@"
