"""One process of the run: its mailbox, its rank, its watch over the next process of its node."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer.devices import Launch
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.inside.rank import Rank, RankGroup, in_this_process
from pytest_gtrainer.ranks.inside.session import start_session
from pytest_gtrainer.ranks.team import in_words
from pytest_gtrainer.ranks.torchrun.mailbox import (
    DRIVER,
    Mailbox,
    Reader,
    connect,
    hold_line,
    mailbox_of,
    watch_neighbour,
)

SEEN_SECONDS = 0.5
# torchrun kills what has not ended 30 s after its SIGTERM.
HOLD_SECONDS = 15.0
_INTERRUPT = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGTERM


def ended_in_words(status: int | None) -> str:
    """The end of a process in words, None if nobody could see how."""
    return "has ended; torchrun tells how" if status is None else in_words(status)


class TorchrunProcess:
    """Obeys the driver. Messages that must not wait are answered by the thread that reads them.

    Args:
        configure: gives a pytest configuration whose command line has been parsed.
    """

    def __init__(self, launch: Launch, configure: Callable[[], pytest.Config]) -> None:
        self.launch, self.store = launch, connect()
        self._configure = configure
        self._interruptor = Interruptor()
        self._driver = Mailbox(self.store, DRIVER)
        self._driver_from_reader = Mailbox(self.store, DRIVER)
        self.tell = in_this_process(lambda message: self._driver.put(wire.From(launch.rank, message)))
        self.interrupt = self._interruptor.interrupt
        self._rank: Rank | None = None
        self._doing = "no test ran"
        self._over = False
        self._telling = threading.Lock()  # the end of rank 0 may be seen by one thread and heard of by another
        self.stderr = os.dup(2)  # while a test runs its output is captured
        self._reader = Reader(self.store, mailbox_of(launch.rank), self._answer_at_once, self._lost)
        self._line: socket.socket | None = None
        # the end of this process and of its neighbour is noticed
        self.store.set(f"pid/{launch.rank}", str(os.getpid()))
        threading.Thread(target=self._find_others, name="gtrainer-neighbour", daemon=True).start()

    # --- commands -------------------------------------------------------------------------

    def follow(self) -> int:
        """Collect and report nothing, and obey until the run is over: the exit status."""
        while not isinstance(command := self.next_command(), wire.Stop):
            signal.signal(signal.SIGTERM, _hold)
            self.obey(command)
        self.close()
        self.tell(command)
        return command.status

    def next_command(self) -> object:
        """Wait for a command of the driver."""
        return self._reader.messages.get()

    def wake(self) -> None:
        """Let ``next_command`` return None."""
        self._reader.messages.put(None)

    def obey(self, command: object) -> None:
        if isinstance(command, wire.Begin):
            self.tell(self._begin(command))
        elif self._rank is not None and isinstance(command, wire.RunItem | wire.CallFunction):
            what = f"{command.item.nodeid} ran" if isinstance(command, wire.RunItem) else "a function ran on ranks"
            self._doing = what
            with self._interruptor.interruptible():
                answer = self._rank.obey(command)
            self.tell(answer)
        elif self._rank is not None:
            self.tell(self._rank.obey(command))

    def _begin(self, command: wire.Begin) -> wire.Started:
        """Start the session that runs this rank's tests."""
        torch.set_num_threads(1)
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        rank = self.launch.rank
        worker = {**command.worker, "workerid": f"rank{rank}", "gt_rank": rank}
        # in rank 0's folder, which is the one to clear; on other nodes pytest finds one
        basetemp = f"{command.basetemp}/rank{rank}" if command.host == socket.gethostname() else None
        try:
            session = start_session(self._configure(), worker, basetemp)
        except BaseException:
            return wire.Started(traceback.format_exc())
        device, backend = worker["gt_device"], worker["gt_backend"]
        group = RankGroup(rank, device, backend, index=self.launch.local_rank, meet=self._meet)
        self._rank = Rank(session, group, self.tell)
        return wire.Started()

    def _meet(self, place: str, size: int) -> dist.Store:
        return dist.PrefixStore(place, self.store.clone())

    # --- at once, from threads ----------------------------------------------------------------

    def _answer_at_once(self, message: object) -> bool:
        if isinstance(message, wire.TellStacks):
            answer = wire.Stacks(message.number, stacks_of_threads())
            self._driver_from_reader.put(wire.From(self.launch.rank, answer))
        elif isinstance(message, wire.Interrupt):
            self.interrupt()
        elif isinstance(message, wire.Gone):
            self._lost(message.status)
        else:
            return False
        return True

    def _find_others(self) -> None:
        store, launch = self.store.clone(), self.launch
        with contextlib.suppress(RuntimeError):  # the run ended before it began
            if not launch.is_beside_the_driver:
                self._line = hold_line(store, launch.rank)
            for rank in launch.watched:
                watch_neighbour(int(store.get(f"pid/{rank}")), functools.partial(self._neighbour_ended, rank))

    def _neighbour_ended(self, rank: int, status: int | None) -> None:
        if self._over:
            return
        if rank == 0:
            if status is None:
                time.sleep(SEEN_SECONDS)  # another one of this node may have seen how, and tells us
            with contextlib.suppress(RuntimeError):  # the store has gone too: then all others see that themselves
                for other in {*range(1, self.launch.size)} - {self.launch.rank}:
                    Mailbox(self.store, mailbox_of(other)).put(wire.Gone(status))
            self._lost(status)
        Mailbox(self.store, DRIVER).put(wire.From(rank, wire.Gone(status)))

    def _lost(self, status: int | None = None) -> None:
        """Nobody is there to report to: a line here and the exit status can still tell that something went wrong."""
        if not self._over and not self.launch.leads and self._telling.acquire(blocking=False):
            how = ended_in_words(status)
            told = f"rank 0, which reports for all ranks, {how}, when {self._doing}: rank {self.launch.rank} ends too"
            os.write(self.stderr, f"gtrainer: {told}\n".encode())
            os._exit(1)

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session, and leave the others."""
        self._over = True
        if self._rank is not None:
            self._rank.group.leave()
            self._rank.obey(wire.Stop())
        self._reader.close()


def _hold(signum: int, frame: FrameType | None) -> None:
    """When torchrun ends the run because a rank has died, rank 0 still wants to tell of the test, and needs us."""
    timer = threading.Timer(HOLD_SECONDS, os._exit, [1])
    timer.daemon = True
    timer.start()


# --- raising in the middle of a test ---------------------------------------------------------------


class Interrupted(BaseException):
    """Raised in a test that is to end now: its limit is reached, or the run is being ended."""


class Interruptor:
    """Interrupts the main thread while it is inside ``interruptible``; made by the main thread."""

    def __init__(self) -> None:
        self._running = self._wanted = False
        signal.signal(_INTERRUPT, self._strike)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        self._wanted, self._running = False, True
        try:
            yield
        finally:
            self._running = False

    def interrupt(self) -> None:
        """Make it raise as soon as it is in Python code; from any thread."""
        self._wanted = True
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, _INTERRUPT)

    def _strike(self, signum: int, frame: FrameType | None) -> None:
        if self._running and self._wanted:
            self._wanted = False
            raise Interrupted("the test was interrupted: its limit was reached, or the run is being ended")


def stacks_of_threads() -> str:
    """The Python stacks of this process as faulthandler writes them, the main thread as the current one, last.

    Threads of ours, whose names begin with ``gtrainer-``, are left out.
    """
    main = threading.main_thread().ident
    frames = sys._current_frames()
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("gtrainer-")}
    order = sorted(frames.keys() - ours, key=lambda ident: ident == main)
    stacks = []
    for ident in order:
        lines = [f"{'Current thread' if ident == main else 'Thread'} {ident:#x} (most recent call first):"]
        for frame, line in traceback.walk_stack(frames[ident]):
            lines.append(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}')
        stacks.append("\n".join(lines))
    return "\n\n".join(stacks) + "\n"
