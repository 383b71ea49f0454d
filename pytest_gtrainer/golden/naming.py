"""Where a golden lies: a path made from the test's id, safe on any file system."""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath

FOLDER = "golden"
SUFFIXES = {"graph": ".fxgraph", "text": ".txt"}
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
    file, _, test = nodeid.partition("::")
    function, bracket, parameters = test.partition("[")
    folders = PurePosixPath(file).with_suffix("").parts if file else ()
    stem = safe(function.replace("::", "."), fold_case=False)
    if bracket:
        stem += "-" + safe(parameters.removesuffix("]"))
    if name is not None:
        stem += "@" + safe(name)
    parents = [safe(folder, fold_case=False) for folder in folders if folder not in ("..", "/")]
    return PurePosixPath(FOLDER, *parents, stem + SUFFIXES[kind])


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
