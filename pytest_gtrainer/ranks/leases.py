"""Leases: which devices the ranks of this pytest process may use while others want them too.

Terms: a *slot* is the right to run one rank, on a GPU or on a CPU; a *lease* is some of the
slots, all or nothing. Who wants or holds slots has a *place*: a file that says so, locked until its owner lets go of it
or dies. Places are ordered by size, larger worlds first, then by arrival, so that a stream of small worlds cannot
starve a large one. Slots may be taken by who has nobody before it that waits for one of the same.

Processes that share a folder share the slots in it: the xdist workers of one run for CPU
slots, every run of a user on the machine for GPUs, whichever of them each may see.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pytest_gtrainer.environment import private_folder

POLL_SECONDS = 0.02
TELL_EVERY = 60.0


class LeaseError(Exception):
    """The slots were not free in time; the message says who holds them."""


@dataclass(frozen=True, slots=True)
class Place:
    """What somebody waits for, or holds.

    Attributes:
        holder: process and purpose, in words.
        count: how many of ``names`` it wants; ``slots`` are those that it holds, none while it waits.
    """

    pid: int
    holder: str
    count: int
    names: tuple[str, ...]
    slots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """Slots held by this process, in the order of ``Slots.names``, until ``release``, which may be called twice."""

    slots: tuple[str, ...]
    release: Callable[[], None]


class Slots:
    """The slots that processes with the same ``folder`` share, as far as they have the same names.

    Args:
        folder: where the files of places lie; made if it is missing.
        names: one per slot; any text. Other processes may know others.

    Raises:
        LeaseError: the folder is another user's, or a link.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._folder, self._line = folder, folder / "line"
        try:
            private_folder(folder)
        except PermissionError as error:
            raise LeaseError(f"{error}, or set TMPDIR to another folder, the same for all runs") from None
        self._line.mkdir(exist_ok=True)

    def acquire(
        self, count: int, limit: float, holder: str = "", tell: Callable[[str], None] = lambda text: None
    ) -> Lease:
        """Wait for ``count`` slots, at most ``limit`` seconds.

        Args:
            holder: what the slots are for, told to those who wait in vain.
            tell: gets a line every so often while it waits.

        Raises:
            LeaseError: not free in time.
            ValueError: more slots than there are.
        """
        if count > len(self.names):
            raise ValueError(f"{count} slots were asked for, there are {len(self.names)}")
        start = time.monotonic()
        next_line = start + TELL_EVERY
        who = f"process {os.getpid()} ({holder})" if holder else f"process {os.getpid()}"
        with contextlib.ExitStack() as stack:
            own, file = stack.enter_context(self._place(Place(os.getpid(), who, count, self.names)))
            while True:
                with self._door():
                    places = self._places()
                    slots = self._free(own, count, places)
                    if slots:
                        _write(file, Place(os.getpid(), who, count, self.names, slots))
                        return Lease(slots, stack.pop_all().close)
                now = time.monotonic()
                if now > start + limit:
                    advice = "end their holders, or wait longer with --gt-lease-timeout"
                    raise LeaseError(f"waited {limit:.3g} s for {self._waiting(own, count, places)}; {advice}")
                if now > next_line:
                    tell(f"{holder} has waited {now - start:.3g} s for {self._waiting(own, count, places)}")
                    next_line = now + TELL_EVERY
                time.sleep(POLL_SECONDS)

    def wanted(self) -> bool:
        """Whether anybody waits for one of these slots."""
        with self._door():
            return bool(self._waiters(self._places()))

    @contextlib.contextmanager
    def _place(self, place: Place) -> Iterator[tuple[str, TextIO]]:
        """Have a place: the name of its file, which sorts by size, larger first, then by arrival, and the file."""
        name = f"{10**6 - place.count:07d}-{time.time_ns()}-{place.pid}-{threading.get_ident()}"
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
        """Held by who reads or changes the line."""
        with open(self._folder / "door", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _places(self) -> dict[str, Place]:
        """All places by name, in the order of the line; those of processes that died are cleared away."""
        found = {}
        for path in sorted(self._line.iterdir()):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    pid, holder, count, names, slots = json.load(file)
                    found[path.name] = Place(pid, holder, count, tuple(names), tuple(slots))
        return found

    def _waiters(self, places: Mapping[str, Place]) -> dict[str, Place]:
        return {name: place for name, place in places.items() if not place.slots and {*place.names} & {*self.names}}

    def _free(self, own: str, count: int, places: Mapping[str, Place]) -> tuple[str, ...]:
        """``count`` slots for who is first in line, or none at all."""
        if next(iter(self._waiters(places))) != own:
            return ()
        taken = {slot for place in places.values() for slot in place.slots}
        free = [name for name in self.names if name not in taken]
        return tuple(free[:count]) if len(free) >= count else ()

    def _waiting(self, own: str, count: int, places: Mapping[str, Place]) -> str:
        holders = {slot: place.holder for place in places.values() for slot in place.slots}
        told = "; ".join(f"{name} by {holders[name]}" for name in self.names if name in holders) or "none"
        text = f"{count} of {len(self.names)} slots ({', '.join(self.names)}), held are: {told}"
        name, first = next(iter(self._waiters(places).items()))
        return text if name == own else f"{text}; before it in line: process {first.pid} for {first.count}"


def _write(file: TextIO, place: Place) -> None:
    file.seek(0)
    file.truncate()
    json.dump([getattr(place, field) for field in place.__slots__], file)
    file.flush()
