"""The surroundings of a run: the version of torch, environment variables, folders of the user, and
Python's garbage collector.

Imports no torch.
"""

import gc
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

FIRST, LAST = (2, 13), (2, 15)
"""The oldest and newest supported minor version of torch; private names exist in all between."""

_MINOR = re.compile(r"(\d+)\.(\d+)(?![0-9])")
_outside: dict[str, str | None] = {}  # values before the outermost block that sets a variable


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable in the block and put it back; blocks may nest."""
    before = os.environ.get(name)
    is_outermost = name not in _outside
    _outside.setdefault(name, before)
    os.environ[name] = value
    try:
        yield
    finally:
        if is_outermost:
            del _outside[name]
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect no garbage inside, where many objects are made that stay.

    The nodes of a large graph, and what is noted of each, are such objects: a collection visits all
    of them and frees nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def lasting_environment() -> dict[str, str]:
    """Return the environment outside of all blocks.

    Processes that outlive a block, as ranks do, must not start with its variables.
    """
    return {name: value for name, value in {**os.environ, **_outside}.items() if value is not None}


def private_folder(folder: Path) -> Path:
    """Make a folder that no other user enters, if it is missing.

    Raises:
        PermissionError: the path belongs to another user, or is not a folder.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    # lstat, so that a link is refused, whoever owns its target.
    status = folder.lstat()
    is_own = status.st_uid == os.getuid()
    if not is_own or not stat.S_ISDIR(status.st_mode):
        wrong = "is no folder" if is_own else f"belongs to user {status.st_uid}"
        raise PermissionError(
            f"{folder}, where files of this user's runs would lie, {wrong}: remove it"
        )

    folder.chmod(0o700)
    return folder


def minor_version(version: str) -> tuple[int, int] | None:
    """Return major and minor number of a version of torch; None if the text begins with none.

    >>> minor_version("2.15.0.dev20261101+cu132"), minor_version("2.9"), minor_version("nightly")
    ((2, 15), (2, 9), None)
    """
    found = _MINOR.match(version)
    if found is None:
        return None
    return int(found[1]), int(found[2])


def installed_minor() -> tuple[int, int] | None:
    """Return the minor version of the installed torch; None if its version begins with none."""
    return minor_version(metadata.version("torch"))


def complaint(version: str | None = None) -> str | None:
    """Return a warning for a version of torch that is not supported; None for one that is."""
    found = version or metadata.version("torch")
    minor = minor_version(found)
    if minor is not None and FIRST <= minor <= LAST:
        return None
    first, last = (".".join(map(str, bound)) for bound in (FIRST, LAST))
    return (
        f"torch {found} is outside of the supported range, {first} to {last}: graph text, goldens "
        "and digests may work; tracing, passes and ranks may not. `python -m pytest_gtrainer "
        "doctor` says which"
    )
