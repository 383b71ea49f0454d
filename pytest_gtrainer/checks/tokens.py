"""A check's text as tokens."""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_gtrainer.checks.errors import CheckError

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string> "[^"]*" | '[^']*')
    | (?P<number> -?(?:\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|inf\b|nan\b))
    | (?P<mark>   -> | \.\.\. | [()\[\],=])
    | (?P<word>   [A-Za-z_*](?:-(?!>)|[\w*])* (?:\.(?:-(?!>)|[\w*])+)*)
    )""",
    re.VERBOSE,
)


class Token(NamedTuple):
    """A word, a number, a string, or a mark of punctuation; "end" behind the last."""

    kind: str
    text: str


END = Token("end", "")


def tokens_of(text: str) -> list[Token]:
    """The tokens of a text, ``END`` behind them.

    >>> [token.text for token in tokens_of("aten.mm(g, ...) -> f32[2] in layers.*")]
    ['aten.mm', '(', 'g', ',', '...', ')', '->', 'f32', '[', '2', ']', 'in', 'layers.*', '']

    Raises:
        CheckError: a character that no check has.
    """
    found: list[Token] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise CheckError(f"{text[place:].lstrip()[:1]!r} at column {place + 1} is not part of a check")
        shown = match[match.lastgroup]
        found.append(Token(match.lastgroup, shown[1:-1] if match.lastgroup == "string" else shown))
        place = match.end()
    return [*found, END]
