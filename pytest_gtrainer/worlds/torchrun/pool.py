"""Rank 0's side of the run: it owns the tests and is a rank itself.

While a test runs on ranks, the main thread of rank 0 is a rank like any other, and a thread
drives all of them; between such tests there is no process group, so that tests without ranks
find this process as they would without torchrun.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from pytest_gtrainer import facts
from pytest_gtrainer._pytest_private import base_temp, prepared_config
from pytest_gtrainer.devices import resolve
from pytest_gtrainer.launch import Launch
from pytest_gtrainer.worlds.ranks import wire
from pytest_gtrainer.worlds.ranks.launcher import RanksError
from pytest_gtrainer.worlds.ranks.outcome import Outcome
from pytest_gtrainer.worlds.ranks.watch import run_on
from pytest_gtrainer.worlds.torchrun import messages
from pytest_gtrainer.worlds.torchrun.member import Member, connect
from pytest_gtrainer.worlds.torchrun.team import START_LIMIT, Office, TorchrunTeam

FAREWELL_LIMIT = 10.0
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
        self._store = connect()
        arguments = [str(argument) for argument in config.invocation_params.args]
        self._member = Member(launch, self._store, lambda: prepared_config(arguments))
        self._office = Office(self._store, launch.size)
        self._places = (f"group{number}" for number in itertools.count())
        self._team: TorchrunTeam | None = None
        self._begun = self._stopping = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self, size: int, command: wire.RunItem | wire.CallFunction, limit: float, holder: str) -> Outcome:
        """Run a command on ``size`` ranks; this process is one of them.

        Raises:
            RanksError: a rank cannot be had any more.
            KeyboardInterrupt: the run was to end meanwhile.
        """
        with self._interrupts_reach_the_test():
            outcome = self._while_driven(lambda: self._drive(size, command, limit, holder))
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
            self._office.send(messages.Interrupt(), others)
            self._office.send(messages.Farewell(status), others)
            self._member.close()
            self._office.await_all(messages.Farewell, others - self._office.gone.keys(), FAREWELL_LIMIT)
            self._office.close()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once the first of the others has exited

    # --- the thread that drives ---------------------------------------------------------------

    def _drive(self, size: int, command: wire.RunItem | wire.CallFunction, limit: float, holder: str) -> Outcome:
        team = self._grouped(size)
        outcome = run_on(team, command, limit, holder, _tell)  # type: ignore[arg-type]
        if not team.alive:
            self.broken = _why(outcome, self._office)
        if self._launch.rank in team.stuck:
            _report_without_pytest(holder, outcome, self._member.stderr)
        return outcome

    def _grouped(self, size: int) -> TorchrunTeam:
        if self.broken is not None:
            raise RanksError(self.broken)
        if not self._begun:
            self._begin()
        team = self._team
        if team is not None and team.size == size and team.grouped:
            return team
        if team is not None and team.grouped:
            team.leave()
        self._team = team = TorchrunTeam(self._office, size)
        team.join(next(self._places))
        return team

    def _begin(self) -> None:
        """Have every process start its session."""
        found = resolve(self._config)
        ranks = range(self._launch.size)
        basetemp = base_temp(self._config)
        self._office.send(messages.Begin(found.kind, found.backend, socket.gethostname(), str(basetemp)), ranks)
        late = self._office.await_all(messages.Began, ranks, START_LIMIT)
        if late:
            self.broken = f"ranks {sorted(late)} did not start within {START_LIMIT:g} s"
            raise RanksError(self.broken)
        self._begun = True

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
                self._member.wake()

        thread = threading.Thread(target=target, name="gtrainer-driver", daemon=True)
        thread.start()
        struck = self._obey_until_woken()
        thread.join()
        if struck is not None:
            raise struck
        if errors:
            raise errors[0]
        return results[0]

    def _obey_until_woken(self) -> BaseException | None:
        """Be a rank as long as the driver drives.

        What strikes this process between commands, a plugin's time limit for one, ends the test on all ranks, and is
        returned in the end: the driver must not be left alone with them.
        """
        struck: BaseException | None = None
        while True:
            try:
                command = self._member.next_command()
                if command is None:
                    return struck
                self._member.obey(command)
            except BaseException as error:
                struck = struck or error
                self._office.send(messages.Interrupt(), range(1, self._launch.size))

    @contextlib.contextmanager
    def _interrupts_reach_the_test(self) -> Iterator[None]:
        """Ctrl-C ends the test on all ranks, and then the run."""
        before = signal.signal(signal.SIGINT, lambda signum, frame: self._stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        timer = threading.Timer(GRACE_SECONDS, self._end_unless_broken)
        timer.daemon = True
        timer.start()

    def _end_unless_broken(self) -> None:
        main = threading.main_thread().ident
        if self.broken is None and main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    def _stop(self) -> None:
        self._stopping = True
        self._office.send(messages.Interrupt(), range(1, self._launch.size))
        self._member.interrupt()


def _tell(text: str) -> None:
    """To a terminal only: this process's output may be captured twice, as the reporting one and as a rank."""
    facts.tell("progress", text=text)


def _report_without_pytest(holder: str, outcome: Outcome, stderr: int) -> None:
    """The last resort where the main thread, which alone can report to pytest, will never return."""
    told = "\n".join(f"{incident.text}\n{text}" for incident in outcome.incidents for _, text in incident.details)
    os.write(stderr, f"gtrainer: {holder} FAILED and cannot be ended on rank 0; the run ends here\n{told}\n".encode())
    os._exit(1)


def _why(outcome: Outcome, office: Office) -> str:
    for rank in sorted(outcome.dead | office.gone.keys()):
        return f"rank {rank} has ended, and torchrun replaces none: the run ends with this test"
    return "a rank could not be interrupted: the run ends with this test"
