"""Artifacts: what a run leaves in ``--gt-artifacts DIR`` for a person to look at, CI to upload.

Each test has one folder below DIR, a rank of it one below that; only one process at a time writes
there. Folders are made when something is saved, so that none is when nothing was.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from pytest_gtrainer import options
from pytest_gtrainer.golden import store
from pytest_gtrainer.golden.naming import FOLDER, safe, stem_of_test
from pytest_gtrainer.marker import id_of


def folder(config: pytest.Config) -> Path | None:
    """DIR as an absolute path, None without the option.

    A flag's path is relative to where pytest was called, an ini file's to the root directory.
    """
    given: str | None = options.get(config, "artifacts")
    if given is None:
        return None
    by_flag = config.getoption("--gt-artifacts") is not None
    return Path(os.path.abspath((config.invocation_params.dir if by_flag else config.rootpath) / given))


def check(config: pytest.Config) -> None:
    """Refuse a DIR that cannot be one.

    Raises:
        pytest.UsageError: it is a file, holds the tree, or lies among the goldens.
    """
    place = folder(config)
    if place is None:
        return
    if place.exists() and not place.is_dir():
        raise pytest.UsageError(f"--gt-artifacts={place} is a file: give a folder")
    if config.rootpath.is_relative_to(place):
        raise pytest.UsageError(f"--gt-artifacts={place} holds the root directory itself: give a folder of its own")
    if place.is_relative_to(config.rootpath / FOLDER):
        raise pytest.UsageError(f"--gt-artifacts={place} lies among the goldens: give a folder of its own")


def save(item: pytest.Item, name: str, text: str) -> Path | None:
    """Keep a text in the test's folder; returns its path, or None without ``--gt-artifacts``.

    Raises:
        store.GoldenFileError: it could not be written.
    """
    top, place = folder(item.config), _place_of(item)
    if top is None or place is None:
        return None
    path = place / safe(name, fold_case=False)
    store.write(path, top, text)
    return path


def folder_of(item: pytest.Item) -> Path | None:
    """The test's folder, made for it to write to; None without ``--gt-artifacts``."""
    place = _place_of(item)
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    return place


def _place_of(item: pytest.Item) -> Path | None:
    top = folder(item.config)
    if top is None:
        return None
    place = top.joinpath(*stem_of_test(id_of(item)).parts[1:])
    rank = getattr(item.config, "workerinput", {}).get("gt_rank")
    return place if rank is None else place / f"rank{rank}"


def remove_empty_folders(top: Path) -> None:
    """Remove the folders that tests have asked for and not used; at the end, by one process."""
    for place, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(place)


def shown(path: Path) -> str:
    """A path as a person here would type it."""
    here = os.path.relpath(path)
    return str(path) if here.startswith(os.pardir) else here
