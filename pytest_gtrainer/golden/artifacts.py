"""Artifacts: files that a run keeps in ``--gt-artifacts DIR``, to look at or to upload from CI.

Each test has one folder below DIR, and each of its ranks a folder in it; only one process at a time
writes there.
"""

import contextlib
import os
from pathlib import Path

import pytest

from pytest_gtrainer import facts, options
from pytest_gtrainer.golden import store
from pytest_gtrainer.golden.naming import FOLDER, safe, stem_of_test
from pytest_gtrainer.marker import id_of


def folder(config: pytest.Config) -> Path | None:
    """Return DIR as an absolute path; None without ``--gt-artifacts``.

    That of the flag is relative to the current folder, that of an ini file to the root directory.
    """
    given = options.get(config, "artifacts")
    if given is None:
        return None
    by_flag = config.getoption("--gt-artifacts") is not None
    start = config.invocation_params.dir if by_flag else config.rootpath
    return Path(os.path.abspath(start / given))


def check(config: pytest.Config) -> None:
    """Check DIR.

    Raises:
        pytest.UsageError: it is a file, holds the tree, or lies among the goldens.
    """
    place = folder(config)
    if place is None:
        return
    # For a name that is too long these functions return False, where a ``Path`` raises.
    if os.path.exists(place) and not os.path.isdir(place):
        raise pytest.UsageError(f"--gt-artifacts={place} is a file: give a folder")
    if config.rootpath.is_relative_to(place):
        raise pytest.UsageError(
            f"--gt-artifacts={place} holds the root directory itself: give a folder of its own"
        )

    if place.is_relative_to(config.rootpath / FOLDER):
        raise pytest.UsageError(
            f"--gt-artifacts={place} lies among the goldens: give a folder of its own"
        )


class ArtifactWarning(pytest.PytestWarning):
    """``--gt-artifacts`` could not be written."""


def save(item: pytest.Item, name: str, text: str) -> Path | None:
    """Write a text into the test's folder and return its path; None without ``--gt-artifacts``.

    Raises:
        GoldenFileError: it cannot be written.
    """
    top = folder(item.config)
    if top is None:
        return None
    path = _folder_of(item, top) / safe(name, fold_case=False)
    try:
        store.write(path, top, text)
    except (OSError, ValueError) as error:
        # The store raises these when it looks at the folder, before it takes the lock.
        raise store.GoldenFileError(
            f"{path_from_here(path)} was not written: {store.reason(error)}"
        ) from error
    return path


def save_or_warn(item: pytest.Item, name: str, text: str) -> Path | None:
    """Write a text like ``save``; an error is a warning of the test."""
    try:
        return save(item, name, text)
    except store.GoldenFileError as error:
        item.warn(ArtifactWarning(f"--gt-artifacts: nothing was saved: {error}"))
        return None


def folder_of(item: pytest.Item) -> Path | None:
    """Make and return the test's folder; None without ``--gt-artifacts``.

    An error is a warning of the test, and None is returned.
    """
    top = folder(item.config)
    if top is None:
        return None
    path = _folder_of(item, top)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        item.warn(
            ArtifactWarning(
                f"--gt-artifacts: {path_from_here(path)} was not made: {store.reason(error)}"
            )
        )
        return None
    return path


def _folder_of(item: pytest.Item, top: Path) -> Path:
    path = top.joinpath(*stem_of_test(id_of(item)).parts[1:])
    rank = getattr(item.config, "workerinput", {}).get("gt_rank")
    return path if rank is None else path / f"rank{rank}"


def remove_empty_folders(top: Path) -> None:
    """Remove the folders that tests have not used, at the end of a run, in one process."""
    with contextlib.suppress(ValueError):  # a NUL in the path, so there is no folder
        for path, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(path)


def path_from_here(path: Path) -> str:
    """Return a path as a person in the current folder would type it."""
    here = os.path.relpath(path)
    return facts.escaped(str(path) if here.startswith(os.pardir) else here)
