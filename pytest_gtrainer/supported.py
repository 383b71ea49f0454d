"""Which versions of torch this package was made for, said in one place and in one line; torch is not imported here."""

from __future__ import annotations

import re
from importlib import metadata

FIRST, LAST = (2, 13), (2, 15)
"""The oldest and the newest minor version. Private parts of torch are used, and were read in all versions between."""

_MINOR = re.compile(r"(\d+)\.(\d+)(?![0-9])")


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
    """What to tell a user of another torch; None for a supported one.

    >>> complaint("2.13.1+cpu"), complaint("2.15.0.dev20261101")
    (None, None)
    >>> complaint("2.12.1")
    'torch 2.12.1 is outside of the supported range, 2.13 to 2.15: graph text, goldens and digests may work; tracing, \
passes and ranks may not. `python -m pytest_gtrainer doctor` says which'
    """
    found = version if version is not None else metadata.version("torch")
    minor = minor_version(found)
    if minor is not None and FIRST <= minor <= LAST:
        return None
    first, last = (".".join(map(str, bound)) for bound in (FIRST, LAST))
    return (
        f"torch {found} is outside of the supported range, {first} to {last}: graph text, goldens and digests may "
        "work; tracing, passes and ranks may not. `python -m pytest_gtrainer doctor` says which"
    )
