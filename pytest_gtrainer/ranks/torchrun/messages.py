"""What the processes of a run tell each other beside the commands of ``ranks.wire``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Begin:
    """Become a rank: start a pytest session like rank 0's, on that kind of device.

    ``basetemp`` is rank 0's folder for temporary files, on the node ``host``.
    """

    device: str
    backend: str
    host: str
    basetemp: str


@dataclass(frozen=True, slots=True)
class Began:
    """The session is up; ``error`` is the traceback if it could not be."""

    error: str | None


@dataclass(frozen=True, slots=True)
class TellStacks:
    """Answer at once, from a thread, with the Python stacks: ``number`` goes with the answer."""

    number: int


@dataclass(frozen=True, slots=True)
class Stacks:
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Make the running test raise, whatever it does."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """The run is over; exit with that status."""

    status: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A process has ended; ``status`` is negative for a signal, None if nobody could see it.

    Told to rank 0; if it is rank 0 that has ended, to all others.
    """

    rank: int
    status: int | None


@dataclass(frozen=True, slots=True)
class From:
    """An envelope: who says it."""

    rank: int
    message: object
