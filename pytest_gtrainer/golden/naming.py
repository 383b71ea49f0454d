"""Where a golden lies, a path made from the test's id and safe on any file system; and what its test claims it holds.

Terms: the *stem* of a test is the path that its goldens have in common, ``golden/tests/test_a/test_c-8``.
A golden is its test's stem, ``@`` and the check's name if it has one, ``@torch=2.15`` if it is kept per
version of torch, and a suffix that tells its kind. A *claim* is a text that a test says its golden should hold; in a
rank it is only recorded, and judged by the parent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePosixPath

FOLDER = "golden"
SUFFIXES = {"graph": ".fxgraph", "text": ".txt", "numbers": ".numbers.json"}
_LONGEST = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+-]")
_OF_TORCH = re.compile(r"(?P<rest>.*)@torch=(?P<major>\d+)\.(?P<minor>\d+)(?P<suffix>\.[a-z.]+)")
_GROUP = re.compile(r"^(\s*\w+ = group)\(.*\)$", re.MULTILINE)
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def golden_path(nodeid: str, name: str | None, kind: str, torch: tuple[int, int] | None = None) -> PurePosixPath:
    """The file of a check, relative to the root directory; ``torch`` is the minor version that it is kept for.

    >>> str(golden_path("tests/test_a.py::TestB::test_c[8-x]", None, "graph"))
    'golden/tests/test_a/TestB.test_c-8-x.fxgraph'
    >>> str(golden_path("tests/test_a.py::test_c", "after", "text"))
    'golden/tests/test_a/test_c@after.txt'
    >>> str(golden_path("test_a.py::test_c[a/b]", None, "text"))
    'golden/test_a/test_c-a_b~c14cddc0.txt'
    >>> str(golden_path("test_a.py::test_c", "after", "graph", (2, 15)))
    'golden/test_a/test_c@after@torch=2.15.fxgraph'

    Raises:
        ValueError: the name is what a version is told by.
    """
    if name is not None and _OF_TORCH.fullmatch(f"@{name}{SUFFIXES[kind]}"):
        raise ValueError(f"the name {name!r} is how goldens kept per version of torch are named: give per='torch'")
    stem = stem_of_test(nodeid)
    named = f"@{safe(name)}" if name is not None else ""
    version = "@torch={}.{}".format(*torch) if torch else ""
    return stem.with_name(stem.name + named + version + SUFFIXES[kind])


def torch_of(path: PurePosixPath) -> tuple[int, int] | None:
    """The minor version of torch that a golden is kept for; None if it serves all.

    >>> torch_of(PurePosixPath("golden/test_a/test_c@torch=2.15.fxgraph")), torch_of(PurePosixPath("test_c@after.txt"))
    ((2, 15), None)
    """
    found = _OF_TORCH.fullmatch(path.name)
    return (int(found["major"]), int(found["minor"])) if found else None


def standing(path: PurePosixPath, there: Iterable[str]) -> PurePosixPath:
    """Which of the files beside it holds in place of a golden kept per version: the newest that is no newer.

    >>> files = ["test_c@torch=2.9.txt", "test_c@torch=2.13.txt", "test_c@torch=2.15.txt", "test_c@x@torch=2.14.txt"]
    >>> str(standing(PurePosixPath("golden/test_c@torch=2.14.txt"), files))
    'golden/test_c@torch=2.13.txt'
    """
    own = _OF_TORCH.fullmatch(path.name)
    if own is None:
        return path
    found = filter(None, map(_OF_TORCH.fullmatch, there))
    kin = [path.with_name(other[0]) for other in found if other.group("rest", "suffix") == own.group("rest", "suffix")]
    older = [other for other in kin if (torch_of(other) or ()) <= (torch_of(path) or ())]
    return max(older, key=lambda other: torch_of(other) or (), default=path)


def stem_of_test(nodeid: str) -> PurePosixPath:
    """What the paths of all goldens of a test begin with.

    >>> str(stem_of_test("tests/test_a.py::test_c[8]"))
    'golden/tests/test_a/test_c-8'
    """
    file, _, test = nodeid.partition("::")
    function, bracket, parameters = test.partition("[")
    stem = safe(function.replace("::", "."), fold_case=False)
    if bracket:
        stem += "-" + safe(parameters.removesuffix("]"))
    return place_of_tests(file) / stem


def stem_of_golden(path: PurePosixPath) -> PurePosixPath | None:
    """The stem of the test that a file is a golden of; None if it is no golden.

    >>> str(stem_of_golden(PurePosixPath("golden/test_a/test_c-8@after.numbers.json")))
    'golden/test_a/test_c-8'
    >>> stem_of_golden(PurePosixPath("golden/test_a/notes.md"))
    """
    suffix = next((suffix for suffix in SUFFIXES.values() if path.name.endswith(suffix)), None)
    if suffix is None or path.name.startswith(".") or len(path.parts) < 3:
        return None
    stem, _, _ = path.name.removesuffix(suffix).partition("@")  # `safe` leaves no other "@"
    return path.with_name(stem) if stem else None


def place_of_tests(file: str) -> PurePosixPath:
    """The folder of the goldens of a test file, or of all those below a folder of tests.

    >>> str(place_of_tests("tests/test_a.py"))
    'golden/tests/test_a'
    """
    folders = PurePosixPath(file).with_suffix("").parts if file else ()
    return PurePosixPath(FOLDER, *(safe(folder, fold_case=False) for folder in folders if folder not in ("..", "/")))


def safe(text: str, *, fold_case: bool = True) -> str:
    """The text itself where every file system takes it, else a likeness and a short hash.

    With ``fold_case`` a capital counts as unsafe: ``A`` and ``a`` are one name on some systems.

    >>> safe("bf16-8"), safe("Linear"), safe("con"), safe("")
    ('bf16-8', 'Linear~e6950b45', 'con~1143da2b', '~e3b0c442')
    """
    likeness = _UNSAFE.sub("_", text)[:_LONGEST]
    unsafe = likeness != text or not text or text[-1] == "." or _RESERVED.fullmatch(text)
    if not unsafe and not (fold_case and text != text.lower()):
        return text
    return f"{likeness}~{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:8]}"


# -- claims


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
            # not by `splitlines`: it also ends lines where texts may differ, at a form feed for one
            texts = (claim.common_text.removesuffix("\n").split("\n") for claim in (mine, other))
            number, lines = next(pair for pair in enumerate(zip_longest(*texts), start=1) if pair[1][0] != pair[1][1])
            one, two = ("(ends here)" if line is None else line.strip() for line in lines)
            what = f"golden {mine.name!r}" if mine.name else "the golden"
            where = f"{what} differs between ranks, first on rank {rank} at line {number}"
            return f"{where}:\n  rank {first}: {one}\n  rank {rank}: {two}", {first: mine, rank: other}
    return None
