"""The forkserver: a single-threaded process that imports torch once and forks ranks; and how a fork
becomes a rank.

It is started by exec, so nothing of the parent's state (threads, OpenMP pools, autograd runs, each
of which would hang a forked child) reaches the ranks. The end of the connection, or another parent
process than at the start, ends it and its ranks. What a rank starts ends with it, also in a session
of its own: a process whose parent ends becomes its rank's child, and this process's when the rank
ends (``PR_SET_CHILD_SUBREAPER``).
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import os
import shutil
import signal
import socket
import sys
import termios
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.answers import (
    CALLS_SIGNAL,
    DUMP_SIGNAL,
    OUTPUT_SIGNAL,
    STACK_SIGNAL,
    file_of,
)

PARENT_CHECK_SECONDS = 2.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PIECE = 4000  # bytes of a line
FOLDER_VARIABLE = "GT_RANKS_FOLDER"
"""In the environment of all that ranks start: the folder of their forkserver, for the case that it
is lost.
"""

PRELOADING = "preloading"
"""The file in that folder which names the module of ``gt_preload`` that is being imported."""


def main(fd: int, folder: str, modules: list[str], preload: list[str]) -> NoReturn:
    """Serve the parent on the socket ``fd``; delete ``folder`` at the end.

    ``modules`` are imported if they can be; each of ``preload``, which the user names, has to be.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Have no terminal, as in a session of one's own: to read from the parent's (``getpass``), or to
    # write to it after ``stty tostop``, would stop a rank for good.
    with contextlib.suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
    server = _Server(Connection(fd), folder)
    for place, name in enumerate(modules):
        with contextlib.suppress(
            Exception
        ):  # what fails here fails where it is needed, with its own error
            importlib.import_module(name)
        if _has_threads():
            # no process with threads can be forked, and a driver that has started here will not
            # start in the ranks
            argument = json.dumps([fd, folder, sys.path, modules[:place], preload])
            os.execv(sys.executable, [*sys.orig_argv[:-1], argument])
    preloading = Path(folder) / PRELOADING
    for name in preload:
        preloading.write_text(
            name
        )  # the parent reads it if the import ends this process, or does not end
        if (wrong := _import_for_user(name)) is not None:
            server.conn.send(wire.Started(refuse_preload(name, wrong)))
            server.serve()  # until the parent has read that
    preloading.unlink(missing_ok=True)
    gc.collect()
    gc.freeze()  # keeps the pages that ranks share with us from being copied by their collector
    server.conn.send(wire.Started(None))
    server.serve()


def refuse_preload(name: str, wrong: str) -> str:
    """Return the sentence about a module of ``gt_preload`` that cannot be imported once for all
    ranks.
    """
    return f"gt_preload names {name}, {wrong}: correct it, or take it out of gt_preload"


def _has_threads() -> bool:
    return os.stat("/proc/self/task").st_nlink > 3  # two, and one for each thread


def _import_for_user(name: str) -> str | None:
    """Import a module that the user wants in every rank; return what makes that impossible."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # an import may call sys.exit
        return (
            f"whose import fails in the process that forks ranks ({type(error).__name__}: {error})"
        )
    if _has_threads():
        return (
            "which starts a thread when it is imported, and a process with threads cannot be forked"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "which starts CUDA when it is imported, and CUDA cannot be used in a fork"
    return None


class _Server:
    def __init__(self, conn: Connection, folder: str) -> None:
        self.conn, self.folder = conn, folder
        self.pids: dict[int, int] = {}  # pidfd -> pid
        self.pid, self.parent = os.getpid(), os.getppid()

    def serve(self) -> NoReturn:
        while os.getppid() == self.parent:
            if not (some := wait([self.conn, *self.pids], PARENT_CHECK_SECONDS)):
                self._end_orphans()
            for ready in some:
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
                    os.kill(command.pid, command.signum)
        self._end()

    def _fork(self, setup: wire.RankSetup) -> None:
        """Fork a rank, whose end of its channel comes now; programs that the rank starts do not
        inherit that.
        """
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
        self.pids[os.pidfd_open(pid)] = pid
        self.conn.send(wire.Forked(pid))

    def _reap(self, pidfd: int) -> None:
        pid = self.pids.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._end_orphans()
        with contextlib.suppress(OSError):
            self.conn.send(wire.Exited(pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> NoReturn:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        self.pids.clear()
        self._end_orphans()
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def _end_orphans(self) -> None:
        """Kill what ended ranks had started, but for trackers; more comes in the next round."""
        ranks, found = set(self.pids.values()), True
        while found:
            found = False
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    child, parent = (
                        int(stat.parent.name),
                        int(stat.read_text().rpartition(")")[2].split()[1]),
                    )
                    if parent == self.pid and child not in ranks:
                        if not (removes := is_tracker(child)):
                            os.kill(child, signal.SIGKILL)
                        found |= os.waitpid(child, os.WNOHANG if removes else 0)[0] != 0


def is_tracker(pid: int) -> bool:
    """Return whether a process removes what others have shared, once they have ended:
    multiprocessing's, torch's.
    """
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"multiprocessing.resource_tracker" in line or b"torch_shm_manager" in line
    return False


def become_rank(setup: wire.RankSetup, fds: Sequence[int], forkserver: int) -> NoReturn:
    """Serve the parent on the channel of ``fds`` as a rank; never returns into the forkserver's
    code.
    """
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if os.getppid() != forkserver:  # it died before the line above
            os._exit(1)
        os.setpgid(0, 0)  # a test that signals its own group means its rank
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _open_streams(setup)
        own = {**setup.environ, FOLDER_VARIABLE: os.environ[FOLDER_VARIABLE]}
        os.environ.clear()
        os.environ.update(
            own, RANK=str(setup.rank), WORLD_SIZE=str(setup.size), OMP_NUM_THREADS="1"
        )
        os.environ.update(
            LOCAL_RANK=str(setup.rank - setup.ranks.start), LOCAL_WORLD_SIZE=str(len(setup.ranks))
        )
        # Connecting all pairs while a group is made fails now and then on a loaded machine when
        # groups come and go ("connectFullMesh failed"); connecting at first use did not, and is
        # faster.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        sys.path[:] = setup.sys_path
        os.chdir(setup.cwd)
        from pytest_gtrainer.ranks.inside.rank import serve

        code = serve(setup, wire.Channel(*fds))
    except BaseException:
        traceback.print_exc()
    finally:
        stream: Any
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
                stream.buffer.end_line()
        os._exit(code)


def _open_streams(setup: wire.RankSetup) -> None:
    """Standard streams of the rank's own; stacks go to a file on a fatal error, the main thread's
    on DUMP_SIGNAL.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if setup.live_output:
        raw: list[Any] = [_WithRank(fd, setup.rank) for fd in (1, 2)]
        out, err = (io.TextIOWrapper(each, write_through=True) for each in raw)
    else:
        log = os.open(
            file_of(setup.folder, setup.rank, "log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600
        )
        os.dup2(log, 1)
        os.dup2(log, 2)
        out, err = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    # A standard stream lives as long as the process.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = out, err
    stacks = open(file_of(setup.folder, setup.rank, "dump"), "w")  # noqa: SIM115 - as above
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=False)  # see ranks/answers.py
    # Before there are threads; one of the rank's waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {CALLS_SIGNAL, OUTPUT_SIGNAL, STACK_SIGNAL})


class _WithRank(io.RawIOBase):
    """Writes a line at a time, whole, with the rank before it: what ranks print by ``-s`` does not
    tear.

    A pipe takes 4 KiB at once (``PIPE_BUF``): of a longer line each part stands on a line of its
    own.
    """

    def __init__(self, fd: int, rank: int) -> None:
        self._fd, self._before, self._rest = fd, b"[rank %d] " % rank, b""

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        *lines, self._rest = (self._rest + bytes(data)).split(b"\n")
        for line in lines:
            for at in range(0, max(len(line), 1), _PIECE):
                os.write(self._fd, self._before + line[at : at + _PIECE] + b"\n")
        return len(data)

    def end_line(self) -> None:
        if self._rest:
            self.write(b"\n")
