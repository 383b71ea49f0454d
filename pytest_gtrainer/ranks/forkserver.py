"""The forkserver: a single-threaded process that imports torch once and forks ranks; and how a fork becomes a rank.

It is started by exec, so nothing of the parent's state (threads, OpenMP pools, autograd runs,
each of which would hang a forked child) reaches the ranks. It never outlives the parent: the
end of the connection, or another parent process than at the start, ends it and its ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import termios
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.stacks import STACK_SIGNAL, log_file, stack_file

PARENT_CHECK_SECONDS = 2.0
GROUP_ROUNDS = 20
_PR_SET_PDEATHSIG = 1


def main(fd: int, folder: str, modules: Iterable[str]) -> NoReturn:
    """Serve the parent on the socket ``fd``; delete ``folder`` at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Have no terminal, as in a session of one's own: to read from the parent's (``getpass``), or to write to it after
    # ``stty tostop``, would stop a rank for good.
    with contextlib.suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
    server = _Server(Connection(fd), folder)
    for name in modules:
        with contextlib.suppress(Exception):  # what fails here fails where it is needed, with its own error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keeps the pages that ranks share with us from being copied by their collector
    threads = len(os.listdir("/proc/self/task")) - 1
    server.conn.send(wire.Started(f"a preloaded module started {threads} threads" if threads else None))
    server.serve()


class _Server:
    def __init__(self, conn: Connection, folder: str) -> None:
        self.conn = conn
        self.folder = folder
        self.pids: dict[int, int] = {}  # pidfd -> pid
        self.pid, self.parent = os.getpid(), os.getppid()

    def serve(self) -> NoReturn:
        while os.getppid() == self.parent:
            for ready in wait([self.conn, *self.pids], PARENT_CHECK_SECONDS):
                if ready is not self.conn:
                    self._reap(ready)  # type: ignore[arg-type]
                    continue
                try:
                    command = self.conn.recv()
                except (EOFError, OSError):
                    self._end()
                if isinstance(command, wire.RankSetup):
                    self._fork(command)
                elif isinstance(command, wire.SendSignal) and command.pid in self.pids.values():
                    if command.signum == signal.SIGKILL:
                        end_group(command.pid)
                    else:
                        with contextlib.suppress(OSError):
                            os.kill(command.pid, command.signum)
        self._end()

    def _fork(self, setup: wire.RankSetup) -> None:
        """Fork a rank, whose end of its channel comes now; programs that the rank starts do not inherit that."""
        with socket.socket(fileno=os.dup(self.conn.fileno())) as sock:
            _, rank_fds, _, _ = socket.recv_fds(sock, 1, 2)
        for fd in rank_fds:
            os.set_inheritable(fd, False)
        pid = os.fork()
        if pid == 0:
            self.conn.close()
            for pidfd in self.pids:
                os.close(pidfd)
            become_rank(setup, rank_fds, self.pid)
        for fd in rank_fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the rank does it too: whoever is first
        self.pids[os.pidfd_open(pid)] = pid
        self.conn.send(wire.Forked(pid))

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


# --- in the forked process ----------------------------------------------------------------------


def become_rank(setup: wire.RankSetup, fds: Sequence[int], forkserver: int) -> NoReturn:
    """Serve the parent on the channel of ``fds`` as a rank; never returns into the forkserver's code."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != forkserver:  # it died before the line above
            os._exit(1)
        os.setpgid(0, 0)  # so that a rank can be killed with its children
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _open_streams(setup)
        _take_environment(setup)
        from pytest_gtrainer.ranks.inside.rank import serve

        code = serve(setup, wire.Channel(*fds))
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _open_streams(setup: wire.RankSetup) -> None:
    """Standard streams of the rank's own; stacks go to a file, on a fatal error or STACK_SIGNAL, from C code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if not setup.live_output:
        log = os.open(log_file(setup.folder, setup.rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - a standard stream lives as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = open(stack_file(setup.folder, setup.rank), "w")  # noqa: SIM115 - as above
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)


def _take_environment(setup: wire.RankSetup) -> None:
    rank, size = str(setup.rank), str(setup.size)
    os.environ.clear()
    os.environ.update(setup.environ)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size, OMP_NUM_THREADS="1")
    # Connecting all pairs while a group is made fails now and then on a loaded machine when groups
    # come and go ("connectFullMesh failed"); connecting at first use did not, and is faster.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    sys.path[:] = setup.sys_path
    os.chdir(setup.cwd)
