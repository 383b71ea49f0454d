"""Leases: which devices the ranks of this pytest process may use while others want them too.

A *slot* is the right to run one rank, on a GPU or on a CPU. A *lease* is a number of slots, taken
all at once or not at all. A process that wants or holds slots has a *place* in the line: a file
that is locked until its owner releases it or dies.

Larger worlds stand before smaller ones: a stream of small worlds would keep a large one waiting for
ever. Worlds of one size stand in the order in which they came. Of the places that wait for some of
the same slots, only the first may take them.

Processes that share a folder share its slots: the xdist workers of a run for CPUs, every run of a
user for GPUs.
"""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from pytest_gtrainer.environment import private_folder

POLL_SECONDS = 0.02
LINE_EVERY = 60.0

WriteLine = Callable[[str], None]


class LeaseError(Exception):
    """The slots were not free in time; the message names their holders."""


class Place(NamedTuple):
    """One place in the line.

    Attributes:
        pid: the process.
        holder: the process and its test, in words.
        wanted: how many of the slots ``names`` it wants.
        slots: those that it holds; none while it waits.
    """

    pid: int
    holder: str
    wanted: int
    names: Sequence[str]
    slots: Sequence[str] = ()


class Lease(NamedTuple):
    """Slots that this process holds until ``release``, in the order of ``Slots.names``.

    ``release`` may be called twice.
    """

    slots: tuple[str, ...]
    release: Callable[[], None]


class Slots:
    """Named slots, shared by all processes that use the same ``folder``."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Raise LeaseError if the folder is another user's."""
        self.names = tuple(names)
        self._folder, self._line = folder, folder / "line"
        try:
            private_folder(folder)
        except PermissionError as error:
            raise LeaseError(
                f"{error}, or set TMPDIR to another folder, the same for all runs"
            ) from None
        self._line.mkdir(exist_ok=True)

    def acquire(
        self, count: int, limit: float, holder: str = "", write: WriteLine = lambda text: None
    ) -> Lease:
        """Wait for ``count`` slots, and say every minute who holds them.

        Raises:
            LeaseError: they were not free within ``limit`` seconds.
            ValueError: there are not as many.
        """
        if count > len(self.names):
            raise ValueError(f"{count} slots were asked for, there are {len(self.names)}")
        start = time.monotonic()
        next_line = start + LINE_EVERY
        name = f"process {os.getpid()}"
        if holder:
            name += f" ({holder})"
        place = Place(os.getpid(), name, count, self.names)
        with contextlib.ExitStack() as stack:
            own, file = stack.enter_context(self._place(place))
            while True:
                with self._door():
                    places = self._places()
                    slots = self._free(own, count, places)
                    if slots:
                        _write(file, place._replace(slots=slots))
                        # The place is kept: its end is the release of the lease.
                        return Lease(slots, stack.pop_all().close)
                now = time.monotonic()
                if now > start + limit:
                    advice = "end their holders, or wait longer with --gt-lease-timeout"
                    waiting = self._waiting(own, count, places)
                    raise LeaseError(f"waited {limit:.3g} s for {waiting}; {advice}")
                if now > next_line:
                    waiting = self._waiting(own, count, places)
                    write(f"{holder} has waited {now - start:.3g} s for {waiting}")
                    next_line = now + LINE_EVERY
                time.sleep(POLL_SECONDS)

    def wanted(self) -> bool:
        """Return whether anybody waits for one of these slots."""
        with self._door():
            return bool(self._waiters(self._places()))

    @contextlib.contextmanager
    def _place(self, place: Place) -> Iterator[tuple[str, TextIO]]:
        """Take a place in the line; yield the name of its file, and the file."""
        # Names sort by size, larger first, then by arrival.
        name = f"{10**6 - place.wanted:07d}-{time.time_ns()}-{place.pid}-{threading.get_ident()}"
        # Behind the door, since others take an unlocked file for one of a dead process.
        with self._door():
            file = open(self._line / name, "x")  # noqa: SIM115 - locked until it is closed
            fcntl.flock(file, fcntl.LOCK_EX)
            _write(file, place)
        try:
            yield name, file
        finally:
            with self._door(), file:
                (self._line / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _door(self) -> Iterator[None]:
        """Let no other process read or change the line inside."""
        with open(self._folder / "door", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _places(self) -> dict[str, Place]:
        """Return all places by name, in the order of the line.

        Remove those of processes that died.
        """
        found = {}
        for path in sorted(self._line.iterdir()):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    found[path.name] = Place(*json.load(file))
        return found

    def _waiters(self, places: Mapping[str, Place]) -> dict[str, Place]:
        """Return the places that wait for any of these slots."""
        waiters = {}
        for name, place in places.items():
            if not place.slots and set(place.names) & set(self.names):
                waiters[name] = place
        return waiters

    def _free(self, own: str, count: int, places: Mapping[str, Place]) -> tuple[str, ...]:
        """Return ``count`` slots if those are free and ``own`` is first in line, else none."""
        if next(iter(self._waiters(places))) != own:
            return ()
        holders = _holders(places)
        free = tuple(name for name in self.names if name not in holders)
        return free[:count] if len(free) >= count else ()

    def _waiting(self, own: str, count: int, places: Mapping[str, Place]) -> str:
        """Return what the place ``own`` waits for, in words."""
        holders = _holders(places)
        held = []
        for name in self.names:
            if name in holders:
                held.append(f"{name} by {holders[name]}")
        text = (
            f"{count} of {len(self.names)} slots ({', '.join(self.names)}), "
            f"held are: {'; '.join(held) or 'none'}"
        )
        name, first = next(iter(self._waiters(places).items()))
        if name != own:
            text += f"; before it in line: process {first.pid} for {first.wanted}"
        return text


def _holders(places: Mapping[str, Place]) -> dict[str, str]:
    """Return the holder of each slot that is held."""
    holders = {}
    for place in places.values():
        for slot in place.slots:
            holders[slot] = place.holder
    return holders


def _write(file: TextIO, place: Place) -> None:
    file.seek(0)
    file.truncate()
    json.dump(place, file)
    file.flush()
