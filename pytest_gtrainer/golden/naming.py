"""Paths of goldens, made from ids of tests and safe on any file system; claims of tests.

The *stem* of a test is the path that its goldens have in common, ``golden/tests/test_a/test_c-8``.
The path of a golden is the stem, ``@`` and the check's name if it has one, ``@torch=2.15`` if it is
kept per version, and a suffix for its kind. A *claim* is the text that a test expects its golden to
have. A rank only records it; the parent judges.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import NamedTuple

from pytest_gtrainer.graph.partitions import Ranks, is_implied, partition_fault, spell_partition

FOLDER = "golden"
SUFFIXES = {"graph": ".fxgraph", "text": ".txt", "numbers": ".numbers.json"}
_LONGEST = 80
# Patterns are compiled at their first use: this module is part of every pytest run.
_UNSAFE = r"[^A-Za-z0-9_.,=+-]"
_OF_TORCH = r"(?P<rest>.*)@torch=(?P<major>\d+)\.(?P<minor>\d+)(?P<suffix>\.[a-z.]+)"
_GROUP = r"(?m)^(\s*(\w+) = group)\((.*)\)$"
_RANGE = r"range\((\d+), (\d+)(?:, (\d+))?\)"
_RESERVED = r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?"


def golden_path(
    nodeid: str, name: str | None, kind: str, torch: tuple[int, int] | None = None
) -> PurePosixPath:
    """Return the file of a check, below the root directory.

    Raises:
        ValueError: the name looks like the version in the path of a golden kept per version.

    >>> str(golden_path("tests/test_a.py::TestB::test_c[8-x]", None, "graph"))
    'golden/tests/test_a/TestB.test_c-8-x.fxgraph'
    >>> str(golden_path("test_a.py::test_c", "after", "graph", (2, 15)))
    'golden/test_a/test_c@after@torch=2.15.fxgraph'
    """
    if name is not None and re.fullmatch(_OF_TORCH, f"@{name}{SUFFIXES[kind]}"):
        raise ValueError(
            f"the name {name!r} is how goldens kept per version of torch are named: "
            "give per='torch'"
        )
    stem = stem_of_test(nodeid)
    file = stem.name
    if name is not None:
        file += f"@{safe(name)}"
    if torch:
        file += "@torch={}.{}".format(*torch)
    return stem.with_name(file + SUFFIXES[kind])


def torch_of(path: PurePosixPath) -> tuple[int, int] | None:
    """Return the minor version of torch that a golden is kept for; None if it serves all."""
    found = re.fullmatch(_OF_TORCH, path.name)
    return (int(found["major"]), int(found["minor"])) if found else None


def file_for_version(path: PurePosixPath, names: Iterable[str]) -> PurePosixPath:
    """Return the file to compare with, for a golden that is kept per version of torch.

    It is that of the same version, or of the newest one before it.

    Args:
        path: the golden of the installed version.
        names: the files in its folder.
    """
    own, version = re.fullmatch(_OF_TORCH, path.name), torch_of(path)
    if own is None or version is None:
        return path
    older = {}
    for name in names:
        other = re.fullmatch(_OF_TORCH, name)
        if other is None or other.group("rest", "suffix") != own.group("rest", "suffix"):
            continue
        found = int(other["major"]), int(other["minor"])
        if found <= version:
            older[found] = path.with_name(name)

    return older[max(older)] if older else path


def stem_of_test(nodeid: str) -> PurePosixPath:
    """Return the path that all goldens of a test begin with."""
    file, _, test = nodeid.partition("::")
    function, bracket, parameters = test.partition("[")
    stem = safe(function.replace("::", "."), fold_case=False)
    if bracket:
        stem += f"-{safe(parameters.removesuffix(']'))}"
    return place_of_tests(file) / stem


def stem_of_golden(path: PurePosixPath) -> PurePosixPath | None:
    """Return the stem of the test of a golden; None if the file is no golden."""
    for suffix in SUFFIXES.values():
        # ``safe`` leaves no "@" in a stem.
        stem = path.name.removesuffix(suffix).partition("@")[0]
        if path.name.endswith(suffix) and stem and stem[0] != "." and len(path.parts) > 2:
            return path.with_name(stem)
    return None


def place_of_tests(path: str, *, is_file: bool = True) -> PurePosixPath:
    """Return the folder of the goldens of a test file, or of all those below a folder of tests."""
    below = PurePosixPath(path)
    if path and is_file:
        below = below.with_suffix("")
    parts = [safe(part, fold_case=False) for part in below.parts if part not in ("..", "/")]
    return PurePosixPath(FOLDER, *parts)


def safe(text: str, *, fold_case: bool = True) -> str:
    """Return a text as a file name: itself if every file system takes it, else with a hash.

    With ``fold_case`` no two names differ only in case, which some file systems ignore.

    >>> safe("bf16-8"), safe("a/b"), safe("Linear"), safe("Linear", fold_case=False)
    ('bf16-8', 'a_b~c14cddc0', 'Linear~e6950b45', 'Linear')
    """
    likeness = re.sub(_UNSAFE, "_", text)[:_LONGEST]
    unsafe = likeness != text or not text or text[-1] == "." or re.fullmatch(_RESERVED, text)
    if not unsafe and not (fold_case and text != text.lower()):
        return text
    return f"{likeness}~{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:8]}"


class Claim(NamedTuple):
    """One check; it goes through JSON on its way from a rank."""

    name: str  # "" for a golden without a name
    path: str  # its file, below the root
    kind: str  # one of ``SUFFIXES``
    text: str
    graph: str = ""  # the full view, if the text is another view and artifacts are kept

    @property
    def common_text(self) -> str:
        """The text that all ranks must have: without ranks of groups, as each has its own."""
        return re.sub(_GROUP, r"\1()", self.text) if self.kind == "graph" else self.text

    @property
    def groups(self) -> list[tuple[str, Ranks | None]]:
        """The symbols and ranks of the process groups in a graph's text, bodies included."""
        if self.kind != "graph":
            return []
        return [(symbol, _ranks_of(ranks)) for _, symbol, ranks in re.findall(_GROUP, self.text)]


def _ranks_of(spelled: str) -> Ranks | None:
    """Return the ranks that a text has for a group.

    >>> _ranks_of("range(0, 4, 2)"), _ranks_of("[0, 3]"), _ranks_of("None")
    ((0, 2), (0, 3), None)
    """
    if found := re.fullmatch(_RANGE, spelled):
        return tuple(range(int(found[1]), int(found[2]), int(found[3] or 1)))
    return None if spelled == "None" else tuple(ast.literal_eval(spelled))


def _partitions(claims: Mapping[int, Claim]) -> Iterable[tuple[str, dict[int, Ranks]]]:
    """Yield the symbol of each group of one graph, with the ranks that each rank has for it.

    The ``common_text`` of all claims is equal.
    """
    by_rank = {rank: claim.groups for rank, claim in claims.items()}
    for nth, (symbol, _) in enumerate(by_rank[min(by_rank)]):
        groups: dict[int, Ranks] = {}
        for rank, named in by_rank.items():
            _, ranks = named[nth]
            if ranks is not None:
                groups[rank] = ranks
        yield symbol, groups


def with_groups_of_all_ranks(claims: Mapping[int, Claim]) -> Claim:
    """Return the lowest rank's claim, with the groups of all ranks in its header.

    A group is left out if the lowest rank's determines those of the others.
    """
    from pytest_gtrainer.graphtext.header import with_field

    first, shown = claims[min(claims)], []
    for symbol, groups in _partitions(claims):
        if groups and not is_implied(groups):
            shown.append(f"{symbol} = {spell_partition(groups)}")
    if not shown:
        return first
    return first._replace(text=with_field(first.text, "groups", "; ".join(shown)))


def disagreement(claims: Mapping[int, list[Claim]]) -> tuple[str, dict[int, Claim]] | None:
    """Return how the claims of ranks disagree, and the claims on the golden in question, by rank.

    There is no such claim if ranks check different goldens. Returns None if all agree.
    """
    if not claims:
        return None
    first, *others = sorted(claims)
    for rank in others:
        if [claim.name for claim in claims[first]] != [claim.name for claim in claims[rank]]:
            mine = [claim.name or "its only golden" for claim in claims[first]]
            theirs = [claim.name or "its only golden" for claim in claims[rank]]
            return f"ranks check other goldens: rank {first} {mine}, rank {rank} {theirs}", {}
        for claim, other in zip(claims[first], claims[rank], strict=True):
            if claim.common_text != other.common_text:
                # ``splitlines`` also ends lines at form feeds, which may be the difference.
                ours = claim.common_text.removesuffix("\n").split("\n")
                others_lines = other.common_text.removesuffix("\n").split("\n")
                pairs = enumerate(zip_longest(ours, others_lines, fillvalue="(ends here)"), start=1)
                number, (one, two) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
                return (
                    f"{_title(claim)} differs between ranks, first on rank {rank} at line {number}:"
                    f"\n  rank {first}: {one.strip()}\n  rank {rank}: {two.strip()}",
                    {first: claim, rank: other},
                )

    for nth, claim in enumerate(claims[first]):
        of_ranks = {rank: claims[rank][nth] for rank in claims}
        for symbol, groups in _partitions(of_ranks):
            if fault := partition_fault(groups):
                return (
                    f"ranks do not agree on the process group {symbol} of {_title(claim)}: {fault}."
                    " Its collective would wait for ever, or add other ranks. Make the same groups "
                    "on all ranks",
                    of_ranks,
                )

    return None


def _title(claim: Claim) -> str:
    return f"golden {claim.name!r}" if claim.name else "the golden"
