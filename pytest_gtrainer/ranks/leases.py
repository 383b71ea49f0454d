"""Leases: which devices the ranks of this pytest process may use while others want them too.

A *slot* is the right to run one rank, on a GPU or on a CPU; a *lease* is some slots, all or
nothing. A process that wants or holds slots has a *place*: a file that says so, locked until its
owner lets go of it or dies. Places are ordered by size, larger worlds first, so that small ones
cannot starve a large one, then by arrival. The first in line of those that wait for one of the same
slots may take them.

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
    """The slots were not free in time; the message says who holds them."""


class Place(NamedTuple):
    """The ``holder``, in words, wants a number of the slots ``names``; it holds ``slots``, none
    while it waits.
    """

    pid: int
    holder: str
    wanted: int
    names: Sequence[str]
    slots: Sequence[str] = ()


class Lease(NamedTuple):
    """Slots held by this process, in the order of ``Slots.names``, until ``release``, which may be
    called twice.
    """

    slots: tuple[str, ...]
    release: Callable[[], None]


class Slots:
    """The slots of these names, which processes with the same ``folder`` share; LeaseError if it is
    another user's.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
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
        """Wait for ``count`` slots; LeaseError after ``limit`` seconds, ValueError if there are not
        as many.
        """
        if count > len(self.names):
            raise ValueError(f"{count} slots were asked for, there are {len(self.names)}")
        start = time.monotonic()
        next_line = start + LINE_EVERY
        who = f"process {os.getpid()} ({holder})" if holder else f"process {os.getpid()}"
        place = Place(os.getpid(), who, count, self.names)
        with contextlib.ExitStack() as stack:
            own, file = stack.enter_context(self._place(place))
            while True:
                with self._door():
                    places = self._places()
                    if slots := self._free(own, count, places):
                        _write(file, place._replace(slots=slots))
                        return Lease(slots, stack.pop_all().close)
                now = time.monotonic()
                if now > start + limit:
                    advice = "end their holders, or wait longer with --gt-lease-timeout"
                    raise LeaseError(
                        f"waited {limit:.3g} s for {self._waiting(own, count, places)}; {advice}"
                    )
                if now > next_line:
                    wanted = self._waiting(own, count, places)
                    write(f"{holder} has waited {now - start:.3g} s for {wanted}")
                    next_line = now + LINE_EVERY
                time.sleep(POLL_SECONDS)

    def wanted(self) -> bool:
        """Return whether anybody waits for one of these slots."""
        with self._door():
            return bool(self._waiters(self._places()))

    @contextlib.contextmanager
    def _place(self, place: Place) -> Iterator[tuple[str, TextIO]]:
        """Have a place: the name of its file, which sorts by size, larger first, then by arrival,
        and the file.
        """
        name = f"{10**6 - place.wanted:07d}-{time.time_ns()}-{place.pid}-{threading.get_ident()}"
        with self._door():  # nobody may see the file before it is locked
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
        """Held while a process reads or changes the line."""
        with open(self._folder / "door", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _places(self) -> dict[str, Place]:
        """All places by name, in the order of the line; those of processes that died are cleared
        away.
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
        return {
            name: place
            for name, place in places.items()
            if not place.slots and {*place.names} & {*self.names}
        }

    def _free(self, own: str, count: int, places: Mapping[str, Place]) -> tuple[str, ...]:
        """``count`` slots, if those are free and ``own`` is first in line."""
        taken = {slot for place in places.values() for slot in place.slots}
        free = tuple(name for name in self.names if name not in taken)
        return (
            free[:count] if next(iter(self._waiters(places))) == own and len(free) >= count else ()
        )

    def _waiting(self, own: str, count: int, places: Mapping[str, Place]) -> str:
        holders = {slot: place.holder for place in places.values() for slot in place.slots}
        held = (
            "; ".join(f"{name} by {holders[name]}" for name in self.names if name in holders)
            or "none"
        )
        text = f"{count} of {len(self.names)} slots ({', '.join(self.names)}), held are: {held}"
        name, first = next(iter(self._waiters(places).items()))
        return (
            text
            if name == own
            else f"{text}; before it in line: process {first.pid} for {first.wanted}"
        )


def _write(file: TextIO, place: Place) -> None:
    file.seek(0)
    file.truncate()
    json.dump(place, file)
    file.flush()
