"""Rank 0's side of the run: it owns the tests and is a rank itself.

While a test runs on ranks, the main thread of rank 0 is a rank like any other, and a thread
drives all of them; between such tests there is no process group, so that tests without ranks
find this process as they would without torchrun.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from pytest_gtrainer import facts
from pytest_gtrainer._pytest_private import base_temp, prepared_config
from pytest_gtrainer.devices import Launch
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.pool import worker_input
from pytest_gtrainer.ranks.team import RanksError
from pytest_gtrainer.ranks.torchrun.mailbox import DRIVER, Lines, Mailbox, Reader, mailbox_of
from pytest_gtrainer.ranks.torchrun.process import TorchrunProcess, ended_in_words
from pytest_gtrainer.ranks.watch import RanksOutcome, run_on

START_LIMIT = 300.0
SETTLE_LIMIT = 20.0
FAREWELL_LIMIT = 10.0
INTERRUPT_EVERY = 1.0
STACKS_SECONDS = 2.0
STATUS_SECONDS = 0.5
# torchrun sends SIGTERM when a rank has died: the death itself is the better thing to report.
GRACE_SECONDS = 3.0


class TorchrunPool:
    """Runs commands on the first ranks of the run.

    Attributes:
        broken: why no more tests can run on ranks; None as long as they can.
    """

    def __init__(self, config: pytest.Config, launch: Launch) -> None:
        self._config, self._launch = config, launch
        self.broken: str | None = None
        arguments = [str(argument) for argument in config.invocation_params.args]
        self._process = TorchrunProcess(launch, lambda: prepared_config(arguments))
        self._office = Office(self._process.store, launch.size)
        self._places = (f"group{number}" for number in itertools.count())
        self._team: TorchrunTeam | None = None
        self._begun = self._stopping = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self, size: int, command: wire.RunItem | wire.CallFunction, limit: float, holder: str) -> RanksOutcome:
        """Run a command on ``size`` ranks; this process is one of them.

        Raises:
            RanksError: a rank cannot be had any more.
            KeyboardInterrupt: the run was to end meanwhile.
        """
        before = signal.signal(signal.SIGINT, self._on_sigint)
        try:
            outcome = self._while_driven(lambda: self._drive(size, command, limit, holder))
        finally:
            signal.signal(signal.SIGINT, before)
        if isinstance(command, wire.CallFunction):
            self.leave()  # the test that has called goes on, in a process without groups
        if self._stopping:
            raise KeyboardInterrupt
        return outcome

    def leave(self) -> None:
        """Destroy the process groups, if there are any."""
        team = self._team
        if team is not None and team.grouped and team.alive:
            self._while_driven(team.leave)

    def close(self, status: int = 0) -> None:
        """Tell everybody that the run is over, and wait until they have left.

        Args:
            status: what every process is to exit with.
        """
        others = set(range(1, self._launch.size))
        with contextlib.suppress(RuntimeError):  # the store may be gone, with the node that held it
            self._office.send(wire.Interrupt(), others)
            self._office.send(wire.Stop(status), others)
            self._process.close()
            self._office.await_all(wire.Stop, others - self._office.gone.keys(), FAREWELL_LIMIT)
            self._office.close()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once the first of the others has exited

    # --- the thread that drives ---------------------------------------------------------------

    def _drive(self, size: int, command: wire.RunItem | wire.CallFunction, limit: float, holder: str) -> RanksOutcome:
        team = self._grouped(size)
        # to a terminal only: this process's output may be captured twice, as the reporting one and as a rank
        outcome = run_on(team, command, limit, holder, lambda text: facts.tell("progress", text=text))  # type: ignore[arg-type]
        if not team.alive:
            dead = sorted(outcome.dead | self._office.gone.keys())
            why = f"rank {dead[0]} has ended, and torchrun replaces none" if dead else "a rank could not be interrupted"
            self.broken = f"{why}: the run ends with this test"
        if self._launch.rank in team.stuck:
            # the last resort where the main thread, which alone can report to pytest, will never return
            told = f"gtrainer: {holder} FAILED and cannot be ended on rank 0; the run ends here\n"
            for incident in outcome.incidents:
                told += "".join(f"{incident.text}\n{text}\n" for _, text in incident.details)
            os.write(self._process.stderr, told.encode())
            os._exit(1)
        return outcome

    def _grouped(self, size: int) -> TorchrunTeam:
        """The first ranks, on a default group of their own."""
        if self.broken is not None:
            raise RanksError(self.broken)
        if not self._begun:
            ranks = range(self._launch.size)
            worker, basetemp = worker_input(self._config, self._launch.size), str(base_temp(self._config))
            self._office.send(wire.Begin(worker, socket.gethostname(), basetemp), ranks)
            late = self._office.await_all(wire.Started, ranks, START_LIMIT)
            if late:
                self.broken = f"ranks {sorted(late)} did not start within {START_LIMIT:g} s"
                raise RanksError(self.broken)
            self._begun = True
        team = self._team
        if team is not None and team.size == size and team.grouped:
            return team
        if team is not None and team.grouped:
            team.leave()
        self._team = team = TorchrunTeam(self._office, size)
        team.join(next(self._places))
        return team

    # --- the main thread ------------------------------------------------------------------------

    def _while_driven(self, drive: Callable[[], Any]) -> Any:
        """The result of ``drive``, which runs in a thread while this one obeys it as a rank."""
        results: list[Any] = []
        errors: list[BaseException] = []

        def target() -> None:
            try:
                results.append(drive())
            except BaseException as error:
                errors.append(error)
            finally:
                self._process.wake()

        thread = threading.Thread(target=target, name="gtrainer-driver", daemon=True)
        thread.start()
        # What strikes this process between commands, a plugin's time limit for one, ends the test on all ranks, and is
        # raised in the end: the driver must not be left alone with them.
        struck: BaseException | None = None
        while True:
            try:
                command = self._process.next_command()
                if command is None:
                    break
                self._process.obey(command)
            except BaseException as error:
                struck = struck or error
                self._office.send(wire.Interrupt(), range(1, self._launch.size))
        thread.join()
        if struck is not None:
            raise struck
        if errors:
            raise errors[0]
        return results[0]

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        """Ctrl-C ends the test on all ranks, and then the run."""
        self._stopping = True
        self._office.send(wire.Interrupt(), range(1, self._launch.size))
        self._process.interrupt()

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        def end_unless_broken() -> None:
            main = threading.main_thread().ident
            if self.broken is None and main is not None:
                signal.pthread_kill(main, signal.SIGINT)

        timer = threading.Timer(GRACE_SECONDS, end_unless_broken)
        timer.daemon = True
        timer.start()


class Office:
    """The driver's end of all mailboxes: sends to ranks, keeps what they say until somebody asks."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self.size = size
        self.gone: dict[int, int | None] = {}
        self._boxes = [Mailbox(store, mailbox_of(rank)) for rank in range(size)]
        self._reader = Reader(store, DRIVER, lambda message: False, self._lost)
        self._heard: list[wire.From] = []
        box = Mailbox(store, DRIVER)
        Lines(store, lambda rank: box.put(wire.From(rank, wire.Gone(None))))

    def _lost(self) -> None:
        """Without the store nobody can be reached."""
        for rank in range(self.size):
            self._reader.messages.put(wire.From(rank, wire.Gone(None)))

    def send(self, message: object, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._boxes[rank].put(message)

    def hear(self, ranks: set[int], seconds: float) -> tuple[int, object] | None:
        """The next message of one of these ranks; ``Gone`` for one that has ended; None if time is over."""
        end = time.monotonic() + seconds
        while True:
            for rank in ranks & self.gone.keys():
                return rank, wire.Gone(self.gone[rank])
            for number, heard in enumerate(self._heard):
                if heard.rank in ranks:
                    del self._heard[number]
                    return heard.rank, heard.message
            if not self._take(max(0.0, end - time.monotonic())):
                return None

    def _take(self, seconds: float) -> bool:
        try:
            heard = self._reader.messages.get(timeout=seconds)
        except queue.Empty:
            return False
        assert isinstance(heard, wire.From)
        if isinstance(heard.message, wire.Gone):
            known = self.gone.get(heard.rank)
            self.gone[heard.rank] = heard.message.status if known is None else known
        else:
            self._heard.append(heard)
        return True

    def status_of(self, rank: int, seconds: float) -> int | None:
        """How a process that is gone has ended: one observer may tell that it has before another one tells how."""
        end = time.monotonic() + seconds
        while self.gone.get(rank) is None and time.monotonic() < end:
            self._take(0.05)
        return self.gone.get(rank)

    def put_back(self, heard: list[wire.From]) -> None:
        """Keep messages for who asks next."""
        self._heard = heard + self._heard

    def await_all(self, kind: type, ranks: Iterable[int], seconds: float) -> set[int]:
        """Wait until every rank has said a message of that kind, passing over others: those who have not."""
        missing, end = set(ranks), time.monotonic() + seconds
        while missing:
            heard = self.hear(missing, end - time.monotonic())
            if heard is None or isinstance(heard[1], wire.Gone):
                break
            rank, message = heard
            if isinstance(message, wire.Started) and message.error is not None:
                raise RanksError(f"rank {rank} could not start:\n{message.error}")
            if isinstance(message, kind):
                missing.discard(rank)
        return missing

    def close(self) -> None:
        self._reader.close()


class TorchrunTeam:
    """The ranks below ``size``, on a default group of their own.

    Nothing can replace a rank here. So a test that hangs is interrupted, and the ranks go on; if one
    cannot be interrupted, or has died, the run is over, as torchrun will end all ranks in any case.

    Attributes:
        grouped: whether the ranks have a default group.
        stuck: ranks that could not be interrupted.
    """

    def __init__(self, office: Office, size: int) -> None:
        self.size = size
        self.alive, self.busy, self.grouped = True, False, False
        self.ranks = range(size)
        self.stuck: set[int] = set()
        self._office = office
        self._numbers = itertools.count()

    # --- what the watch asks for ------------------------------------------------------------

    def send(self, command: object, ranks: Iterable[int] | None = None) -> None:
        self._office.send(command, self.ranks if ranks is None else ranks)

    def receive(self, ranks: Iterable[int], seconds: float) -> dict[int, object]:
        heard = self._office.hear(set(ranks), max(0.0, seconds))
        if heard is None:
            return {}
        rank, message = heard
        return {rank: None if isinstance(message, wire.Gone) else message}

    def how_it_ended(self, rank: int) -> str:
        """The end of a process in words."""
        return ended_in_words(self._office.status_of(rank, STATUS_SECONDS))

    def last_words(self, rank: int) -> str:
        return ""  # in files that only the process itself could open

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """The Python stacks of ranks, "" for one that does not answer."""
        found, number = dict.fromkeys(ranks, ""), next(self._numbers)
        self.send(wire.TellStacks(number), found)
        end, missing, passed = time.monotonic() + STACKS_SECONDS, set(found), []
        while missing and (heard := self._office.hear(missing, end - time.monotonic())) is not None:
            rank, message = heard
            if isinstance(message, wire.Stacks) and message.number == number:
                found[rank] = message.text
            elif not isinstance(message, wire.Stacks | wire.Gone):
                passed.append(wire.From(rank, message))
                continue
            missing.discard(rank)
        self._office.put_back(passed)
        return found

    def kill(self) -> None:
        """End the test on the ranks that have not answered."""
        missing, end = set(self.ranks), time.monotonic() + SETTLE_LIMIT
        self.send(wire.Interrupt())
        self.send(wire.LeaveGroup())
        self.grouped = False
        while missing and self.alive and time.monotonic() < end:
            missing = self._office.await_all(wire.LeaveGroup, missing, INTERRUPT_EVERY)
            self.alive = not missing & self._office.gone.keys()
            self.send(wire.Interrupt(), missing)
        self.alive, self.stuck = self.alive and not missing, missing - self._office.gone.keys()

    def heal(self, condition: wire.GroupCondition) -> None:
        """See to it that the group is fit for the next test, or that a new one is made."""
        if condition == "dead" or self._office.gone.keys() & set(self.ranks):
            self.alive = False
        elif condition in ("killed", "left", "disagreeing"):
            self.leave()
        elif condition == "with subgroups":
            self._settle(wire.DropSubgroups())

    # --- groups -----------------------------------------------------------------------------

    def join(self, place: str) -> None:
        """Make the default group.

        Raises:
            RanksError: not all ranks came.
        """
        self._settle(wire.JoinGroup(place, self.size), START_LIMIT)
        if not self.alive:
            raise RanksError(f"the {self.size} ranks could not make a process group within {START_LIMIT:g} s")
        self.grouped = True

    def leave(self) -> None:
        """Destroy the groups of all ranks."""
        self.grouped = False
        self._settle(wire.LeaveGroup())

    def _settle(self, command: object, limit: float = SETTLE_LIMIT) -> None:
        """Send a command: without every rank's answer in time the run is over."""
        self.send(command)
        if self._office.await_all(type(command), self.ranks, limit):
            self.alive = False
