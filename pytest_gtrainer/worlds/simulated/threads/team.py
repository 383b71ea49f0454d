"""The team: threads as ranks, of which exactly one runs at a time.

A rank runs until it has to *wait* for an event (another rank's part of a collective). Then it hands
the *turn* to the next rank that can run, in the order in which ranks became able to. So a run
is the same every time, nothing of torch is ever entered by two ranks at once, state that a process has
only once can be swapped when the turn goes over, and ranks that wait for each other in a circle
are noticed at once: nobody is left who could run.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from pytest_gtrainer.worlds.simulated.threads.faults import NotOnThreads, is_ours


class Released(BaseException):
    """Ends a rank whose team has failed elsewhere; no failure of its own, and not to be caught."""


class Event:
    """Something ranks wait for; it happens once."""

    __slots__ = ("happened", "waiting")

    def __init__(self) -> None:
        self.happened = False
        self.waiting: list[int] = []

    def __str__(self) -> str:
        """What a rank that waits for it is doing, as "waiting in all_reduce"."""
        return "waiting"


class RankStates(Protocol):
    """State that the process has once and every rank for itself."""

    def save(self, rank: int) -> None: ...

    def load(self, rank: int) -> None: ...


class Team:
    """The turns of ``size`` ranks.

    Args:
        states: what is swapped when the turn goes from one rank to another.
        stalled: makes the error for "no rank can run" from what each rank waits for.
    """

    def __init__(self, size: int, states: RankStates, stalled: Callable[[Team], BaseException]) -> None:
        self.size = size
        self.all_ended = threading.Event()
        self.waiting: dict[int, Event] = {}
        self.ended: set[int] = set()
        self.abandoned: set[int] = set()
        self.threads: dict[int, int] = {}  # rank to identifier of its thread
        self.failed = False
        self.last_turn = time.monotonic()
        self._error: tuple[int | None, BaseException] | None = None
        self._states, self._stalled = states, stalled
        self._lock = threading.RLock()
        self._ready = deque(range(size))
        self._running: int | None = None
        self._turns = [threading.Semaphore(0) for _ in range(size)]

    @property
    def running(self) -> int | None:
        """The rank that has the turn, since ``last_turn``."""
        return self._running

    def start(self) -> None:
        """Give the turn to the first rank; every rank's thread has to ``join`` first or later."""
        self._hand_on()

    def join(self, rank: int) -> None:
        """The calling thread is ``rank`` from now on; returns at its first turn."""
        with self._lock:
            self.threads[rank] = threading.get_ident()
            if rank in self.ended:
                raise Released
        self._await_turn(rank)

    def wait(self, rank: int, event: Event) -> None:
        """Return when ``event`` has happened, and it is the rank's turn.

        Raises:
            Released: the team has failed.
        """
        with self._lock:
            self.check(rank)
            if event.happened:
                return
            event.waiting.append(rank)
            self.waiting[rank] = event
            self._states.save(rank)
            self._hand_on()
        self._await_turn(rank)

    def give_way(self, rank: int) -> None:
        """Let every other rank that can run have its turn."""
        with self._lock:
            self.check(rank)
            self._ready.append(rank)
            self._states.save(rank)
            self._hand_on()
        self._await_turn(rank)

    def announce(self, event: Event) -> None:
        """The event has happened: those that wait for it can run."""
        with self._lock:
            event.happened = True
            for rank in event.waiting:
                del self.waiting[rank]
                self._ready.append(rank)
            event.waiting.clear()

    def end(self, rank: int) -> None:
        """The rank's thread has nothing more to do."""
        with self._lock:
            if rank == self._running:  # not one that was abandoned, nor one that comes a second time
                self.ended.add(rank)
                self._hand_on()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Keep the first error, and make every waiting rank able to run, to be released."""
        with self._lock:
            if not self.failed:
                self.failed, self._error = True, (rank, error)
            self._ready.extend(sorted(self.waiting))
            for event in self.waiting.values():
                event.waiting.clear()
            self.waiting.clear()

    def take_error(self) -> tuple[int | None, BaseException] | None:
        """The first error and the rank that raised it.

        Not kept: its traceback holds tensors, whose hooks hold the groups of FSDP, which hold the team; a
        circle through C++, which the garbage collector does not see.
        """
        error, self._error = self._error, None
        return error

    def interrupt(self, rank: int) -> bool:
        """Make the rank's thread raise Released at its next line of Python, if that is one of its own code."""
        with self._lock:
            frame = sys._current_frames().get(self.threads.get(rank, 0))
            if rank != self._running or frame is None or is_ours(frame):
                return False
            identifier = ctypes.c_ulong(self.threads[rank])
            return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, ctypes.py_object(Released)))

    def abandon(self, rank: int) -> None:
        """Count a rank as ended that has no thread, or does not come back with the turn."""
        with self._lock:
            self.abandoned.add(rank)
            self.ended.add(rank)
            if rank == self._running:
                self._hand_on()
            elif rank in self._ready:
                self._ready.remove(rank)

    def _hand_on(self) -> None:
        self._running = None
        if not self._ready and self.waiting:
            self.fail(None, self._stalled(self))
        self._running = self._ready.popleft() if self._ready else None
        self.last_turn = time.monotonic()
        if self._running is None:
            self.all_ended.set()
        else:
            self._turns[self._running].release()

    def _await_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        self._states.load(rank)
        self.check(rank)

    def check(self, rank: int) -> None:
        """What has to hold whenever code of a rank turns to its team.

        Raises:
            Released: the team has failed.
            NotOnThreads: the calling thread is not the rank's.
        """
        if threading.get_ident() != self.threads[rank]:
            raise NotOnThreads(f"a thread that rank {rank} started called a collective: let the rank itself call it")
        if self.failed:
            raise Released
