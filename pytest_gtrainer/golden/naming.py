"""Where a golden lies: a path made from the test's id, safe on any file system.

Terms: the *stem* of a test is the path that its goldens have in common, ``golden/tests/test_a/test_c-8``.
A golden is its test's stem, ``@`` and the check's name if it has one, and a suffix that tells its kind.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FOLDER = "golden"
SUFFIXES = {"graph": ".fxgraph", "text": ".txt", "numbers": ".numbers.json"}
_LONGEST = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+-]")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def golden_path(nodeid: str, name: str | None, kind: str) -> PurePosixPath:
    """The file of a check, relative to the root directory.

    >>> str(golden_path("tests/test_a.py::TestB::test_c[8-x]", None, "graph"))
    'golden/tests/test_a/TestB.test_c-8-x.fxgraph'
    >>> str(golden_path("tests/test_a.py::test_c", "after", "text"))
    'golden/tests/test_a/test_c@after.txt'
    >>> str(golden_path("test_a.py::test_c[a/b]", None, "text"))
    'golden/test_a/test_c-a_b~c14cddc0.txt'
    """
    stem = stem_of_test(nodeid)
    named = f"@{safe(name)}" if name is not None else ""
    return stem.with_name(stem.name + named + SUFFIXES[kind])


def id_of(item: pytest.Item) -> str:
    """The id of a test as all runs know it: xdist appends a group to some (``--dist loadgroup``)."""
    plain = f"{item.parent.nodeid}::{item.name}" if item.parent is not None else item.nodeid
    return plain if item.nodeid.startswith(f"{plain}@") else item.nodeid


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
