"""What surrounds a run: the installed torch, which is not imported here; environment variables; a user's own folders.

Processes that outlive the block in which a variable is set, as ranks do, must not start with it.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

FIRST, LAST = (2, 13), (2, 15)
"""The oldest and the newest minor version of torch that is supported: its private parts were read in all between."""

_MINOR = re.compile(r"(\d+)\.(\d+)(?![0-9])")
_outside: dict[str, str | None] = {}


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable and put it back; blocks may nest."""
    before, outermost = os.environ.get(name), name not in _outside
    _outside.setdefault(name, before)
    os.environ[name] = value
    try:
        yield
    finally:
        if outermost:
            del _outside[name]
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})


def lasting_environment() -> dict[str, str]:
    """The environment as it is outside of all blocks."""
    return {name: value for name, value in {**os.environ, **_outside}.items() if value is not None}


def private_folder(folder: Path) -> Path:
    """A folder that no other user enters, made where it is missing; PermissionError if it is another's, or none."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        whose = (
            f"belongs to user {status.st_uid}" if status.st_uid != os.getuid() else "is no folder"
        )
        raise PermissionError(
            f"{folder}, where files of this user's runs would lie, {whose}: remove it"
        )
    folder.chmod(0o700)
    return folder


def minor_version(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version of torch; None for a text that begins with none.

    >>> minor_version("2.15.0.dev20261101+cu132"), minor_version("2.9"), minor_version("nightly")
    ((2, 15), (2, 9), None)
    """
    found = _MINOR.match(version)
    return (int(found[1]), int(found[2])) if found else None


def installed_minor() -> tuple[int, int] | None:
    """The minor version of the torch that is installed; None if its version does not begin with one."""
    return minor_version(metadata.version("torch"))


def complaint(version: str | None = None) -> str | None:
    """What to tell a user of another torch; None for a supported one."""
    found = version if version is not None else metadata.version("torch")
    minor = minor_version(found)
    if minor is not None and FIRST <= minor <= LAST:
        return None
    first, last = (".".join(map(str, bound)) for bound in (FIRST, LAST))
    return (
        f"torch {found} is outside of the supported range, {first} to {last}: graph text, goldens and digests may "
        "work; tracing, passes and ranks may not. `python -m pytest_gtrainer doctor` says which"
    )
