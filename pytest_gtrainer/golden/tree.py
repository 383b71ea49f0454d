"""The goldens that lie in a tree."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from pytest_gtrainer.golden import store, values
from pytest_gtrainer.golden.naming import FOLDER, SUFFIXES, safe, stem_of_golden

_ON_GPU = re.compile(r"""device\(["']cuda|@ cuda""")
_GPU_WORD = re.compile(r"cuda|gpu|nccl", re.IGNORECASE)


def goldens(root: Path) -> list[PurePosixPath]:
    """All goldens, as paths below the root directory, in order; links to folders are not followed."""
    found = []
    for folder, _, names in os.walk(root / FOLDER):
        below = PurePosixPath(Path(folder).relative_to(root).as_posix())
        found += [below / name for name in names if stem_of_golden(below / name) is not None]
    return sorted(found)


def by_stem(files: Iterable[PurePosixPath]) -> Mapping[PurePosixPath, list[PurePosixPath]]:
    """Goldens by the test that they belong to."""
    found: dict[PurePosixPath, list[PurePosixPath]] = defaultdict(list)
    for file in files:
        stem = stem_of_golden(file)
        if stem is not None:
            found[stem].append(file)
    return found


def has_test_file(place: PurePosixPath, root: Path) -> bool:
    """Whether a file lies where the tests of a folder of goldens would.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "test_a.py").touch()
    ...     [has_test_file(PurePosixPath(FOLDER, name), Path(folder)) for name in ("test_a", "test_b")]
    [True, False]
    """
    folders = [root]
    *parents, last = place.relative_to(FOLDER).parts
    for part in parents:
        entries = (entry for folder in folders for entry in _entries(folder))
        folders = [entry for entry in entries if entry.is_dir() and _is(entry.name, part)]
    return any(_is(entry.stem, last) for folder in folders for entry in _entries(folder) if entry.is_file())


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:  # a folder that may not be read has no tests either
        return


def _is(name: str, part: str) -> bool:
    return safe(name, fold_case=False) == part


def needs_gpu(path: PurePosixPath, root: Path) -> bool:
    """Whether only a run with a GPU could say what a golden is good for.

    It says so itself (a graph by its devices, numbers by their environments), or its
    name does: a text has no other place to say it.
    """
    if _GPU_WORD.search(path.name):
        return True
    try:
        text = store.read(root / path, root) or ""
    except store.GoldenFileError:
        return False
    if path.name.endswith(SUFFIXES["numbers"]):
        return values.devices(text) - {"cpu"} != set()
    return path.suffix == SUFFIXES["graph"] and _ON_GPU.search(text) is not None
