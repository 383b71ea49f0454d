"""Judging a text against its golden, and showing where they differ.

Graphs are compared as unfolded records, so that another way of folding fails no golden, and
without their headers. Texts are compared as they are.
"""

from __future__ import annotations

from pytest_gtrainer.golden.diff import graph_diff, text_diff
from pytest_gtrainer.golden.words import differences_in_words
from pytest_gtrainer.graphtext import TextError, header, unfold


def difference(kind: str, golden: str, obtained: str) -> str | None:
    """What differs, in words and then in lines; None if nothing that counts does.

    Both texts have ``\\n`` line ends.
    """
    if golden == obtained:
        return None
    if damage := _damage(kind, golden):
        return damage
    if kind == "text":
        return "\n".join(text_diff(golden.split("\n"), obtained.split("\n")))
    try:
        old = unfold(golden)
    except TextError as error:
        return f"the golden is not graph text: {error}"
    new = unfold(obtained)
    if old == new:
        return None
    words = differences_in_words(old, new) + _torch_note(golden, obtained)
    return "\n".join([*words, "", *graph_diff(old, new)])


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
