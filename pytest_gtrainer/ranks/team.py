"""Forked ranks, seen from the parent: the forkserver that makes them, and the team of one world, warm between tests."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from pytest_gtrainer.environment import lasting_environment
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.stacks import STACK_SIGNAL, fatal_error, log_file, stack_file, take_stacks

# The imports take 3 to 6 s of CPU time; xdist workers on a busy machine start theirs together.
SERVER_START_LIMIT = 300.0
SERVER_END_LIMIT = 10.0
START_LIMIT = 120.0
SETTLE_LIMIT = 10.0
STOP_LIMIT = 10.0
STATUS_SECONDS = 1.0
OUTPUT_LIMIT = 64 * 1024

_BOOT = """\
import json, sys
fd, folder, path, modules = json.loads(sys.argv[1])
sys.path[:] = path
from pytest_gtrainer.ranks.forkserver import main
main(fd, folder, modules)
"""

# One thread in every pool: a process with threads must not fork, and 8 ranks share the cores.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

_numbers = itertools.count()


class RanksError(Exception):
    """Ranks could not be started; the message is for the user."""


def readable(fds: Iterable[int], seconds: float) -> set[int]:
    """Those of the files that have something to read, or have come to their end; waits for the first, an hour at most.

    ``multiprocessing.connection.wait`` makes a selector each time, which costs more than all else in a test.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(min(max(0.0, seconds), 3600.0) * 1000)}


def in_words(status: int) -> str:
    """The end of a process in words.

    >>> in_words(-9), in_words(3)
    ('was killed by SIGKILL', 'exited with status 3')
    """
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


class ForkServer:
    """A running forkserver and the exit statuses of the ranks it has forked.

    ``folder`` holds everything that its ranks write; it goes when the forkserver does.
    """

    def __init__(self, modules: list[str], *, live_output: bool) -> None:
        if not hasattr(os, "pidfd_open"):
            raise RanksError("ranks need Linux (pidfd); worlds of kind fake run anywhere")
        self.folder = Path(tempfile.mkdtemp(prefix="gtrainer-"))
        self.exit_status: dict[int, int] = {}
        self.alive = True
        self._forked: list[int] = []
        self._ready = False
        ours, theirs = socket.socketpair()
        argument = json.dumps([theirs.fileno(), str(self.folder), sys.path, modules])
        # The interpreter's own flags (-O, -W, -X) hold in the ranks as in the parent.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs, open(self.folder / "forkserver.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOT, argument],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=None if live_output else log,
                stderr=None if live_output else log,
                env={**lasting_environment(), **_ONE_THREAD},
                # Ctrl-C is the parent's to handle. A session of its own would do, too, but Linux shares the time of
                # its cores by session: gloo's threads then waited for the parent's.
                process_group=0,
            )
        self.conn = Connection(ours.detach())
        self.fd = self.conn.fileno()

    def _wait_until_ready(self) -> None:
        """Block until it may fork."""
        if self._ready:
            return
        message: object = None
        with contextlib.suppress(EOFError, OSError):
            message = self.conn.recv() if self.conn.poll(SERVER_START_LIMIT) else None
        error = message.error if isinstance(message, wire.Started) else self._log()
        if error is not None:
            self.close()
            raise RanksError(f"the process that forks ranks did not start: {error}")
        self._ready = True

    def _log(self) -> str:
        with contextlib.suppress(OSError):
            text = (self.folder / "forkserver.log").read_text(errors="replace")[-4000:]
            return text or "it ended without a word"
        return "it ended without a word"

    def fork(self, setups: list[wire.RankSetup]) -> list[tuple[int, wire.Channel]]:
        """Fork one rank per setup: pids and channels.

        Raises:
            RanksError: it cannot, with what the forkserver wrote.
        """
        self._wait_until_ready()
        channels: list[wire.Channel] = []
        try:
            for setup in setups:
                ours, theirs = wire.fd_pairs()
                channels.append(wire.Channel(*ours))
                self._request(setup, theirs)
            end = time.monotonic() + SERVER_START_LIMIT
            while len(self._forked) < len(setups):
                if not self.alive or time.monotonic() > end:
                    raise RanksError(f"the process that forks ranks is gone: {self._log()}")
                self.pump(0.5)
        except BaseException:  # broken off in the middle: whose the ranks are that come now is not known any more
            for channel in channels:
                channel.close()
            self.close()
            raise
        pids, self._forked = self._forked, []
        return list(zip(pids, channels, strict=True))

    def _request(self, setup: wire.RankSetup, fds: tuple[int, int]) -> None:
        """Ask for a rank, whose end of its channel is handed over."""
        try:
            self.conn.send(setup)
            with socket.socket(fileno=os.dup(self.fd)) as sock:
                socket.send_fds(sock, [b"f"], fds)
        finally:
            for fd in fds:
                os.close(fd)

    def pump(self, seconds: float = 0.0) -> None:
        """Take in what the forkserver says; wait up to ``seconds`` for the first word."""
        try:
            while self.alive and readable([self.fd], seconds):
                message = self.conn.recv()
                if isinstance(message, wire.Exited):
                    self.exit_status[message.pid] = message.status
                elif isinstance(message, wire.Forked):
                    self.exit_status.pop(message.pid, None)  # of one that had the number before
                    self._forked.append(message.pid)
                seconds = 0.0
        except (EOFError, OSError):
            self.alive = False

    def signal(self, pid: int, signum: int) -> None:
        """Signal a rank, through the one process that knows whether the number is still its own."""
        with contextlib.suppress(OSError):
            self.conn.send(wire.SendSignal(pid, signum))

    def kill(self, pids: list[int]) -> None:
        """Kill ranks with their children, and wait until they are gone."""
        for pid in pids:
            if pid not in self.exit_status:
                self.signal(pid, signal.SIGKILL)
        end = time.monotonic() + SERVER_END_LIMIT
        while self.alive and time.monotonic() < end and not all(pid in self.exit_status for pid in pids):
            self.pump(0.05)

    def close(self) -> None:
        """End the forkserver and all its ranks."""
        self.alive = False
        self.conn.close()
        try:
            self._process.wait(SERVER_END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(slots=True)
class _RankProcess:
    """The parent's handle of one rank."""

    rank: int
    pid: int
    channel: wire.Channel
    captured: list[BinaryIO] = field(default_factory=list)


class Team:
    """Starts ranks that differ from ``plan`` only in their rank, and keeps their process group fit for the next test.

    Raises:
        RanksError: they could not be started.
    """

    def __init__(self, server: ForkServer, plan: wire.RankSetup) -> None:
        self.size = plan.size
        self.alive = True
        self.busy = False
        self._server = server
        self._folder = server.folder / f"team{next(_numbers)}"
        self._folder.mkdir()
        self._stores = (str(self._folder / f"store{number}") for number in itertools.count())
        common = replace(plan, folder=str(self._folder), store=next(self._stores))
        setups = [
            replace(
                common,
                rank=rank,
                basetemp=f"{plan.basetemp}/{self._folder.name}-rank{rank}",
                worker={**plan.worker, "gt_rank": rank},
            )
            for rank in range(self.size)
        ]
        self._ranks = [_RankProcess(rank, *forked) for rank, forked in enumerate(server.fork(setups))]
        try:
            self._wait_until_up()
        except BaseException:  # a time limit of another plugin, Ctrl-C: nobody knows of these ranks yet
            self.kill()
            raise

    # --- starting -------------------------------------------------------------------------

    def _wait_until_up(self) -> None:
        end = time.monotonic() + START_LIMIT
        missing = {rank.channel.fileno(): rank for rank in self._ranks}
        while missing:
            ready = readable(missing, end - time.monotonic())
            if not ready:
                raise RanksError(f"{len(missing)} of {self.size} ranks were not ready within {START_LIMIT:g} s")
            for fd in sorted(ready):
                process = missing.pop(fd)
                try:
                    message: Any = pickle.loads(process.channel.receive())
                except (EOFError, OSError):
                    how, words = self.how_it_ended(process.rank), self.last_words(process.rank)
                    raise RanksError(f"rank {process.rank} {how} while it started\n{words}") from None
                if message.error is not None:
                    raise RanksError(f"rank {process.rank} could not start:\n{message.error}")
                for captured in message.capture_fds:
                    with contextlib.suppress(OSError):
                        process.captured.append(open(f"/proc/{process.pid}/fd/{captured}", "rb"))  # noqa: SIM115

    # --- talking --------------------------------------------------------------------------

    def send(self, command: object, ranks: Iterable[int] | None = None) -> None:
        """Send a command to all ranks, or to some; the dead are noticed elsewhere."""
        message = pickle.dumps(command)
        for rank in range(self.size) if ranks is None else ranks:
            with contextlib.suppress(OSError):
                self._ranks[rank].channel.send(message)

    def receive(self, ranks: Iterable[int], seconds: float) -> dict[int, object]:
        """The next message of those ``ranks`` that have one; None stands for a dead rank.

        Waits for no rest of a message: its rank may have been stopped, or have died and left the pipe to a child.
        """
        fds = {self._ranks[rank].channel.fileno(): rank for rank in ranks}
        read = {fd for fd, rank in fds.items() if self._ranks[rank].channel.has_message()}
        ended = {fd for fd, rank in fds.items() if self._ranks[rank].pid in self._server.exit_status}
        ready = read | readable([*fds, self._server.fd], 0.0 if read or ended else seconds)
        if self._server.fd in ready:
            self._server.pump()
        heard: dict[int, object] = dict.fromkeys(fds[fd] for fd in ended - ready)  # all that they said is read
        for fd, rank in fds.items():
            channel = self._ranks[rank].channel
            if fd in ready:
                try:
                    if not channel.has_message():
                        channel.read()
                    if channel.has_message():  # else there is more of it to come
                        heard[rank] = pickle.loads(channel.receive())
                except (EOFError, OSError):
                    heard[rank] = None
        return heard

    def how_it_ended(self, rank: int) -> str:
        """The end of a process in words."""
        pid, end = self._ranks[rank].pid, time.monotonic() + STATUS_SECONDS
        while pid not in self._server.exit_status and self._server.alive and time.monotonic() < end:
            self._server.pump(0.05)
        status = self._server.exit_status.get(pid)
        return "was lost with the process that had forked it" if status is None else in_words(status)

    def last_words(self, rank: int) -> str:
        """What a dead rank wrote that no report carries: captured output, log, fatal error."""
        texts = [_read(file) for file in self._ranks[rank].captured]
        log = log_file(self._folder, rank)
        if log.exists():
            with log.open("rb") as file:
                texts.append(_read(file))
        texts.append(fatal_error(stack_file(self._folder, rank)))
        return "\n".join(text.rstrip() for text in texts if text.strip())

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """The Python stacks of running ranks."""
        files = {rank: stack_file(self._folder, rank) for rank in ranks}
        return take_stacks(files, lambda rank: self._server.signal(self._ranks[rank].pid, STACK_SIGNAL))

    # --- between tests ---------------------------------------------------------------------

    def heal(self, condition: wire.GroupCondition) -> None:
        """Make the group fit for the next test, or end the team.

        Ranks that disagree have a collective under way that will never end, and destroying
        its group would wait for it: such a team is ended.
        """
        if condition in ("dead", "killed", "disagreeing"):
            self.kill()
        elif condition == "left":
            self._settle(wire.JoinGroup(next(self._stores), self.size))
        elif condition == "with subgroups":
            self._settle(wire.DropSubgroups())

    def _settle(self, command: object) -> None:
        if self.has_lost_ranks() or not self._obeyed(command, SETTLE_LIMIT):
            self.kill()

    def has_lost_ranks(self) -> bool:
        """Whether a rank is known to have ended."""
        self._server.pump()
        return not self._server.alive or any(rank.pid in self._server.exit_status for rank in self._ranks)

    def _obeyed(self, command: object, limit: float) -> bool:
        """Send a command: whether every rank sends it back in time. Other messages are passed over."""
        self.send(command)
        end, missing = time.monotonic() + limit, set(range(self.size))
        while missing and time.monotonic() < end:
            for rank, message in self.receive(missing, end - time.monotonic()).items():
                if message is None:
                    return False
                if message == command:
                    missing.discard(rank)
        return not missing

    # --- ending -----------------------------------------------------------------------------

    def stop(self) -> None:
        """End the ranks: politely if they are idle."""
        try:
            if self.alive and not self.busy and self._server.alive:
                self._obeyed(wire.Stop(), STOP_LIMIT)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the ranks at once, with their children."""
        if not self.alive:
            return
        self.alive = False
        self._server.kill([rank.pid for rank in self._ranks])
        for rank in self._ranks:
            rank.channel.close()
            for file in rank.captured:
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _read(file: BinaryIO) -> str:
    with contextlib.suppress(OSError):
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - OUTPUT_LIMIT))
        return file.read(OUTPUT_LIMIT).decode(errors="replace")
    return ""
