"""One process of the run: its mailbox, its rank, its watch over the next process of its node."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer.launch import Launch
from pytest_gtrainer.worlds.ranks import wire
from pytest_gtrainer.worlds.ranks.inside.commands import Rank, in_this_process
from pytest_gtrainer.worlds.ranks.inside.group import RankGroup
from pytest_gtrainer.worlds.ranks.inside.session import start_session
from pytest_gtrainer.worlds.torchrun import messages, neighbour
from pytest_gtrainer.worlds.torchrun.interrupt import Interruptor, stacks_of_threads
from pytest_gtrainer.worlds.torchrun.line import hold_line
from pytest_gtrainer.worlds.torchrun.mailbox import Mailbox, Reader

DRIVER = "driver"


def connect() -> dist.Store:
    """The store of torchrun's rendezvous."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore("gtrainer", store)


def mailbox_of(rank: int) -> str:
    return f"rank{rank}"


class Member:
    """Obeys the driver. Messages that must not wait are answered by the thread that reads them.

    Args:
        configure: gives a pytest configuration whose command line has been parsed.
    """

    def __init__(self, launch: Launch, store: dist.Store, configure: Callable[[], pytest.Config]) -> None:
        self.launch = launch
        self._store, self._configure = store, configure
        self._interruptor = Interruptor()
        self._driver = Mailbox(store, DRIVER)
        self._driver_from_reader = Mailbox(store, DRIVER)
        self.tell = in_this_process(self._tell)
        self._rank: Rank | None = None
        self._doing = "no test ran"
        self._over = False
        self._reader = Reader(store, mailbox_of(launch.rank), self._answer_at_once, self._lost)
        self._line: socket.socket | None = None
        self.stderr = os.dup(2)  # while a test runs its output is captured
        self._be_seen()

    # --- commands -------------------------------------------------------------------------

    def next_command(self) -> object:
        """Wait for a command of the driver."""
        return self._reader.messages.get()

    def wake(self) -> None:
        """Let ``next_command`` return None."""
        self._reader.messages.put(None)

    def obey(self, command: object) -> None:
        if isinstance(command, messages.Begin):
            self.tell(self._begin(command))
        elif isinstance(command, wire.RunItem | wire.CallFunction):
            self.tell(self._run(command))
        elif self._rank is not None:
            self.tell(self._rank.obey(command))

    def _run(self, command: wire.RunItem | wire.CallFunction) -> object:
        assert self._rank is not None
        self._doing = f"{command.item.nodeid} ran" if isinstance(command, wire.RunItem) else "a function ran on ranks"
        with self._interruptor.interruptible():
            return self._rank.obey(command)

    def _begin(self, command: messages.Begin) -> messages.Began:
        """Start the session that runs this rank's tests."""
        torch.set_num_threads(1)
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        launch = self.launch
        worker: dict[str, Any] = {
            "workerid": f"rank{launch.rank}", "workercount": launch.size, "testrunuid": "torchrun",
            "mainargv": sys.argv, "gt_rank": launch.rank, "gt_size": launch.size,
            "gt_device": command.device, "gt_backend": command.backend,
        }  # fmt: skip
        try:
            config = self._configure()
            worker["randomly_seed"] = getattr(config.option, "randomly_seed", None)
            session = start_session(config, worker, self._basetemp(command))
        except BaseException:
            return messages.Began(traceback.format_exc())
        group = RankGroup(launch.rank, command.device, command.backend, index=launch.local_rank, meet=self._meet)
        self._rank = Rank(session, group, self.tell)
        return messages.Began(None)

    def _basetemp(self, command: messages.Begin) -> str | None:
        """A folder of this rank's in rank 0's, which is the one to clear; on other nodes pytest finds one."""
        return f"{command.basetemp}/rank{self.launch.rank}" if command.host == socket.gethostname() else None

    def _meet(self, place: str, size: int) -> dist.Store:
        return dist.PrefixStore(place, self._store.clone())

    def _tell(self, message: object) -> None:
        self._driver.put(messages.From(self.launch.rank, message))

    # --- at once, from threads ----------------------------------------------------------------

    def _answer_at_once(self, message: object) -> bool:
        if isinstance(message, messages.TellStacks):
            answer = messages.Stacks(message.number, stacks_of_threads())
            self._driver_from_reader.put(messages.From(self.launch.rank, answer))
            return True
        if isinstance(message, messages.Interrupt):
            self._interruptor.interrupt()
            return True
        if isinstance(message, messages.Gone):
            self._lost(message.status)
            return True
        return False

    def interrupt(self) -> None:
        """Make the test that runs here raise."""
        self._interruptor.interrupt()

    def _be_seen(self) -> None:
        """See to it that the end of this process and of its neighbour is noticed."""
        self._store.set(f"pid/{self.launch.rank}", str(os.getpid()))
        threading.Thread(target=self._find_others, name="gtrainer-neighbour", daemon=True).start()

    def _find_others(self) -> None:
        store, launch = self._store.clone(), self.launch
        with contextlib.suppress(RuntimeError):  # the run ended before it began
            if not launch.is_beside_the_driver:
                self._line = hold_line(store, launch.rank)
            for rank in launch.watched:
                pid = int(store.get(f"pid/{rank}"))
                neighbour.watch(pid, functools.partial(self._neighbour_ended, rank))

    def _neighbour_ended(self, rank: int, status: int | None) -> None:
        if self._over:
            return
        if rank == 0:
            with contextlib.suppress(RuntimeError):  # the store has gone too: then all others see that themselves
                for other in {*range(1, self.launch.size)} - {self.launch.rank}:
                    Mailbox(self._store, mailbox_of(other)).put(messages.Gone(rank, status))
            self._lost(status)
        Mailbox(self._store, DRIVER).put(messages.From(rank, messages.Gone(rank, status)))

    def _lost(self, status: int | None = None) -> None:
        """Nobody is there to report to: a line here and the exit status can still tell that something went wrong."""
        if not self._over and not self.launch.leads:
            how = neighbour.in_words(status)
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
