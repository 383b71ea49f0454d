"""Leases: which devices the ranks of this pytest process may use while others want them too.

Terms: a *slot* is the right to run one rank, on a GPU or on a CPU; a *lease* is some of the
slots, all or nothing, held through file locks that the operating system frees when their
holder dies. Who waits stands in line by a locked file of its own, the *ticket*; the line is
ordered by size, larger worlds first, then by arrival, so that a stream of small worlds cannot
starve a large one. Slots may be taken by who has nobody before it that wants one of the same.

Processes that share a folder share the slots in it: the xdist workers of one run for CPU
slots, every run of a user on the machine for GPUs, whichever of them each may see.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

POLL_SECONDS = 0.02
TELL_EVERY = 60.0
_SAFE = "-_."


class LeaseError(Exception):
    """The slots were not free in time; the message says who holds them."""


@dataclass(slots=True)
class Lease:
    """Slots held by this process.

    Attributes:
        slots: their names, in the order of ``Slots.names``.
    """

    slots: tuple[str, ...]
    _locks: list[FileLock]

    def release(self) -> None:
        """Give the slots back; a second call does nothing."""
        while self._locks:
            self._locks.pop().release()


class Slots:
    """The slots that processes with the same ``folder`` share, as far as they have the same names.

    Args:
        folder: where the lock files lie; made if it is missing.
        names: one per slot; any text. Other processes may know others.

    Raises:
        LeaseError: the folder is another user's.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.lstat().st_uid
        if owner != os.getuid():
            raise LeaseError(
                f"{folder}, where this user's leases would lie, belongs to user {owner}: remove it, or set TMPDIR to "
                "another folder, the same for all runs"
            )
        self._line = folder / "line"
        self._line.mkdir(exist_ok=True)
        self._digest = hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:16]

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
        with self._standing_in_line(count) as ticket:
            while True:
                before = self._first_in_line(ticket)
                lease = self._take(count, holder) if before is None else None
                if lease is not None:
                    return lease
                now = time.monotonic()
                if now > start + limit:
                    advice = "end their holders, or wait longer with --gt-lease-timeout"
                    raise LeaseError(f"{self._waiting('waited', count, limit, before)}; {advice}")
                if now > next_line:
                    tell(f"{holder} {self._waiting('has waited', count, now - start, before)}")
                    next_line = now + TELL_EVERY
                time.sleep(POLL_SECONDS)

    def wanted(self) -> bool:
        """Whether anybody stands in line for one of these slots."""
        return self._first_in_line() is not None

    # --- the line -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _standing_in_line(self, count: int) -> Iterator[str]:
        """Hold a locked file whose name sorts by size, larger first, then by arrival."""
        ticket = f"{10**6 - count:07d}-{time.time_ns()}-{os.getpid()}-{self._digest}"
        lock = _lock(self._line / ticket)
        with self._door():  # nobody may see the file before it is locked
            self._names_of(ticket).write_text("\n".join(self.names))
            lock.acquire(timeout=0)
        try:
            yield ticket
        finally:
            with self._door():
                (self._line / ticket).unlink(missing_ok=True)
                lock.release()

    def _first_in_line(self, before: str | None = None) -> str | None:
        """The first ticket of somebody who wants one of these slots too: of all, or of those before that one.

        Tickets of processes that died are cleared away.
        """
        with self._door():
            for ticket in sorted(path.name for path in self._line.iterdir()):
                if ticket == before:
                    return None
                if not _is_held(self._line / ticket):
                    (self._line / ticket).unlink(missing_ok=True)
                elif not set(self._names_of(ticket).read_text().split("\n")).isdisjoint(self.names):
                    return ticket
        return None

    def _names_of(self, ticket: str) -> Path:
        """The slots that the owner of a ticket knows."""
        return self._folder / f"names-{ticket.rpartition('-')[2]}"

    def _door(self) -> FileLock:
        """Held by who reads or changes the line. A new lock each time: one lets in every thread that shares it."""
        return _lock(self._folder / "door")

    # --- the slots ------------------------------------------------------------------------

    def _take(self, count: int, holder: str) -> Lease | None:
        """``count`` free slots, or none at all."""
        taken: dict[str, FileLock] = {}
        for name in self.names:
            lock = _lock(self._path(name))
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=0)
                taken[name] = lock
            if len(taken) == count:
                for held in taken:  # said in files beside the locks: taking a lock may empty its file
                    text = f"process {os.getpid()} ({holder})" if holder else f"process {os.getpid()}"
                    self._path(held, "holder").write_text(text)
                return Lease(tuple(taken), list(taken.values()))
        Lease((), list(taken.values())).release()
        return None

    def _path(self, name: str, kind: str = "slot") -> Path:
        return self._folder / (f"{kind}-" + "".join(c if c.isalnum() or c in _SAFE else "_" for c in name))

    def _waiting(self, verb: str, count: int, seconds: float, before: str | None) -> str:
        holders = {}
        for name in self.names:
            if _is_held(self._path(name)):
                holders[name] = "a process that has just taken it"
                with contextlib.suppress(OSError):
                    holders[name] = self._path(name, "holder").read_text()
        told = "; ".join(f"{name} by {holder}" for name, holder in holders.items()) or "none"
        text = f"{verb} {seconds:.3g} s for {count} of {len(self.names)} slots ({', '.join(self.names)}), held are: "
        if before is None:
            return text + told
        size, _, pid, _ = before.split("-")
        return f"{text}{told}; before it in line: process {pid} for {10**6 - int(size)}"


def _is_held(path: Path) -> bool:
    lock = _lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def _lock(path: Path) -> FileLock:
    """A lock that any thread of this process may release."""
    return FileLock(path, thread_local=False)
