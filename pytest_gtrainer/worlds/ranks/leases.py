"""Leases: which devices the ranks of this pytest process may use while others want them too.

Terms: a *slot* is the right to run one rank, on a GPU or on a CPU; a *lease* is some of the
slots, all or nothing, held through file locks that the operating system frees when their
holder dies. Who waits stands in line by a locked file of its own; the line is ordered by
size, larger worlds first, then by arrival, so that a stream of small worlds cannot starve
a large one, and only the first in line may take slots.

Processes that share a folder share the slots in it: the xdist workers of one run for CPU
slots, every run on the machine for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from pytest_gtrainer.worlds.ranks import progress
from pytest_gtrainer.worlds.ranks.progress import Tell

POLL_SECONDS = 0.02
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
    """The slots that all processes with the same ``folder`` share.

    Args:
        folder: where the lock files lie; made if it is missing.
        names: one per slot, the same in every process; any text.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._folder = folder
        self._line = folder / "line"
        self._line.mkdir(parents=True, exist_ok=True)
        self._door = _lock(folder / "door")

    def acquire(self, count: int, limit: float, holder: str = "", tell: Tell | None = None) -> Lease:
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
        next_line = start + progress.EVERY_SECONDS
        with self._standing_in_line(count) as ticket:
            while True:
                lease = self._take(count, holder) if self._first_in_line() == ticket else None
                if lease is not None:
                    return lease
                now = time.monotonic()
                if now > start + limit:
                    advice = "end their holders, or wait longer with --gt-lease-timeout"
                    raise LeaseError(f"{self._waiting('waited', count, limit)}; {advice}")
                if tell is not None and now > next_line:
                    tell(f"{holder} {self._waiting('has waited', count, now - start)}")
                    next_line = now + progress.EVERY_SECONDS
                time.sleep(POLL_SECONDS)

    def wanted(self) -> bool:
        """Whether anybody stands in line."""
        return self._first_in_line() is not None

    # --- the line -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _standing_in_line(self, count: int) -> Iterator[str]:
        """Hold a locked file whose name sorts by size, larger first, then by arrival."""
        ticket = f"{10**6 - count:07d}-{time.time_ns()}-{os.getpid()}"
        lock = _lock(self._line / ticket)
        with self._door:  # nobody may see the file before it is locked
            lock.acquire(timeout=0)
        try:
            yield ticket
        finally:
            with self._door:
                (self._line / ticket).unlink(missing_ok=True)
                lock.release()

    def _first_in_line(self) -> str | None:
        """The ticket that is next; those of processes that died are cleared away."""
        with self._door:
            for ticket in sorted(path.name for path in self._line.iterdir()):
                if _is_held(self._line / ticket):
                    return ticket
                (self._line / ticket).unlink(missing_ok=True)
        return None

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
                self._sign(taken, holder)
                return Lease(tuple(taken), list(taken.values()))
        Lease((), list(taken.values())).release()
        return None

    def _path(self, name: str) -> Path:
        return self._folder / ("slot-" + "".join(c if c.isalnum() or c in _SAFE else "_" for c in name))

    def _sign(self, names: Iterable[str], holder: str) -> None:
        for name in names:
            self._path(name).write_text(f"process {os.getpid()} ({holder})" if holder else f"process {os.getpid()}")

    def _waiting(self, verb: str, count: int, seconds: float) -> str:
        held = [name for name in self.names if _is_held(self._path(name))]
        holders = "; ".join(f"{name} by {self._path(name).read_text()}" for name in held)
        return (
            f"{verb} {seconds:.3g} s for {count} of {len(self.names)} slots ({', '.join(self.names)}), held are: "
            f"{holders or 'none, but larger worlds stand in line'}"
        )


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
