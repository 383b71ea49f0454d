"""The forkserver: a single-threaded process that imports torch once and forks ranks.

It is started by exec. So nothing of the parent's state reaches the ranks: threads, OpenMP pools and
autograd runs would each hang a forked child. The forkserver and its ranks end when the connection
to the parent is closed, and when the parent dies.

Processes that a rank starts end with the rank, even in a session of their own. A process whose
parent has ended becomes a child of its rank, and when the rank ends, a child of the forkserver
(``PR_SET_CHILD_SUBREAPER``), which kills it.

``become_rank`` is the way from a fork to a rank.
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
_PIECE = 4000  # bytes of a line that are written at once: less than PIPE_BUF, with the prefix
# In the environment of every process that a rank starts: the folder of its forkserver. If the
# forkserver is lost, the parent finds these processes by it.
FOLDER_VARIABLE = "GT_RANKS_FOLDER"
# The file in that folder which names the module of ``gt_preload`` that is being imported.
PRELOADING = "preloading"


def main(fd: int, folder: str, modules: list[str], preload: list[str]) -> NoReturn:
    """Serve the parent on the socket ``fd``; delete ``folder`` at the end.

    ``modules`` are imported if they can be; each of ``preload``, which the user names, has to be.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Give up the terminal. Else a rank that reads from it (``getpass``), or writes to it after
    # ``stty tostop``, would be stopped by a signal and never go on.
    with contextlib.suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
    server = _Server(Connection(fd), folder)
    for place, name in enumerate(modules):
        # An import that fails here fails again where it is needed, with its own error.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        if _has_threads():
            # A process with threads cannot be forked, so start again without this module and those
            # after it. A driver that has started a thread here will not start one in the ranks.
            argument = json.dumps([fd, folder, sys.path, modules[:place], preload])
            os.execv(sys.executable, [*sys.orig_argv[:-1], argument])
    preloading = Path(folder) / PRELOADING
    for name in preload:
        # For the parent, if the import ends this process, or does not return.
        preloading.write_text(name)
        wrong = _import_for_user(name)
        if wrong is not None:
            server.conn.send(wire.Started(refuse_preload(name, wrong)))
            server.serve()  # until the parent has read that
    preloading.unlink(missing_ok=True)
    gc.collect()
    gc.freeze()  # keeps the pages that ranks share with us from being copied by their collector
    server.conn.send(wire.Started(None))
    server.serve()


def refuse_preload(name: str, wrong: str) -> str:
    """Return the message about a module of ``gt_preload`` that cannot be shared by all ranks."""
    return f"gt_preload names {name}, {wrong}: correct it, or take it out of gt_preload"


def _has_threads() -> bool:
    # A directory has two links of its own, and one for each directory in it: here, each thread.
    return os.stat("/proc/self/task").st_nlink > 3


def _import_for_user(name: str) -> str | None:
    """Import a module for all ranks; return why that is impossible, None if it worked."""
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
    """Forks and signals ranks for the parent, and reports their ends."""

    def __init__(self, conn: Connection, folder: str) -> None:
        self.conn, self.folder = conn, folder
        self.pids: dict[int, int] = {}  # pidfd -> pid
        self.pid, self.parent = os.getpid(), os.getppid()

    def serve(self) -> NoReturn:
        # The parent of an orphan is another process.
        while os.getppid() == self.parent:
            ready = wait([self.conn, *self.pids], PARENT_CHECK_SECONDS)
            if not ready:
                self._kill_orphans()
            for each in ready:
                if each is self.conn:
                    self._obey()
                else:
                    self._reap(each)  # type: ignore[arg-type]
        self._end()

    def _obey(self) -> None:
        try:
            command = self.conn.recv()
        except (EOFError, OSError):
            self._end()
        if isinstance(command, wire.RankSetup):
            self._fork(command)
        elif isinstance(command, wire.SendSignal) and command.pid in self.pids.values():
            os.kill(command.pid, command.signum)

    def _fork(self, setup: wire.RankSetup) -> None:
        """Fork a rank, and give it its end of the channel, which comes with the setup."""
        with socket.socket(fileno=os.dup(self.conn.fileno())) as sock:
            _, rank_fds, _, _ = socket.recv_fds(sock, 1, 2)
        # A program that the rank starts must not hold the channel open after the rank has ended.
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
        self._kill_orphans()
        with contextlib.suppress(OSError):
            self.conn.send(wire.Exited(pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> NoReturn:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        self.pids.clear()
        self._kill_orphans()
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def _kill_orphans(self) -> None:
        """Kill the processes that ended ranks have left, but for trackers, which end themselves.

        The children of a killed process become children of this one, so look until there is none.
        """
        ranks = set(self.pids.values())
        found = True
        while found:
            found = False
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    child = int(folder.name)
                    if child in ranks or parent_of(child) != self.pid:
                        continue
                    flags = os.WNOHANG
                    if not is_tracker(child):
                        os.kill(child, signal.SIGKILL)
                        flags = 0
                    reaped, _ = os.waitpid(child, flags)
                    if reaped != 0:
                        found = True


def parent_of(pid: int) -> int:
    """Return the parent of a process; raise OSError if the process has gone."""
    return int(_stat_fields(pid)[1])


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process and none has continued it."""
    try:
        return _stat_fields(pid)[0] in ("T", "t")
    except OSError:
        return False


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name: state, parent, and so on."""
    # The name stands in parentheses, and may itself hold spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_tracker(pid: int) -> bool:
    """Return whether a process is a tracker of multiprocessing or torch.

    Trackers remove shared memory and files after the processes that shared them have ended.
    """
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"multiprocessing.resource_tracker" in line or b"torch_shm_manager" in line
    return False


def become_rank(setup: wire.RankSetup, fds: Sequence[int], forkserver: int) -> NoReturn:
    """Serve the parent as a rank on the channel of ``fds``.

    It never returns into the code of the forkserver.
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
        _set_environment(setup)
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


def _set_environment(setup: wire.RankSetup) -> None:
    """Give the rank the parent's environment, and the variables that torchrun would set."""
    folder = os.environ[FOLDER_VARIABLE]
    os.environ.clear()
    os.environ.update(setup.environ)
    os.environ.update(
        {
            FOLDER_VARIABLE: folder,
            "RANK": str(setup.rank),
            "WORLD_SIZE": str(setup.size),
            "LOCAL_RANK": str(setup.rank - setup.ranks.start),
            "LOCAL_WORLD_SIZE": str(len(setup.ranks)),
            "OMP_NUM_THREADS": "1",
        }
    )
    # Connecting all pairs while a group is made fails now and then on a loaded machine when groups
    # come and go ("connectFullMesh failed"); connecting at first use did not, and is faster.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _open_streams(setup: wire.RankSetup) -> None:
    """Give the rank standard streams of its own, and a file for its stacks.

    faulthandler writes stacks there on a fatal error, and the main thread's on DUMP_SIGNAL.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out: io.TextIOWrapper
    err: io.TextIOWrapper
    if setup.live_output:
        raw: list[Any] = [_WithRank(1, setup.rank), _WithRank(2, setup.rank)]
        out, err = (io.TextIOWrapper(each, write_through=True) for each in raw)
    else:
        log = os.open(
            file_of(setup.folder, setup.rank, "log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600
        )
        os.dup2(log, 1)
        os.dup2(log, 2)
        out, err = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout, sys.stderr = out, err
    stacks = open(file_of(setup.folder, setup.rank, "dump"), "w")  # noqa: SIM115 - as above
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=False)  # see ranks/answers.py
    # Before there are threads, which inherit the mask; one of the rank's waits for these signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, {CALLS_SIGNAL, OUTPUT_SIGNAL, STACK_SIGNAL})


class _WithRank(io.RawIOBase):
    """A stream that writes whole lines with the rank before them, for ``-s``.

    A pipe takes 4 KiB (``PIPE_BUF``) at once without mixing them with the output of other ranks. So
    a longer line is written as several lines.
    """

    def __init__(self, fd: int, rank: int) -> None:
        self._fd = fd
        self._prefix = b"[rank %d] " % rank
        self._rest = b""

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        *lines, self._rest = (self._rest + bytes(data)).split(b"\n")
        for line in lines:
            # An empty line is written, too.
            for at in range(0, max(len(line), 1), _PIECE):
                os.write(self._fd, self._prefix + line[at : at + _PIECE] + b"\n")
        return len(data)

    def end_line(self) -> None:
        if self._rest:
            self.write(b"\n")
