"""Where a golden lies, a path made from the test's id and safe on any file system; and what its
test claims it holds.

Terms: the *stem* of a test is the path that its goldens have in common,
``golden/tests/test_a/test_c-8``. A golden is the stem, ``@`` and the check's name if it has one,
``@torch=2.15`` if it is kept per version, and a suffix that tells its kind. A *claim* is a text
that a test says its golden should hold; a rank only records it, the parent judges.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import PurePosixPath

from pytest_gtrainer.graph.partitions import Ranks, is_implied, partition_fault, spell_partition

FOLDER = "golden"
SUFFIXES = {"graph": ".fxgraph", "text": ".txt", "numbers": ".numbers.json"}
_LONGEST = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+-]")
_OF_TORCH = re.compile(r"(?P<rest>.*)@torch=(?P<major>\d+)\.(?P<minor>\d+)(?P<suffix>\.[a-z.]+)")
_GROUP = re.compile(r"^(\s*(\w+) = group)\((.*)\)$", re.MULTILINE)
_RANGE = re.compile(r"range\((\d+), (\d+)(?:, (\d+))?\)")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def golden_path(
    nodeid: str, name: str | None, kind: str, torch: tuple[int, int] | None = None
) -> PurePosixPath:
    """The file of a check, below the root directory; ValueError if its name is what a version of
    ``torch`` is told by.

    >>> str(golden_path("tests/test_a.py::TestB::test_c[8-x]", None, "graph"))
    'golden/tests/test_a/TestB.test_c-8-x.fxgraph'
    >>> str(golden_path("test_a.py::test_c", "after", "graph", (2, 15)))
    'golden/test_a/test_c@after@torch=2.15.fxgraph'
    """
    if name is not None and _OF_TORCH.fullmatch(f"@{name}{SUFFIXES[kind]}"):
        raise ValueError(
            f"the name {name!r} is how goldens kept per version of torch are named: give per='torch'"
        )
    stem = stem_of_test(nodeid)
    named = f"@{safe(name)}" if name is not None else ""
    version = "@torch={}.{}".format(*torch) if torch else ""
    return stem.with_name(stem.name + named + version + SUFFIXES[kind])


def torch_of(path: PurePosixPath) -> tuple[int, int] | None:
    """The minor version of torch that a golden is kept for; None if it serves all."""
    found = _OF_TORCH.fullmatch(path.name)
    return (int(found["major"]), int(found["minor"])) if found else None


def standing(path: PurePosixPath, there: Iterable[str]) -> PurePosixPath:
    """Return which of the files beside it holds in place of a golden kept per version: the newest
    that is no newer.
    """
    if (own := _OF_TORCH.fullmatch(path.name)) is None:
        return path
    found = filter(None, map(_OF_TORCH.fullmatch, there))
    kin = [
        path.with_name(other[0])
        for other in found
        if other.group("rest", "suffix") == own.group("rest", "suffix")
    ]
    older = [other for other in kin if (torch_of(other) or ()) <= (torch_of(path) or ())]
    return max(older, key=lambda other: torch_of(other) or (), default=path)


def stem_of_test(nodeid: str) -> PurePosixPath:
    """Return what the paths of all goldens of a test begin with."""
    file, _, test = nodeid.partition("::")
    function, bracket, parameters = test.partition("[")
    stem = safe(function.replace("::", "."), fold_case=False)
    return place_of_tests(file) / (
        f"{stem}-{safe(parameters.removesuffix(']'))}" if bracket else stem
    )


def stem_of_golden(path: PurePosixPath) -> PurePosixPath | None:
    """The stem of the test that a file is a golden of; None if it is no golden."""
    suffix = next((suffix for suffix in SUFFIXES.values() if path.name.endswith(suffix)), None)
    if suffix is None or path.name.startswith(".") or len(path.parts) < 3:
        return None
    stem, _, _ = path.name.removesuffix(suffix).partition("@")  # `safe` leaves no other "@"
    return path.with_name(stem) if stem else None


def place_of_tests(path: str, *, is_file: bool = True) -> PurePosixPath:
    """The folder of the goldens of a test file, or of all those below a folder of tests."""
    below = PurePosixPath(path).with_suffix("") if path and is_file else PurePosixPath(path)
    return PurePosixPath(
        FOLDER, *(safe(part, fold_case=False) for part in below.parts if part not in ("..", "/"))
    )


def safe(text: str, *, fold_case: bool = True) -> str:
    """The text if every file system takes it (by ``fold_case``: without capitals), else a likeness
    and a short hash.
    """
    likeness = _UNSAFE.sub("_", text)[:_LONGEST]
    unsafe = likeness != text or not text or text[-1] == "." or _RESERVED.fullmatch(text)
    if not unsafe and not (fold_case and text != text.lower()):
        return text
    return f"{likeness}~{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Claim:
    """One check; it goes through JSON on its way from a rank."""

    name: str  # "" for a test's only one
    path: str  # its file, below the root
    kind: str  # one of ``SUFFIXES``
    text: str
    graph: str = ""  # all of it, where the text shows less and artifacts are kept

    @property
    def common_text(self) -> str:
        """Return what all ranks must have in common: of a process group each has its own ranks."""
        return _GROUP.sub(r"\1()", self.text) if self.kind == "graph" else self.text

    @property
    def groups(self) -> list[tuple[str, Ranks | None]]:
        """The process groups of a graph's text by symbol, of graphs inside it too; None of one
        without ranks.
        """
        found = _GROUP.findall(self.text) if self.kind == "graph" else []
        return [(symbol, _ranks_of(spelled)) for _, symbol, spelled in found]


def _ranks_of(spelled: str) -> Ranks | None:
    """Return the ranks that a text has for a group.

    >>> _ranks_of("range(0, 4, 2)"), _ranks_of("[0, 3]"), _ranks_of("None")
    ((0, 2), (0, 3), None)
    """
    if found := _RANGE.fullmatch(spelled):
        return tuple(range(int(found[1]), int(found[2]), int(found[3] or 1)))
    return None if spelled == "None" else tuple(ast.literal_eval(spelled))


def _partitions(claims: Mapping[int, Claim]) -> Iterable[tuple[str, dict[int, Ranks]]]:
    """Yield the symbol of each group of one graph, with what every rank has for it; texts are
    alike.
    """
    by_rank = {rank: claim.groups for rank, claim in claims.items()}
    for nth, (symbol, _) in enumerate(by_rank[min(by_rank)]):
        groups = {rank: named[nth][1] for rank, named in by_rank.items()}
        yield symbol, {rank: ranks for rank, ranks in groups.items() if ranks is not None}


def showing_groups(claims: Mapping[int, Claim]) -> Claim:
    """Return the lowest rank's claim; its header shows the groups of all ranks where its own do not
    tell them.
    """
    from pytest_gtrainer.graphtext.header import with_field

    first, shown = claims[min(claims)], []
    for symbol, groups in _partitions(claims):
        if groups and not is_implied(groups):
            shown.append(f"{symbol} = {spell_partition(groups)}")
    return (
        replace(first, text=with_field(first.text, "groups", "; ".join(shown))) if shown else first
    )


def disagreement(claims: Mapping[int, list[Claim]]) -> tuple[str, dict[int, Claim]] | None:
    """How the first rank that claims something else than the lowest does so, and both claims, if of
    one golden.
    """
    if not claims:
        return None
    first, *others = sorted(claims)
    for rank in others:
        names = {r: [claim.name for claim in claims[r]] for r in (first, rank)}
        if names[first] != names[rank]:
            shown = {r: [name or "its only golden" for name in names[r]] for r in names}
            return (
                f"ranks check other goldens: rank {first} {shown[first]}, rank {rank} {shown[rank]}",
                {},
            )
        for mine, other in zip(claims[first], claims[rank], strict=True):
            if mine.common_text == other.common_text:
                continue
            # not by `splitlines`: it also ends lines where texts may differ, at a form feed for one
            texts = (claim.common_text.removesuffix("\n").split("\n") for claim in (mine, other))
            number, lines = next(
                pair for pair in enumerate(zip_longest(*texts), start=1) if pair[1][0] != pair[1][1]
            )
            one, two = ("(ends here)" if line is None else line.strip() for line in lines)
            what = f"golden {mine.name!r}" if mine.name else "the golden"
            where = f"{what} differs between ranks, first on rank {rank} at line {number}"
            return f"{where}:\n  rank {first}: {one}\n  rank {rank}: {two}", {
                first: mine,
                rank: other,
            }
    for nth, mine in enumerate(claims[first]):
        of_ranks = {rank: claims[rank][nth] for rank in claims}
        for symbol, groups in _partitions(of_ranks):
            if fault := partition_fault(groups):
                what = f"golden {mine.name!r}" if mine.name else "the golden"
                wrong = f"ranks do not agree on the process group {symbol} of {what}: {fault}"
                advice = "Its collective would wait for ever, or add other ranks. Make the same groups on all ranks"
                return f"{wrong}. {advice}", of_ranks
    return None
