"""The forkserver: a single-threaded process that imports torch once and forks ranks.

It is started by exec, so nothing of the parent's state (threads, OpenMP pools, autograd runs,
each of which would hang a forked child) reaches the ranks. It never outlives the parent: the
end of the connection, or another parent process than at the start, ends it and its ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import shutil
import signal
import socket
import termios
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from pytest_gtrainer.ranks import wire

PARENT_CHECK_SECONDS = 2.0
GROUP_ROUNDS = 20


def main(fd: int, folder: str, modules: Iterable[str]) -> NoReturn:
    """Serve the parent on the socket ``fd``; delete ``folder`` at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_terminal()
    server = _Server(Connection(fd), folder)
    _preload(modules)
    threads = len(os.listdir("/proc/self/task"))
    if threads == 1:
        server.conn.send(wire.Ready())
    else:
        server.conn.send(wire.NotReady(f"a preloaded module started {threads - 1} threads"))
    server.serve()


def _leave_terminal() -> None:
    """Have no terminal, as in a session of one's own.

    To read from the parent's (``getpass``), or to write to it after ``stty tostop``, would stop a rank for good.
    """
    with contextlib.suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        fcntl.ioctl(terminal, termios.TIOCNOTTY)


def _preload(modules: Iterable[str]) -> None:
    """Import what ranks will want; what fails here fails where it is needed, with its own error."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keeps the pages that ranks share with us from being copied by their collector


class _Server:
    def __init__(self, conn: Connection, folder: str) -> None:
        self.conn = conn
        self.folder = folder
        self.pids: dict[int, int] = {}  # pidfd -> pid
        self.pid, self.parent = os.getpid(), os.getppid()

    def serve(self) -> NoReturn:
        while os.getppid() == self.parent:
            for ready in wait([self.conn, *self.pids], PARENT_CHECK_SECONDS):
                if ready is self.conn:
                    self._obey()
                else:
                    self._reap(ready)  # type: ignore[arg-type]
        self._end()

    def _obey(self) -> None:
        try:
            command = self.conn.recv()
        except (EOFError, OSError):
            self._end()
        if isinstance(command, wire.Fork):
            self._fork(command.setup)
        elif isinstance(command, wire.SendSignal) and command.pid in self.pids.values():
            _signal(command.pid, command.signum)

    def _fork(self, setup: wire.RankSetup) -> None:
        rank_fds = _receive_fds(self.conn)
        pid = os.fork()
        if pid == 0:
            self._leave_to_rank(setup, rank_fds)
        for fd in rank_fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the rank does it too: whoever is first
        self.pids[os.pidfd_open(pid)] = pid
        self.conn.send(wire.Forked(pid))

    def _leave_to_rank(self, setup: wire.RankSetup, rank_fds: Sequence[int]) -> NoReturn:
        self.conn.close()
        for pidfd in self.pids:
            os.close(pidfd)
        from pytest_gtrainer.ranks.inside.process import become_rank

        become_rank(setup, rank_fds, self.pid)

    def _reap(self, pidfd: int) -> None:
        pid = self.pids.pop(pidfd)
        os.close(pidfd)
        end_group(pid)  # its children; the zombie keeps the number from reuse
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            self.conn.send(wire.Exited(pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> NoReturn:
        for pid in self.pids.values():
            end_group(pid)
        for pid in self.pids.values():
            os.waitpid(pid, 0)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)


def _signal(pid: int, signum: int) -> None:
    """Kill a rank with its children; any other signal is for the rank alone."""
    if signum == signal.SIGKILL:
        end_group(pid)
    else:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def end_group(pid: int) -> None:
    """Kill a rank and its children, but for trackers of multiprocessing.

    A tracker removes the named semaphores and shared memory of processes that died, and ends when they have.
    """
    trackers = {member for member in _members(pid) if _is_tracker(member)}
    with contextlib.suppress(OSError):
        if not trackers:
            os.killpg(pid, signal.SIGKILL)
            return
    for _ in range(GROUP_ROUNDS):  # a member may fork while the others are killed
        rest = [member for member in _members(pid) if member not in trackers]
        for member in rest:
            with contextlib.suppress(OSError):
                os.kill(member, signal.SIGKILL)
        if not rest:
            return


def _members(group: int) -> list[int]:
    """The processes of a group that run."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, in_group = Path(f"/proc/{int(name)}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(in_group) == group and state not in "ZX":
                found.append(int(name))
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _receive_fds(conn: Connection) -> list[int]:
    """Those of a rank's end of its channel, which programs that the rank starts do not inherit."""
    with socket.socket(fileno=os.dup(conn.fileno())) as sock:
        _, fds, _, _ = socket.recv_fds(sock, 1, 2)
    for fd in fds:
        os.set_inheritable(fd, False)
    return list(fds)
