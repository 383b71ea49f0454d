"""The parent's side of the forkserver: start it, fork ranks through it, learn how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

from pytest_gtrainer.environment import lasting_environment
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.channel import Channel, fd_pairs

# The imports take 3 to 6 s of CPU time; xdist workers on a busy machine start theirs together.
START_LIMIT = 300.0
END_LIMIT = 10.0

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
        with theirs:
            self._process = self._start(theirs.fileno(), modules, live_output)
        self.conn = Connection(ours.detach())
        self.fd = self.conn.fileno()

    def _start(self, fd: int, modules: list[str], live_output: bool) -> subprocess.Popen[bytes]:
        argument = json.dumps([fd, str(self.folder), sys.path, modules])
        # The interpreter's own flags (-O, -W, -X) hold in the ranks as in the parent.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with open(self.folder / "forkserver.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOT, argument],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=None if live_output else log,
                stderr=None if live_output else log,
                env={**lasting_environment(), **_ONE_THREAD},
                # Ctrl-C is the parent's to handle. A session of its own would do, too, but Linux shares the time of
                # its cores by session: gloo's threads then waited for the parent's.
                process_group=0,
            )

    def wait_until_ready(self) -> None:
        """Block until it may fork.

        Raises:
            RanksError: it cannot, with what it wrote.
        """
        if self._ready:
            return
        message = self._first_message()
        if isinstance(message, wire.Ready):
            self._ready = True
            return
        reason = message.reason if isinstance(message, wire.NotReady) else self._log()
        self.close()
        raise RanksError(f"the process that forks ranks did not start: {reason}")

    def _first_message(self) -> object:
        try:
            return self.conn.recv() if self.conn.poll(START_LIMIT) else None
        except (EOFError, OSError):
            return None

    def _log(self) -> str:
        with contextlib.suppress(OSError):
            text = (self.folder / "forkserver.log").read_text(errors="replace")[-4000:]
            return text or "it ended without a word"
        return "it ended without a word"

    def fork(self, setups: list[wire.RankSetup]) -> list[tuple[int, Channel]]:
        """Fork one rank per setup: pids and channels."""
        self.wait_until_ready()
        try:
            return self._fork(setups)
        except BaseException:  # broken off in the middle: whose the ranks are that come now is not known any more
            self.close()
            raise

    def _fork(self, setups: list[wire.RankSetup]) -> list[tuple[int, Channel]]:
        channels: list[Channel] = []
        try:
            for setup in setups:
                ours, theirs = fd_pairs()
                channels.append(Channel(*ours))
                self._request(setup, theirs)
            return list(zip(self._wait_for_pids(len(setups)), channels, strict=True))
        except BaseException:
            for channel in channels:
                channel.close()
            raise

    def _request(self, setup: wire.RankSetup, fds: tuple[int, int]) -> None:
        """Ask for a rank, whose end of its channel is handed over."""
        try:
            self.conn.send(wire.Fork(setup))
            with socket.socket(fileno=os.dup(self.conn.fileno())) as sock:
                socket.send_fds(sock, [b"f"], fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _wait_for_pids(self, count: int) -> list[int]:
        end = time.monotonic() + START_LIMIT
        while len(self._forked) < count:
            if not self.alive or time.monotonic() > end:
                raise RanksError(f"the process that forks ranks is gone: {self._log()}")
            self.pump(0.5)
        pids, self._forked = self._forked, []
        return pids

    def pump(self, seconds: float = 0.0) -> None:
        """Take in what the forkserver says; wait up to ``seconds`` for the first word."""
        try:
            while self.alive and readable([self.conn.fileno()], seconds):
                self._take(self.conn.recv())
                seconds = 0.0
        except (EOFError, OSError):
            self.alive = False

    def _take(self, message: object) -> None:
        if isinstance(message, wire.Exited):
            self.exit_status[message.pid] = message.status
        elif isinstance(message, wire.Forked):
            self.exit_status.pop(message.pid, None)  # of one that had the number before
            self._forked.append(message.pid)

    def signal(self, pid: int, signum: int) -> None:
        """Signal a rank, through the one process that knows whether the number is still its own."""
        with contextlib.suppress(OSError):
            self.conn.send(wire.SendSignal(pid, signum))

    def kill(self, pids: list[int]) -> None:
        """Kill ranks with their children, and wait until they are gone."""
        for pid in pids:
            if pid not in self.exit_status:
                self.signal(pid, signal.SIGKILL)
        end = time.monotonic() + END_LIMIT
        while self.alive and time.monotonic() < end and not all(pid in self.exit_status for pid in pids):
            self.pump(0.05)

    def close(self) -> None:
        """End the forkserver and all its ranks."""
        self.alive = False
        self.conn.close()
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
