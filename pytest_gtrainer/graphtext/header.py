"""The comment lines at the head of a golden: what made it, and how to make it again.

They are told to the reader and never compared, apart from the format version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

VERSION = 2
PARTIAL_VIEWS = ("schedule", "layout")
"""Views that show a part of a graph; their texts say which, in the field ``view``."""
_FIRST = re.compile(r"# gtrainer graph v(\d+)\s*")


def write(fields: Mapping[str, str]) -> list[str]:
    """The header's lines.

    >>> write({"torch": "2.13.0"})
    ['# gtrainer graph v2', '# torch: 2.13.0']
    """
    told = [f"# {name}: {' '.join(value.split())}" for name, value in fields.items()]
    return [f"# gtrainer graph v{VERSION}", *told]


def version_of(text: str) -> int | None:
    """The format version that a text says it has; None if it says none.

    >>> version_of("# gtrainer graph v7\\nif P:"), version_of("if P:")
    (7, None)
    """
    found = _FIRST.match(text.partition("\n")[0])
    return int(found[1]) if found else None


def read(text: str) -> dict[str, str]:
    """The header's fields.

    >>> read("# gtrainer graph v2\\n# torch: 2.13.0\\nif P:\\n  P.x: f32[2]  # y: z\\n")
    {'torch': '2.13.0'}
    """
    fields = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        name, colon, value = line[1:].partition(":")
        if colon:
            fields[name.strip()] = value.strip()
    return fields


def body(text: str) -> str:
    """The text without its header."""
    lines = text.splitlines(keepends=True)
    start = 0
    while start < len(lines) and lines[start].startswith("#"):
        start += 1
    return "".join(lines[start:])
