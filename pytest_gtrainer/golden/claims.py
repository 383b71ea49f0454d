"""What a test says its golden should hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def common_text(self) -> str:
        """What all ranks must have in common: of a process group each has its own ranks.

        >>> Claim("", "", "graph", "fsdp = group(range(4, 8))\\nif P:").common_text
        'fsdp = group()\\nif P:'
        """
        return _GROUP.sub(r"\1()", self.text) if self.kind == "graph" else self.text


@dataclass(frozen=True, slots=True)
class Disagreement:
    """In words, how two ranks claim different things; and what, if both check the same goldens."""

    text: str
    claims: Mapping[int, Claim]

    def __str__(self) -> str:
        return self.text


def disagreement(claims: Mapping[int, list[Claim]]) -> Disagreement | None:
    """Where the first rank that claims something else than the lowest rank does so.

    >>> claims = {0: [Claim("", "", "text", "a\\nb\\n")], 3: [Claim("", "", "text", "a\\nc\\n")]}
    >>> print(disagreement(claims))
    the golden differs between ranks, first on rank 3 at line 2:
      rank 0: b
      rank 3: c
    """
    if not claims:
        return None
    first, *others = sorted(claims)
    expected = claims[first]
    for rank in others:
        if [claim.name for claim in claims[rank]] != [claim.name for claim in expected]:
            names = {r: [claim.name or "its only golden" for claim in claims[r]] for r in (first, rank)}
            text = f"ranks check other goldens: rank {first} {names[first]}, rank {rank} {names[rank]}"
            return Disagreement(text, {})
        for mine, other in zip(expected, claims[rank], strict=True):
            if mine.common_text != other.common_text:
                return Disagreement(_first_difference(mine, other, first, rank), {first: mine, rank: other})
    return None


def _first_difference(one: Claim, other: Claim, rank: int, other_rank: int) -> str:
    lines, other_lines = one.common_text.splitlines(), other.common_text.splitlines()
    shortest = min(len(lines), len(other_lines))
    place = next((k for k in range(shortest) if lines[k] != other_lines[k]), shortest)
    what = f"golden {one.name!r}" if one.name else "the golden"
    shown = [text[place] if place < len(text) else "(ends here)" for text in (lines, other_lines)]
    return (
        f"{what} differs between ranks, first on rank {other_rank} at line {place + 1}:\n"
        f"  rank {rank}: {shown[0].strip()}\n  rank {other_rank}: {shown[1].strip()}"
    )
