"""What a test says its golden should hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

_GROUP = re.compile(r"^(\s*\w+ = group)\(.*\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Claim:
    """One check: its name ("" for a test's only one), its file below the root, its text.

    ``kind`` is one of ``naming.SUFFIXES``. ``graph`` is the whole graph where ``text`` shows less of
    it and artifacts are kept. A claim goes through JSON on its way from a rank.
    """

    name: str
    path: str
    kind: str
    text: str
    graph: str = ""

    @property
    def common_text(self) -> str:
        """What all ranks must have in common: of a process group each has its own ranks.

        >>> Claim("", "", "graph", "fsdp = group(range(4, 8))\\nif P:").common_text
        'fsdp = group()\\nif P:'
        """
        return _GROUP.sub(r"\1()", self.text) if self.kind == "graph" else self.text


def disagreement(claims: Mapping[int, list[Claim]]) -> tuple[str, dict[int, Claim]] | None:
    """How the first rank that claims something else than the lowest rank does so, and both claims of that golden.

    There are no claims to show where the two check other goldens.

    >>> claims = {0: [Claim("", "", "text", "a\\nb\\n")], 3: [Claim("", "", "text", "a\\nc\\n")]}
    >>> print(disagreement(claims)[0])
    the golden differs between ranks, first on rank 3 at line 2:
      rank 0: b
      rank 3: c
    """
    if not claims:
        return None
    first, *others = sorted(claims)
    for rank in others:
        names = {r: [claim.name for claim in claims[r]] for r in (first, rank)}
        if names[first] != names[rank]:
            shown = {r: [name or "its only golden" for name in names[r]] for r in names}
            return f"ranks check other goldens: rank {first} {shown[first]}, rank {rank} {shown[rank]}", {}
        for mine, other in zip(claims[first], claims[rank], strict=True):
            if mine.common_text == other.common_text:
                continue
            pairs = enumerate(zip_longest(mine.common_text.splitlines(), other.common_text.splitlines()), start=1)
            number, lines = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
            one, two = ("(ends here)" if line is None else line.strip() for line in lines)
            what = f"golden {mine.name!r}" if mine.name else "the golden"
            where = f"{what} differs between ranks, first on rank {rank} at line {number}"
            return f"{where}:\n  rank {first}: {one}\n  rank {rank}: {two}", {first: mine, rank: other}
    return None
