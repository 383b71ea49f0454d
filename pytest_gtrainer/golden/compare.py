"""Judging a text against its golden, and showing where they differ.

Graphs are compared as unfolded records, so that another way of folding fails no golden, and
without their headers. Texts are compared as they are.
"""

from __future__ import annotations

import difflib
from itertools import islice

from pytest_gtrainer.golden.words import differences_in_words
from pytest_gtrainer.graphtext import TextError, header, unfold

_DIFF_LINES = 60
_DIFF_INPUT = 2000
"""Above this, `difflib` takes seconds: the first lines that differ are shown instead."""


def difference(kind: str, golden: str, obtained: str) -> str | None:
    """What differs, in words and then in lines; None if nothing that counts does.

    Both texts have ``\\n`` line ends.
    """
    if golden == obtained:
        return None
    if damage := _damage(kind, golden):
        return damage
    if kind == "text":
        return _shown([], golden, obtained)
    try:
        old = unfold(golden)
    except TextError as error:
        return f"the golden is not graph text: {error}"
    new = unfold(obtained)
    if old == new:
        return None
    words = differences_in_words(old, new) + _torch_note(golden, obtained)
    return _shown(words, header.body(golden), header.body(obtained))


def _damage(kind: str, golden: str) -> str | None:
    """Why a golden cannot be compared at all."""
    lines = golden.splitlines()
    for number, line in enumerate(lines, start=1):
        if line.startswith(("<<<<<<< ", ">>>>>>> ")):
            return f"the golden has merge conflict marks at line {number}: resolve the merge, or remake it"
    if kind != "graph":
        return None
    version = header.version_of(golden)
    if version is None:
        return f"the golden does not begin with `# gtrainer graph v{header.VERSION}`: restore or remake it"
    if version > header.VERSION:
        return (
            f"the golden has format v{version} and this pytest-gtrainer reads v{header.VERSION}: "
            "it was made by a newer one, so upgrade"
        )
    return None


def _torch_note(golden: str, obtained: str) -> list[str]:
    made, running = header.read(golden).get("torch"), header.read(obtained).get("torch")
    return [f"made with torch {made}, running {running}"] if made != running else []


def _shown(words: list[str], golden: str, obtained: str) -> str:
    return "\n".join([*words, "", *bounded_diff(golden.splitlines(), obtained.splitlines())])


def bounded_diff(old: list[str], new: list[str], limit: int = _DIFF_LINES) -> list[str]:
    """A unified diff of at most ``limit`` lines and a note, in about linear time.

    >>> bounded_diff(["a", "b"], ["a", "c"])
    ['--- golden', '+++ obtained', '@@ -1,2 +1,2 @@', ' a', '-b', '+c']
    """
    start, old_end, new_end = _differing(old, new)
    if max(old_end, new_end) - start > _DIFF_INPUT:
        return _first_lines(old[start:old_end], new[start:new_end], start, limit)
    # three lines of context stay on either side, and hunks must count from the whole text
    lead = max(start - 3, 0)
    sides = old[lead : old_end + 3], new[lead : new_end + 3]
    diff = difflib.unified_diff(*sides, "golden", "obtained", lineterm="")
    lines = [_renumbered(line, lead) for line in islice(diff, limit + 1)]
    return lines if len(lines) <= limit else [*lines[:limit], "… and more"]


def _differing(old: list[str], new: list[str]) -> tuple[int, int, int]:
    """Bounds of what is left when the common head and tail are cut off."""
    shortest = min(len(old), len(new))
    start = next((place for place in range(shortest) if old[place] != new[place]), shortest)
    tail = 0
    while tail < shortest - start and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    return start, len(old) - tail, len(new) - tail


def _renumbered(line: str, lead: int) -> str:
    """Shift the line numbers of a hunk's heading."""
    if not lead or not line.startswith("@@ "):
        return line
    shifted = []
    for side in line.split()[1:3]:
        sign, (first, *count) = side[0], side[1:].split(",")
        shifted.append(sign + ",".join([str(int(first) + lead), *count]))
    return f"@@ {' '.join(shifted)} @@"


def _first_lines(old: list[str], new: list[str], start: int, limit: int) -> list[str]:
    half = limit // 2
    return [
        "--- golden",
        "+++ obtained",
        f"@@ from line {start + 1}: {len(old)} lines became {len(new)}, of which the first @@",
        *("-" + line for line in old[:half]),
        *("+" + line for line in new[:half]),
    ]
