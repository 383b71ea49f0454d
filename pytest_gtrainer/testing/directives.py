"""Directives: comment lines of a graph file that say something, ``# name: value``.

Any other comment is for the reader. One that looks like a directive and is none is an error:
a misspelled check would check nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_gtrainer.graphtext.header import nearest

ONCE = ("world", "mesh", "golden", "values", "result", "again", "raises")
OFTEN = ("passes", "check")
_TOLD = ("test", "torch", "remake")
"""Fields of a golden's header, which says what made it."""
_LINE = re.compile(r"\s*#\s*(?P<name>[A-Za-z_-]+)\s*:\s*(?P<value>.*?)\s*")
_LOST_CHECK = re.compile(r"\s*#\s*check\b(?!\s*:)", re.IGNORECASE)


class PassFileError(ValueError):
    """A pass file that cannot be read or expects nothing; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Directive:
    """``# name: value`` at ``place``, a file and a line."""

    name: str
    value: str
    place: str


def directives_of(text: str, file: str) -> list[Directive]:
    """The directives of a text, in order.

    >>> [(d.name, d.value) for d in directives_of("# D4: offsets.\\n# check: then mm\\nif P:\\n", "x")]
    [('check', 'then mm')]

    Raises:
        PassFileError: a line that is almost a directive, or a second one where one is enough.
    """
    found: list[Directive] = []
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{file}:{number}"
        if _LOST_CHECK.match(line):
            raise PassFileError(f"{place}: {line.strip()}\na check is written `# check: then aten.mm`, with a colon")
        match = _LINE.fullmatch(line)
        if match and _is_directive(match["name"], place):
            found.append(Directive(match["name"], match["value"], place))
    for name in ONCE:
        several = [directive for directive in found if directive.name == name]
        if len(several) > 1:
            raise PassFileError(f"{several[1].place}: there is a `# {name}:` at {several[0].place} already")
    return found


def _is_directive(name: str, place: str) -> bool:
    if name in ONCE or name in OFTEN:
        return True
    hint = nearest(name.lower(), (*ONCE, *OFTEN))
    if hint and name not in _TOLD:
        raise PassFileError(f"{place}: there is no directive `# {name}:`{hint}")
    return False
