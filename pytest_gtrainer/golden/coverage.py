"""Whether a run is one of all tests, so that what it did not use can be told from what it did not see.

A run is *full* if

- it asks for no part of the tests: no ``-k``, no node id, no ``--lf`` or ``--stepwise``, no
  collecting or planning only; the paths it is given, if any, cover those of ``testpaths`` (the root
  directory where there are none), or all places that have goldens;
- it came to its end: nothing failed in collection, each test that was to run has run, no xdist
  worker died.

Failed, skipped and deselected tests (``-m``, ``--deselect``, a conftest) do not make it less: their
goldens are known to be theirs.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest

from pytest_gtrainer.golden.naming import place_of_tests, safe

_PARTS = {
    "keyword": "-k selects tests",
    "lf": "--lf selects tests",
    "stepwise": "--stepwise stops at a failure",
    "collectonly": "--collect-only runs no test",
    "setupplan": "--setup-plan runs no test",  # it sets the next one, too
    "setuponly": "--setup-only runs no test",
}


def asks_for_a_part(config: pytest.Config, goldens: Iterable[PurePosixPath]) -> str | None:
    """What on the command line makes a run one of a part of the tests; None if nothing does."""
    for name, reason in _PARTS.items():
        if getattr(config.option, name, None):
            return reason
    node_ids = [argument for argument in config.args if "::" in argument]
    if node_ids:
        return f"{node_ids[0]} names a test"
    starts = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    if _cover(starts, _homes(config)) or all(_holds_tests_of(starts, golden, config.rootpath) for golden in goldens):
        return None
    return f"{' '.join(config.args)} does not hold all tests"


def _homes(config: pytest.Config) -> list[Path]:
    """Where the project's tests lie, by its own word."""
    patterns: list[str] = config.getini("testpaths")
    root = config.rootpath
    found = [root / path for pattern in patterns for path in glob.iglob(pattern, root_dir=root, recursive=True)]
    return [path.resolve() for path in found or [root]]


def _cover(starts: list[Path], homes: list[Path]) -> bool:
    return all(any(home.is_relative_to(start) for start in starts) for home in homes)


def _holds_tests_of(starts: list[Path], golden: PurePosixPath, root: Path) -> bool:
    """Whether the test that a golden belongs to lies at or below one of these paths."""
    return any(golden.parent.is_relative_to(_place(start, root.resolve())) for start in starts)


def _place(start: Path, root: Path) -> PurePosixPath:
    """The folder of the goldens of all tests below a path; of a path out of the tree, none's."""
    if not start.is_relative_to(root):
        return PurePosixPath("/nowhere")
    relative = PurePosixPath(start.relative_to(root).as_posix())
    if start.is_file():
        return place_of_tests(str(relative))
    return place_of_tests("").joinpath(*(safe(part, fold_case=False) for part in relative.parts))
