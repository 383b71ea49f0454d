"""What a text begins with, and the one error that reading a text raises.

The comment lines at the head say what made a golden. They are never compared, apart from the format
version and, of a golden of real ranks, ``groups``: the process groups of all ranks, where those of
the first do not tell them.
"""

import difflib
import itertools
import operator
import re
from collections.abc import Iterable, Mapping

from pytest_gtrainer.facts import escaped


class TextError(ValueError):
    """A text that is not graph text. ``line`` and ``column`` count from 1; column 0 means the line
    as a whole.
    """

    def __init__(self, message: str, line: int, column: int = 0) -> None:
        super().__init__(f"line {line}{f', column {column}' if column else ''}: {escaped(message)}")
        self.line, self.column = line, column


def nearest(word: str, known: Iterable[str]) -> str:
    """``", did you mean `mm`?"`` if something known looks like ``word``, else nothing."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean `{found[0]}`?" if found else ""


VERSION = 2
PARTIAL_VIEWS = ("schedule", "layout")
"""Views that show a part of a graph; their texts say which, in the field ``view``."""
_is_comment = operator.methodcaller("startswith", "#")
_FIRST = re.compile(r"# gtrainer graph v(\d{1,9})(?!\d)\s*")


def write(fields: Mapping[str, str]) -> list[str]:
    """The header's lines; what would command a terminal that shows them is escaped."""
    lines = [f"# {name}: {value}" for name, value in fields.items()]
    return [f"# gtrainer graph v{VERSION}", *(escaped(" ".join(line.split())) for line in lines)]


def with_field(text: str, name: str, value: str) -> str:
    """Return the text with one more field at the end of its header.

    >>> with_field("# gtrainer graph v2\\n# test: a\\nx", "groups", "dp = [0, 2] [1, 3]")
    '# gtrainer graph v2\\n# test: a\\n# groups: dp = [0, 2] [1, 3]\\nx'
    """
    rest = body(text)
    return f"{text.removesuffix(rest)}# {name}: {value}\n{rest}"


def version_of(text: str) -> int | None:
    """The format version that a text says it has; None if it says none."""
    found = _FIRST.match(text.partition("\n")[0])
    return int(found[1]) if found else None


def read(text: str) -> dict[str, str]:
    """The header's fields."""
    told = (line[1:].partition(":") for line in itertools.takewhile(_is_comment, text.splitlines()))
    return {name.strip(): value.strip() for name, colon, value in told if colon}


def unlike(old: str, new: str) -> str:
    """Return how two headers differ in what their lines mean; "" if they do not, or one text has no header.

    >>> unlike("# gtrainer graph v1", "# gtrainer graph v2")
    'the old text has format v1, the new one v2: render both again with one pytest-gtrainer'
    >>> unlike("# gtrainer graph v2", "# gtrainer graph v2\\n# view: layout")
    'the old text has view full, the new one layout'
    """
    was, now = version_of(old), version_of(new)
    if was is None or now is None:
        return ""
    if was != now:
        advice = "render both again with one pytest-gtrainer"
        return f"the old text has format v{was}, the new one v{now}: {advice}"
    for field, default in (("view", "full"), ("groups", "those of the first rank")):
        before, after = (read(text).get(field, default) for text in (old, new))
        if before != after:
            return f"the old text has {field} {before}, the new one {after}"
    return ""


def body(text: str) -> str:
    """The text without its header."""
    return "".join(itertools.dropwhile(_is_comment, text.splitlines(keepends=True)))
