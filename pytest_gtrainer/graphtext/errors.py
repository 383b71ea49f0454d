"""The one error that reading a text raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TextError(ValueError):
    """A text that is not graph text: where, what stands there, and what was expected.

    Attributes:
        line, column: counted from 1; column 0 where it is the line as a whole.
    """

    def __init__(self, message: str, line: int, column: int = 0) -> None:
        place = f"line {line}, column {column}" if column else f"line {line}"
        super().__init__(f"{place}: {message}")
        self.line, self.column = line, column


def nearest(word: str, known: Iterable[str]) -> str:
    """``", did you mean `mm`?"`` if something known looks like ``word``, else nothing.

    >>> nearest("aten.mmm", ["aten.mm", "aten.add"]), nearest("xyz", ["aten.mm"])
    (', did you mean `aten.mm`?', '')
    """
    found = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean `{found[0]}`?" if found else ""
