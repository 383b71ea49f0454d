"""Environment variables that are set for the length of a block, the environment without them; a user's own folders.

Processes that outlive the block, as ranks do, must not start with what was meant for one test.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def lasting_environment() -> dict[str, str]:
    """The environment as it is outside of all blocks.

    >>> with variable("GT_EXAMPLE", "1"), variable("GT_EXAMPLE", "2"):
    ...     "GT_EXAMPLE" in lasting_environment()
    False
    """
    changed = {name: value for name, value in _outside.items() if value is not None}
    return {**{name: value for name, value in os.environ.items() if name not in _outside}, **changed}


def private_folder(folder: Path) -> Path:
    """A folder that no other user enters, made where it is missing.

    Raises:
        PermissionError: what lies there is another user's, or no folder.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        whose = f"belongs to user {status.st_uid}" if status.st_uid != os.getuid() else "is no folder"
        raise PermissionError(f"{folder}, where files of this user's runs would lie, {whose}: remove it")
    folder.chmod(0o700)
    return folder
