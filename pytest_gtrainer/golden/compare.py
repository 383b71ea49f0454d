"""Judge a text against its golden, and show where they differ.

Graphs and layouts are compared unfolded and without headers, but for the groups of all ranks. The
spelling of another version of torch is no difference. Numbers are compared with those that the
golden has for the same environment, texts as they are.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from pytest_gtrainer import facts
from pytest_gtrainer.golden import values
from pytest_gtrainer.graphtext import TextError, header, unfold
from pytest_gtrainer.graphtext.differences import LIMIT, explain, lines, text_diff, words
from pytest_gtrainer.graphtext.sections import GraphLine
from pytest_gtrainer.graphtext.torch_spellings import respelled, same_but_for, spellings_between


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a comparison.

    Attributes:
        reasons: why the texts are not equal, in lines.
        replaceable: False if an update must not write the obtained text, as the golden has more to
            lose.
    """

    outcome: Literal["equal", "different", "not judged"]
    reasons: str = ""
    replaceable: bool = True


EQUAL = Finding("equal")


def judge(kind: str, golden: str, obtained: str, limit: int = LIMIT) -> Finding:
    """Compare a golden with the obtained text; both have ``\\n`` line ends."""
    if kind != "numbers":
        found = difference(kind, golden, obtained, limit)
        if found is None:
            return EQUAL
        # Some characters look like others, or cannot be seen.
        in_ascii = []
        sides = header.body(golden).split("\n"), header.body(obtained).split("\n")
        for before, after in zip_longest(*sides, fillvalue=""):
            if before != after and not (before + after).isascii():
                in_ascii.append(
                    f"in ASCII: {before!a} in the golden, {after!a} in what was obtained"
                )
        return Finding("different", "\n".join([found, *in_ascii[:3]]))

    if damage := _damage(kind, golden):
        return Finding("different", damage, replaceable=False)
    try:
        known = values.entries_of(golden)
    except values.NumbersError as error:
        return Finding("different", f"the golden {error}", replaceable=False)

    (new,) = values.entries_of(obtained)
    same = [entry for entry in known if entry.environment == new.environment]
    if not same:
        # Bits of another environment say nothing: it may add in another order.
        others = str(known[0])
        if len(known) > 1:
            others = f"{len(known)} others"
        return Finding(
            "not judged", f"has no numbers for this environment ({new}), but for {others}"
        )

    changes = values.differences(same[0].values, new.values)
    if not changes:
        return EQUAL
    return Finding("different", "\n".join([f"in this environment ({new})", *changes]))


def difference(kind: str, golden: str, obtained: str, limit: int = LIMIT) -> str | None:
    """Return the difference in words, then in at most ``limit`` lines; None if none counts."""
    if golden == obtained:
        return None
    if damage := _damage(kind, golden):
        return damage
    if kind == "text":
        return "\n".join(text_diff(golden.split("\n"), obtained.split("\n"), limit))
    try:
        if found := _difference_of_groups(golden, obtained):
            return found
        if header.body(golden) == header.body(obtained):
            return None
        respelled = _respell(golden, obtained)
    except TextError as error:
        return f"the golden is not graph text: {error}"

    return None if respelled is None else "\n".join(explain(*respelled, limit))


def _difference_of_groups(golden: str, obtained: str) -> str:
    """Return the difference of the groups of all ranks in the headers; "" for none."""
    old, new = header.read(golden).get("groups"), header.read(obtained).get("groups")
    if old == new:
        return ""
    default = "those that follow from the first rank's group"
    return (
        f"process groups of all ranks: the golden has {old or default}, obtained {new or default}"
    )


def _respell(
    golden: str, obtained: str
) -> tuple[tuple[GraphLine, ...], tuple[GraphLine, ...], list[str]] | None:
    """Return the lines of two graphs in the words of the newer torch, and notes on their making.

    Returns None if they are the same.
    """
    old, new = unfold(golden), unfold(obtained)
    if old == new:
        return None
    was, now = header.read(golden), header.read(obtained)
    made, running = was.get("torch"), now.get("torch")
    notes = []
    if was.get("world") and now.get("world") and was["world"] != now["world"]:
        notes.append(f"made in {was['world']}; this is {now['world']}")
    spellings = spellings_between(made, running)
    if not spellings:
        if made != running:
            notes.append(f"made with torch {made or 'of an unknown version'}, running {running}")
        return old, new, notes

    if same_but_for(spellings, old, new):
        return None
    (old, in_golden), (new, in_obtained) = respelled(old, spellings), respelled(new, spellings)
    note = f"made with torch {made}, running {running}"
    used = [str(spelling) for spelling in spellings if spelling in in_golden | in_obtained]
    if used:
        note += f", and compared with the newer one's names: {', '.join(used)}"
    return old, new, [*notes, note]


def golden_difference(name: str, golden: str, obtained: str) -> list[facts.Fact]:
    """Return the fact of a golden that differs, with both texts; none if it cannot be read."""
    try:
        lines_and_notes = _respell(golden, obtained)
    except TextError:
        # The failure's text reports the damage.
        return []

    sides = [header.body(golden), header.body(obtained)]
    keys = list(map(facts.key_of, sides))
    return [
        {
            "kind": "golden_difference",
            "name": name,
            "words": [] if lines_and_notes is None else words(*lines_and_notes[:2]),
            "keys": keys,
            "texts": dict(zip(keys, map(facts.packed, sides), strict=True)),
            "changes": lines.changed_lines(*sides),
        }
    ]


def maker(kind: str, text: str) -> str | None:
    """Return the test in the header of a golden; None if there is none, as in a text."""
    if kind == "graph":
        return header.read(text).get("test")
    return values.maker(text) if kind == "numbers" else None


def same_content(kind: str, golden: str, obtained: str) -> bool:
    """Return whether a golden has the obtained content, whichever test made it."""
    if kind == "numbers":
        return judge(kind, golden, obtained).outcome == "equal"
    if kind == "graph":
        return header.body(golden) == header.body(obtained)
    return golden == obtained


def _damage(kind: str, golden: str) -> str | None:
    """Return the reason why a golden cannot be compared at all; None if it can."""
    for number, line in enumerate(golden.split("\n"), start=1):
        if line.startswith(("<<<<<<< ", ">>>>>>> ")):
            return (
                f"the golden has merge conflict marks at line {number}: resolve the merge, "
                "or remake it"
            )

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
