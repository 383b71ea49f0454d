"""Judging a text against its golden, and showing where they differ.

Graphs and layouts are compared unfolded and without headers, apart from the groups of all ranks.
What only another torch spells differently is no difference. Numbers are compared with the golden's
numbers of the same environment, texts as they are.
"""

import hashlib
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Literal

from pytest_gtrainer import facts
from pytest_gtrainer.golden import values
from pytest_gtrainer.graphtext import TextError, header, unfold
from pytest_gtrainer.graphtext.differences import LIMIT, explain, lines, text_diff, words
from pytest_gtrainer.graphtext.sections import GraphLine
from pytest_gtrainer.graphtext.torch_spellings import respelled, same_but_for, spellings_between


@dataclass(frozen=True, slots=True)
class Finding:
    """What a comparison has come to, and its reasons."""

    outcome: Literal["equal", "different", "not judged"]
    reasons: str = ""
    replaceable: bool = (
        True  # may an update write the obtained text? not if the golden holds what would be lost
    )


EQUAL = Finding("equal")


def judge(kind: str, golden: str, obtained: str, limit: int = LIMIT) -> Finding:
    """Compare a golden with what was obtained; both texts have ``\\n`` line ends."""
    if kind != "numbers":
        if (found := difference(kind, golden, obtained, limit)) is None:
            return EQUAL
        # characters may look like others, or like nothing
        pairs = zip_longest(
            *(header.body(text).split("\n") for text in (golden, obtained)), fillvalue=""
        )
        odd = ((old, new) for old, new in pairs if old != new and not (old + new).isascii())
        told = (
            f"in ASCII: {old!a} in the golden, {new!a} in what was obtained"
            for old, new in islice(odd, 3)
        )
        return Finding("different", "\n".join([found, *told]))
    if damage := _damage(kind, golden):
        return Finding("different", damage, replaceable=False)
    try:
        known = values.entries_of(golden)
    except values.NumbersError as error:
        return Finding("different", f"the golden {error}", replaceable=False)
    (new,) = values.entries_of(obtained)
    if (
        old := next((entry for entry in known if entry.environment == new.environment), None)
    ) is None:
        others = known[0] if len(known) == 1 else f"{len(known)} others"
        return Finding(
            "not judged", f"has no numbers for this environment ({new}), but for {others}"
        )
    said = values.differences(old.values, new.values)
    return (
        Finding("different", "\n".join([f"in this environment ({new})", *said])) if said else EQUAL
    )


def difference(kind: str, golden: str, obtained: str, limit: int = LIMIT) -> str | None:
    """Return what differs, in words and then in at most ``limit`` lines; None if nothing that
    counts does.
    """
    if golden == obtained:
        return None
    if damage := _damage(kind, golden):
        return damage
    if kind == "text":
        return "\n".join(text_diff(golden.split("\n"), obtained.split("\n"), limit))
    try:
        if found := _groups_that_differ(golden, obtained):
            return found
        if header.body(golden) == header.body(obtained):
            return None
        told = _alike(golden, obtained)
    except TextError as error:
        return f"the golden is not graph text: {error}"
    return None if told is None else "\n".join(explain(*told, limit))


def _groups_that_differ(golden: str, obtained: str) -> str:
    """Return how the process groups of all ranks differ where headers show them; "" if they do not."""
    old, new = (header.read(text).get("groups") for text in (golden, obtained))
    if old == new:
        return ""
    unsaid = "those that the first rank's group tells"
    return f"process groups of all ranks: the golden has {old or unsaid}, obtained {new or unsaid}"


def _alike(
    golden: str, obtained: str
) -> tuple[tuple[GraphLine, ...], tuple[GraphLine, ...], list[str]] | None:
    """The lines of two graphs, in the words of the newer torch, and what to note of that; None if
    they are the same.
    """
    old, new = unfold(golden), unfold(obtained)
    if old == new:
        return None
    read = [header.read(text) for text in (golden, obtained)]
    (made, here), (running, now) = ((fields.get("torch"), fields.get("world")) for fields in read)
    where = [f"made in {here}; this is {now}"] if here and now and here != now else []
    if not (spellings := spellings_between(made, running)):
        note = f"made with torch {made or 'of an unknown version'}, running {running}"
        return old, new, [*where, *([note] if made != running else [])]
    if same_but_for(spellings, old, new):
        return None
    (old, in_golden), (new, in_obtained) = respelled(old, spellings), respelled(new, spellings)
    named = ", ".join(
        str(spelling) for spelling in spellings if spelling in in_golden | in_obtained
    )
    told = f", and compared with the newer one's names: {named}" if named else ""
    return old, new, [*where, f"made with torch {made}, running {running}{told}"]


def golden_difference(name: str, golden: str, obtained: str) -> list[facts.Fact]:
    """The fact of a golden that differs, with both texts, or none where the golden cannot be read."""
    try:
        alike = _alike(golden, obtained)
    except TextError:  # the failure says so
        return []
    sides = [header.body(text) for text in (golden, obtained)]
    keys = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in sides]
    texts = dict(zip(keys, map(facts.packed, sides), strict=True))
    told = words(*alike[:2]) if alike is not None else []
    changes = lines.changed_lines(*sides)
    fact = {
        "kind": "golden_difference",
        "name": name,
        "words": told,
        "keys": keys,
        "texts": texts,
        "changes": changes,
    }
    return [fact]


def maker(kind: str, text: str) -> str | None:
    """Return the test that a golden says it was made by; None if it says none, as a text never
    does.
    """
    if kind == "graph":
        return header.read(text).get("test")
    return values.maker(text) if kind == "numbers" else None


def same_content(kind: str, golden: str, obtained: str) -> bool:
    """Return whether a golden holds what was obtained, whichever test made it."""
    if kind == "numbers":
        return judge(kind, golden, obtained).outcome == "equal"
    return header.body(golden) == header.body(obtained) if kind == "graph" else golden == obtained


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
        told = f"the golden has format v{version} and this pytest-gtrainer reads v{ours}"
        return f"{told}: it was made by a newer one, so upgrade"
    if version < ours:
        told = f"the golden has the old format v{version}, where this pytest-gtrainer reads v{ours}"
        return f"{told}: remake it with --gt-update-goldens, at a commit whose graph you trust"
    return None
