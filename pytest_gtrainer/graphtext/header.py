"""The header of a text, and the one error that reading a text raises.

Comment lines at the head say what made a golden. They are not compared, but for the format version,
the view, and ``groups`` of a golden of real ranks: the process groups of all ranks, if those of the
first rank do not determine them.
"""

import difflib
import itertools
import operator
import re
from collections.abc import Iterable, Mapping

from pytest_gtrainer.facts import escaped


class TextError(ValueError):
    """This is not graph text. ``line`` and ``column`` count from 1; column 0 is the whole line."""

    def __init__(self, message: str, line: int, column: int = 0) -> None:
        super().__init__(f"line {line}{f', column {column}' if column else ''}: {escaped(message)}")
        self.line, self.column = line, column


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``", did you mean `mm`?"`` if something known looks like ``word``, else ""."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean `{found[0]}`?" if found else ""


VERSION = 2
PARTIAL_VIEWS = ("schedule", "layout")
"""Views that show a part of a graph; their texts say which, in the field ``view``."""
EMPTY = {"layout": "payloads = []", "schedule": "schedule = []"}
"""By view, the text of a graph of which it shows nothing; an empty file would look damaged."""
_is_comment = operator.methodcaller("startswith", "#")
_FIRST = re.compile(r"# gtrainer graph v(\d{1,9})(?!\d)\s*")


def write(fields: Mapping[str, str]) -> list[str]:
    """Return the lines of a header; control characters are escaped, as a terminal may show them."""
    lines = [f"# gtrainer graph v{VERSION}"]
    for name, value in fields.items():
        # A value of several lines would end the comment.
        lines.append(escaped(" ".join(f"# {name}: {value}".split())))
    return lines


def with_field(text: str, name: str, value: str) -> str:
    """Return the text with one more field at the end of its header.

    >>> with_field("# gtrainer graph v2\\n# test: a\\nx", "groups", "dp = [0, 2] [1, 3]")
    '# gtrainer graph v2\\n# test: a\\n# groups: dp = [0, 2] [1, 3]\\nx'
    """
    rest = body(text)
    return f"{text.removesuffix(rest)}# {name}: {value}\n{rest}"


def version_of(text: str) -> int | None:
    """Return the format version of a text; None if its header has none."""
    found = _FIRST.match(text.partition("\n")[0])
    return int(found[1]) if found else None


def read(text: str) -> dict[str, str]:
    """Return the fields of a header.

    >>> read("# gtrainer graph v2\\n# test: a::b\\nx")
    {'test': 'a::b'}
    """
    fields = {}
    for line in itertools.takewhile(_is_comment, text.splitlines()):
        name, colon, value = line[1:].partition(":")
        if colon:
            fields[name.strip()] = value.strip()
    return fields


def unlike(old: str, new: str) -> str:
    """Return the difference of two headers that gives equal lines another meaning.

    Returns "" if there is none, or if one text has no header.

    >>> unlike("# gtrainer graph v1", "# gtrainer graph v2")
    'the old text has format v1, the new one v2: render both again with one pytest-gtrainer'
    >>> unlike("# gtrainer graph v2", "# gtrainer graph v2\\n# view: layout")
    'the old text has view full, the new one layout'
    """
    was, now = version_of(old), version_of(new)
    # A text that a person writes may have no header.
    if was is None or now is None:
        return ""
    if was != now:
        return (
            f"the old text has format v{was}, the new one v{now}: "
            "render both again with one pytest-gtrainer"
        )

    for field, default in (("view", "full"), ("groups", "those of the first rank")):
        before, after = read(old).get(field, default), read(new).get(field, default)
        if before != after:
            return f"the old text has {field} {before}, the new one {after}"

    return ""


def body(text: str) -> str:
    """Return the text without its header."""
    return "".join(itertools.dropwhile(_is_comment, text.splitlines(keepends=True)))
