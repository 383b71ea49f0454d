"""Artifacts: what a run leaves in ``--gt-artifacts DIR`` for a person to look at, CI to upload.

Each test has one folder below DIR, a rank of it one below that; only one process at a time writes
there.
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
    """DIR as an absolute path: a flag's is relative to where pytest was called, an ini file's to
    the root directory.
    """
    if (given := options.get(config, "artifacts")) is None:
        return None
    by_flag = config.getoption("--gt-artifacts") is not None
    return Path(
        os.path.abspath((config.invocation_params.dir if by_flag else config.rootpath) / given)
    )


def check(config: pytest.Config) -> None:
    """Refuse, as a pytest.UsageError, a DIR that is a file, holds the tree, or lies among the
    goldens.
    """
    if (place := folder(config)) is None:
        return
    if os.path.exists(place) and not os.path.isdir(
        place
    ):  # False, where a Path raises, of a name that is too long
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
    """Keep a text in the test's folder; its path, None without ``--gt-artifacts``. GoldenFileError
    if that fails.
    """
    if (top := folder(item.config)) is None:
        return None
    path = _place_of(item, top) / safe(name, fold_case=False)
    try:
        store.write(path, top, text)
    except (
        OSError,
        ValueError,
    ) as error:  # also of looking at the folder, before anything is written
        raise store.GoldenFileError(f"{shown(path)} was not written: {_reason(error)}") from error
    return path


def save_or_warn(item: pytest.Item, name: str, text: str) -> Path | None:
    """Like ``save``, but what fails is a warning of the test."""
    try:
        return save(item, name, text)
    except store.GoldenFileError as error:
        item.warn(ArtifactWarning(f"--gt-artifacts: nothing was saved: {error}"))
        return None


def folder_of(item: pytest.Item) -> Path | None:
    """The test's folder, made for it to write to; None without ``--gt-artifacts``, and with a
    warning if that fails.
    """
    if (top := folder(item.config)) is None:
        return None
    place = _place_of(item, top)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        item.warn(ArtifactWarning(f"--gt-artifacts: {shown(place)} was not made: {_reason(error)}"))
        return None
    return place


def _reason(error: OSError | ValueError) -> str:
    """The words of the operating system; of a NUL in a path, which never gets there, those of
    Python.
    """
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _place_of(item: pytest.Item, top: Path) -> Path:
    rank = getattr(item.config, "workerinput", {}).get("gt_rank")
    return top.joinpath(
        *stem_of_test(id_of(item)).parts[1:], *([] if rank is None else [f"rank{rank}"])
    )


def remove_empty_folders(top: Path) -> None:
    """Remove the folders that tests have asked for and not used; at the end, by one process."""
    with contextlib.suppress(ValueError):  # a NUL in the path: nothing was made there
        for place, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(place)


def shown(path: Path) -> str:
    """A path as a person here would type it."""
    here = os.path.relpath(path)
    return facts.escaped(str(path) if here.startswith(os.pardir) else here)
