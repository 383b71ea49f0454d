"""Judging a text against its golden, and showing where they differ.

Graphs and layouts are compared as unfolded records, so that another way of folding fails no golden,
and without their headers. What only another version of torch spells differently is no difference
(``torch_spellings``). Numbers are compared with the golden's numbers of the same environment, texts as they are.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal

from pytest_gtrainer.golden import values
from pytest_gtrainer.graphtext import TextError, header, unfold
from pytest_gtrainer.graphtext.differences import LIMIT, explain, text_diff
from pytest_gtrainer.graphtext.torch_spellings import respelled, same_but_for, spellings_between


@dataclass(frozen=True, slots=True)
class Finding:
    """What a comparison has come to, and its reasons.

    ``replaceable`` says whether an update may write the obtained text: not if the golden holds
    what would be lost.
    """

    outcome: Literal["equal", "different", "not judged"]
    reasons: str = ""
    replaceable: bool = True


EQUAL = Finding("equal")


def judge(kind: str, golden: str, obtained: str, limit: int = LIMIT) -> Finding:
    """Compare a golden with what was obtained; both texts have ``\\n`` line ends."""
    if kind != "numbers":
        found = difference(kind, golden, obtained, limit)
        return EQUAL if found is None else Finding("different", "\n".join([found, *look_alikes(golden, obtained)]))
    if damage := _damage(kind, golden):
        return Finding("different", damage, replaceable=False)
    try:
        known = values.entries_of(golden)
    except values.NumbersError as error:
        return Finding("different", f"the golden {error}", replaceable=False)
    (new,) = values.entries_of(obtained)
    old = next((entry for entry in known if entry.environment == new.environment), None)
    if old is None:
        others = f"but for {known[0] if len(known) == 1 else f'{len(known)} others'}" if known else "nor for any other"
        return Finding("not judged", f"has no numbers for this environment ({new}), {others}")
    said = values.differences(old.values, new.values)
    return Finding("different", "\n".join([f"in this environment ({new})", *said])) if said else EQUAL


def look_alikes(golden: str, obtained: str) -> list[str]:
    """Where two texts differ first, if that is in a character that may look like another one, or like nothing.

    >>> look_alikes("a\\npay\\n", "a\\np\\u0430y\\n")
    ['line 2, column 2: U+0061 LATIN SMALL LETTER A in the golden, U+0430 CYRILLIC SMALL LETTER A in what was obtained']
    """
    place = next((n for n, (was, now) in enumerate(zip(golden, obtained, strict=False)) if was != now), None)
    both = "" if place is None else (golden[place] + obtained[place]).replace("\n", "")
    if place is None or (both.isascii() and both.isprintable()):
        return []
    before = golden[:place]
    told = [
        f"U+{ord(text[place]):04X} {unicodedata.name(text[place], 'without a name')}" for text in (golden, obtained)
    ]
    where = f"line {before.count(chr(10)) + 1}, column {place - before.rfind(chr(10))}"
    return [f"{where}: {told[0]} in the golden, {told[1]} in what was obtained"]


def difference(kind: str, golden: str, obtained: str, limit: int = LIMIT) -> str | None:
    """What differs, in words and then in at most ``limit`` lines; None if nothing that counts does."""
    if golden == obtained:
        return None
    if damage := _damage(kind, golden):
        return damage
    if kind == "text":
        return "\n".join(text_diff(golden.split("\n"), obtained.split("\n"), limit))
    try:
        if header.body(golden) == header.body(obtained):
            return None
        old = unfold(golden)
    except TextError as error:
        return f"the golden is not graph text: {error}"
    new = unfold(obtained)
    if old == new:
        return None
    made, running = header.read(golden).get("torch"), header.read(obtained).get("torch")
    spellings = spellings_between(made, running)
    if not spellings:
        note = f"made with torch {made or 'of an unknown version'}, running {running}"
        return "\n".join(explain(old, new, [note] if made != running else [], limit))
    if same_but_for(spellings, old, new):
        return None
    (old, in_golden), (new, in_obtained) = respelled(old, spellings), respelled(new, spellings)
    words = ", ".join(str(spelling) for spelling in spellings if spelling in in_golden | in_obtained)
    told = f", and told in the newer one's words: {words}" if words else ""
    note = f"made with torch {made}, running {running}{told}"
    return "\n".join(explain(old, new, [note], limit))


def _damage(kind: str, golden: str) -> str | None:
    """Why a golden cannot be compared at all."""
    for number, line in enumerate(golden.split("\n"), start=1):
        if line.startswith(("<<<<<<< ", ">>>>>>> ")):
            return f"the golden has merge conflict marks at line {number}: resolve the merge, or remake it"
    if kind != "graph":
        return None
    version, ours = header.version_of(golden), header.VERSION
    if version is None:
        return f"the golden does not begin with `# gtrainer graph v{ours}`: restore or remake it"
    if version > ours:
        return (
            f"the golden has format v{version} and this pytest-gtrainer reads v{ours}: "
            "it was made by a newer one, so upgrade"
        )
    if version < ours:
        return (
            f"the golden has the old format v{version}, where this pytest-gtrainer reads v{ours}: "
            "remake it with --gt-update-goldens, at a commit whose graph you trust"
        )
    return None
