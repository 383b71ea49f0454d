"""Run ranks as threads, of which exactly one runs at a time, each with its own state.

A rank runs until it has to *wait* for another's part of a collective. Then it hands the *turn* to
the next rank that can run, in the order in which ranks became able to. So every run is the same, no
two ranks are in torch at once, and ranks that wait for each other in a circle are noticed at once:
no rank is left that could run.

Swapped with the turn: random numbers, the default dtype, RANK in the environment. Shared: torch's
other switches (deterministic algorithms, backend flags), the working directory, modules and their
globals.
"""

import ctypes
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType

import torch

from pytest_gtrainer._torch.random_states import GeneratorStates
from pytest_gtrainer.facts import FailedCheck
from pytest_gtrainer.worlds import ranks_by, ranks_text

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_MOST_STACKS = 6
_MOST_FRAMES = 12


class Standstill(FailedCheck):
    """Every rank that has not ended waits for another one."""


class TimeLimit(FailedCheck):
    """A rank ran for too long without coming to a collective or to its end."""


class NotOnThreads(RuntimeError):
    """Something that ranks on threads must not do, tracing and compiling above all."""


class Released(BaseException):
    """Ends a rank whose team has failed elsewhere; no failure of its own, and not to be caught."""


class Awaited:
    """An event that ranks wait for; it happens once.

    Its ``str`` says what they are doing: "waiting in all_reduce".
    """

    def __init__(self) -> None:
        self.happened = False
        self.waiting: list[int] = []


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Random numbers and default dtype of a rank."""

    generators: GeneratorStates
    default_dtype: torch.dtype

    @classmethod
    def now(cls) -> "ProcessState":
        # A simulated world is on the CPU. To read CUDA's generators would initialise CUDA, after
        # which no rank can be forked.
        return cls(GeneratorStates.now(cuda=False), torch.get_default_dtype())

    def put_back(self) -> None:
        self.generators.put_back()
        torch.set_default_dtype(self.default_dtype)


@contextmanager
def state_kept() -> Iterator[None]:
    """Put the caller's random numbers and default dtype back at the end."""
    state = ProcessState.now()
    try:
        yield
    finally:
        state.put_back()


def is_ours(frame: FrameType) -> bool:
    """Return whether a thread is in a line of this folder, or in a semaphore that one takes."""
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_HERE)


class ThreadTeam:
    """The turns of ``size`` ranks.

    Every rank's thread has to ``join``, before or after the first ``hand_on``.

    Attributes:
        waiting: ranks that wait, and the event they wait for.
        ended: ranks that run no more; the ``abandoned`` among them may still have a thread.
        threads: by rank, the identifier of its thread.
        running: the rank that has the turn, since ``last_turn``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.all_ended = threading.Event()
        self.waiting: dict[int, Awaited] = {}
        self.ended: set[int] = set()
        self.abandoned: set[int] = set()
        self.threads: dict[int, int] = {}
        self.failed = False
        self.running: int | None = None
        self.last_turn = time.monotonic()
        self._error: tuple[int | None, BaseException] | None = None
        # Of every rank without the turn. All start with the state of the caller.
        self._states = [ProcessState.now()] * size
        self._lock = threading.RLock()
        self._ready = deque(range(size))
        self._turns = [threading.Semaphore(0) for _ in range(size)]

    def join(self, rank: int) -> None:
        """Make the calling thread ``rank``; return at its first turn."""
        with self._lock:
            self.threads[rank] = threading.get_ident()
            if rank in self.ended:
                raise Released
        self._await_turn(rank)

    def wait(self, rank: int, event: Awaited) -> None:
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
            self._states[rank] = ProcessState.now()
            self.hand_on()

        self._await_turn(rank)

    def give_way(self, rank: int) -> None:
        """Let every other rank that can run have its turn."""
        with self._lock:
            self.check(rank)
            self._ready.append(rank)
            self._states[rank] = ProcessState.now()
            self.hand_on()
        self._await_turn(rank)

    def announce(self, event: Awaited) -> None:
        """Note that the event has happened: the ranks that wait for it can run."""
        with self._lock:
            event.happened = True
            for rank in event.waiting:
                del self.waiting[rank]
                self._ready.append(rank)
            event.waiting.clear()

    def end(self, rank: int) -> None:
        """Note that the rank's thread has nothing more to do."""
        with self._lock:
            # A rank that was abandoned, or that comes here a second time, has no turn to hand on:
            # another rank has it.
            if rank == self.running:
                self.ended.add(rank)
                self.hand_on()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Keep the first error, and make every waiting rank able to run, to be released."""
        with self._lock:
            if not self.failed:
                self.failed, self._error = True, (rank, error)
            # Python cannot end a thread from outside, so each gets one more turn, in which
            # ``check`` raises Released.
            self._ready.extend(sorted(self.waiting))
            for event in self.waiting.values():
                event.waiting.clear()
            self.waiting.clear()

    def take_error(self) -> tuple[int | None, BaseException] | None:
        """Return the first error and the rank that raised it."""
        # Not kept: its traceback holds tensors, whose hooks hold the groups of FSDP, which hold the
        # team. This circle goes through C++, where the garbage collector does not see it.
        error, self._error = self._error, None
        return error

    def interrupt(self, rank: int) -> bool:
        """Make the rank's thread raise Released at its next line of Python.

        Returns:
            False if it is in a line of ours, which would leave a lock or a queue half done.
        """
        with self._lock:
            frame = sys._current_frames().get(self.threads.get(rank, 0))
            if rank != self.running or frame is None or is_ours(frame):
                return False
            # The only way that CPython has to raise in another thread. It takes effect between two
            # bytecodes, so a rank that is inside a kernel goes on to the end of it.
            raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
            identifier = ctypes.c_ulong(self.threads[rank])
            return bool(raise_in_thread(identifier, ctypes.py_object(Released)))

    def abandon(self, rank: int) -> None:
        """Count a rank as ended that has no thread, or does not come back with the turn."""
        with self._lock:
            self.abandoned.add(rank)
            self.ended.add(rank)
            if rank == self.running:
                self.hand_on()
            elif rank in self._ready:
                # Or a turn would go to a thread that does not exist, and none would follow.
                self._ready.remove(rank)

    def hand_on(self) -> None:
        """Give the turn to the next rank that can run."""
        self.running = None
        if not self._ready and self.waiting:
            self.fail(None, Standstill(f"no rank can go on: {self.situation()}"))

        self.last_turn = time.monotonic()
        if self._ready:
            self.running = self._ready.popleft()
            self._turns[self.running].release()
        else:
            self.all_ended.set()

    def _await_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        self._states[rank].put_back()
        os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}")
        os.environ.update(WORLD_SIZE=f"{self.size}", LOCAL_WORLD_SIZE=f"{self.size}")
        self.check(rank)

    def check(self, rank: int) -> None:
        """Check that the calling thread is the rank's, and may run.

        Raises:
            NotOnThreads: it is another thread.
            Released: the team has failed.
        """
        if threading.get_ident() != self.threads[rank]:
            raise NotOnThreads(
                f"a thread that rank {rank} started called a collective: "
                "let the rank itself call it"
            )
        if self.failed:
            raise Released

    def situation(self) -> str:
        """Describe what each rank does, with the stacks."""
        frames = self._frames()
        doing = dict.fromkeys(range(self.size), "waiting for its turn")
        for rank, event in self.waiting.items():
            doing[rank] = f"{event}{_whereabouts(frames.get(rank))}"
        if self.running is not None:
            doing[self.running] = f"running{_whereabouts(frames.get(self.running))}"
        doing |= dict.fromkeys(self.ended, "ended")

        by_text = ranks_by(sorted(doing.items()))
        parts = [f"{ranks_text(ranks)}: {text}" for text, ranks in by_text.items()]
        return "; ".join(parts) + f"\n\n{self.stacks()}"

    def stacks(self) -> str:
        """Return the Python stacks of the ranks that have not ended, equal ones once."""
        stacks = []
        for rank, frame in self._frames().items():
            if rank not in self.ended:
                stacks.append((rank, _stack(frame)))
        parts = []
        for text, ranks in ranks_by(stacks).items():
            if text:
                parts.append(f"--- {ranks_text(ranks)} ---\n{text}")
        # Hundreds of ranks may wait in as many places.
        if len(parts) > _MOST_STACKS:
            parts[_MOST_STACKS:] = [f"... and {len(parts) - _MOST_STACKS} more"]
        return "\n".join(parts)

    def _frames(self) -> dict[int, FrameType]:
        current = sys._current_frames()
        frames = {}
        for rank, identifier in sorted(self.threads.items()):
            if identifier in current:
                frames[rank] = current[identifier]
        return frames


def _stack(frame: FrameType) -> str:
    """Return the frames of the function that the rank runs, outermost call first.

    Of torch's only the innermost is shown, which is the collective.
    """
    entries = list(traceback.extract_stack(frame))
    # A thread begins in ``threading`` and in this folder, which then calls the user's function. A
    # collective comes back to this folder.
    while entries and entries[0].filename.startswith((_HERE, threading.__file__)):
        entries.pop(0)
    inner = list(takewhile(lambda entry: not entry.filename.startswith(_HERE), entries))

    shown = [entry for entry in inner[:-1] if not entry.filename.startswith(_TORCH)]
    shown += inner[-1:]
    return "".join(traceback.format_list(shown[-_MOST_FRAMES:]))


def _whereabouts(frame: FrameType | None) -> str:
    """Return the innermost line of the rank's own code, to be added to a sentence."""
    if frame is None:  # its thread has not started
        return ""
    for each, line in traceback.walk_stack(frame):
        name = each.f_code.co_filename
        # "<": frozen modules and generated code.
        if not name.startswith((_TORCH, "<", _HERE, threading.__file__)):
            return f", at {Path(name).name}:{line} in {each.f_code.co_name}"
    return ""
