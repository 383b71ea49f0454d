"""Forked ranks, seen from the parent: the forkserver that makes them, and the team of one world,
warm between tests.
"""

import contextlib
import fcntl
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, Protocol

from pytest_gtrainer.environment import lasting_environment
from pytest_gtrainer.ranks import answers, wire
from pytest_gtrainer.ranks.forkserver import FOLDER_VARIABLE, PRELOADING, is_tracker, refuse_preload
from pytest_gtrainer.worlds import ranks_by, ranks_text

# The imports take 3 to 6 s of CPU time; xdist workers on a busy machine start theirs together.
SERVER_START_LIMIT = 300.0
SERVER_END_LIMIT = 10.0
LEAST_START_LIMIT, START_LIMIT = 20.0, 120.0
SETTLE_LIMIT = 10.0
STOP_LIMIT = 30.0
STATUS_SECONDS = 10.0
OUTPUT_LIMIT = 64 * 1024

_BOOT = """\
import json, sys
fd, folder, path, modules, preload = json.loads(sys.argv[1])
sys.path[:] = path
from pytest_gtrainer.ranks.forkserver import main
main(fd, folder, modules, preload)
"""

# One thread in every pool: a process with threads must not fork, and 8 ranks share the cores.
_POOLS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TORCHINDUCTOR_COMPILE_THREADS",
)

FOLDER_PREFIX, OWNER_LOCK = "gtrainer-", "owner.lock"

_numbers = itertools.count()


class RanksError(Exception):
    """Ranks could not be started; the message is for the user."""


def readable(fds: Iterable[int], seconds: float) -> set[int]:
    """Those of the files that can be read, or have come to their end; waits for the first, an hour
    at most.
    """
    poll = (
        select.poll()
    )  # multiprocessing's wait makes a selector each time, which costs more than all else in a test
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(min(max(0.0, seconds), 3600.0) * 1000)}


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process and none has continued it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


class ForkServer:
    """A running forkserver, the exit statuses of its ranks, and, while it lives, the folder of all
    that they write.
    """

    def __init__(
        self, modules: list[str], preload: Sequence[str] = (), *, live_output: bool
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise RanksError("ranks need Linux (pidfd); worlds of kind fake run anywhere")
        sweep_folders_of_killed_runs(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._owner: int | None = lock_folder(self.folder)
        self.exit_status: dict[int, int] = {}
        self.alive = True
        self._forked: list[int] = []
        self._ready = False
        ours, theirs = socket.socketpair()
        argument = json.dumps([theirs.fileno(), str(self.folder), sys.path, modules, preload])
        # The interpreter's own flags (-O, -W, -X) hold in the ranks as in the parent.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs, open(self.folder / "forkserver.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOT, argument],
                pass_fds=[theirs.fileno(), self._owner],
                stdin=subprocess.DEVNULL,
                stdout=None if live_output else log,
                stderr=None if live_output else log,
                env={
                    **lasting_environment(),
                    **dict.fromkeys(_POOLS, "1"),
                    FOLDER_VARIABLE: str(self.folder),
                },
                # Ctrl-C is the parent's to handle. A session of its own would do, too, but Linux
                # shares the time of its cores by session: gloo's threads then waited for the
                # parent's.
                process_group=0,
            )
        self.conn = Connection(ours.detach())
        self.fd = self.conn.fileno()

    def _log(self) -> str:
        """Return why the forkserver is of no use: the module of the user that it was importing, and
        what it wrote.
        """
        text = module = ""
        with contextlib.suppress(OSError):
            text = (self.folder / "forkserver.log").read_text(errors="replace")[-4000:]
        with contextlib.suppress(OSError):
            module = (self.folder / PRELOADING).read_text()
        if module:
            wrong = f"did not end within {SERVER_START_LIMIT:g} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(
                    1.0
                )  # its end of the connection is closed a little earlier
                wrong = f"ends the process that forks ranks: it {_how_ended(status)}"
            text = "\n".join(
                part for part in (refuse_preload(module, f"whose import {wrong}"), text) if part
            )
        return text or "it ended without a word"

    def fork(self, setups: list[wire.RankSetup]) -> list[tuple[int, wire.Channel]]:
        """Fork one rank per setup: pids and channels; RanksError if it cannot, with what the
        forkserver wrote.
        """
        if not self._ready:
            message: object = None  # it says nothing if it ends as it starts
            with contextlib.suppress(EOFError, OSError):
                message = self.conn.recv() if self.conn.poll(SERVER_START_LIMIT) else None
            if (
                error := message.error if isinstance(message, wire.Started) else self._log()
            ) is not None:
                self.close()
                raise RanksError(f"the process that forks ranks did not start: {error}")
            self._ready = True
        channels: list[wire.Channel] = []
        try:
            for setup in setups:
                ours, theirs = wire.fd_pairs()
                # A rank that a signal has stopped reads nothing: its test's limit ends it then.
                channels.append(wire.Channel(*ours, send_limit=SETTLE_LIMIT))
                try:
                    self.conn.send(setup)
                    with socket.socket(fileno=os.dup(self.fd)) as sock:
                        socket.send_fds(sock, [b"f"], theirs)
                finally:  # the rank's end of its channel has been handed over
                    for fd in theirs:
                        os.close(fd)
            end = time.monotonic() + SERVER_START_LIMIT
            while len(self._forked) < len(setups):
                if not self.alive or time.monotonic() > end:
                    raise RanksError(f"the process that forks ranks is gone: {self._log()}")
                self.pump(0.5)
        except (
            BaseException
        ):  # broken off in the middle: whose the ranks are that come now is not known any more
            for channel in channels:
                channel.close()
            self.close()
            raise
        pids, self._forked = self._forked, []
        return list(zip(pids, channels, strict=True))

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
            self._kill_left_behind()

    def _kill_left_behind(self) -> None:
        """End what ranks had started, as the forkserver would: it is gone, and they know its folder
        by a variable.
        """
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                is_ours = f"{FOLDER_VARIABLE}={self.folder}".encode() in file.read_bytes().split(
                    b"\0"
                )
                if is_ours and not is_tracker(int(file.parent.name)):
                    os.kill(int(file.parent.name), signal.SIGKILL)

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
        while (
            self.alive
            and time.monotonic() < end
            and not all(pid in self.exit_status for pid in pids)
        ):
            self.pump(0.05)

    def close(self) -> None:
        """End the forkserver and all its ranks; may be called twice."""
        self.alive = False
        self.conn.close()
        try:
            self._process.wait(SERVER_END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._kill_left_behind()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


def lock_folder(folder: Path) -> int:
    """Lock a new folder of ours and return the locked file.

    The lock is held until this process and its forkserver, which inherits the file, have ended,
    however they end.
    """
    # Another run may sweep at this moment, and takes an unlocked file of that name for one whose
    # owner is dead.
    unnamed = folder / f"{OWNER_LOCK}.new"
    owner = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(owner, fcntl.LOCK_SH)
    unnamed.rename(folder / OWNER_LOCK)
    return owner


def sweep_folders_of_killed_runs(temporary: Path) -> None:
    """Remove our folders below ``temporary`` whose run and forkserver have both been killed.

    A folder belongs to a live run while somebody holds the lock in it. One without a lock file is
    not touched.
    """
    for lock in temporary.glob(f"{FOLDER_PREFIX}*/{OWNER_LOCK}"):
        with (
            contextlib.suppress(OSError),
            lock.open("r+") as file,
        ):  # of another user, held, or gone meanwhile
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)


@dataclass(slots=True)
class _RankProcess:
    pid: int
    channel: wire.Channel
    captured: list[BinaryIO] = field(default_factory=list)


class Part(Protocol):
    """A team's ranks on one machine. ``files`` are readable when ranks have news; ``take`` gives
    None of dead ones.
    """

    ranks: range

    def send(self, command: object, ranks: Iterable[int]) -> None: ...
    def files(self, ranks: Iterable[int]) -> list[int]: ...
    def take(self, ranks: Iterable[int], ready: set[int]) -> dict[int, object]: ...
    def ended(self, rank: int) -> wire.Ended: ...
    def stacks(self, ranks: Iterable[int], kind: str = "stack") -> dict[int, str]: ...
    def interrupt(self, rank: int) -> None: ...
    def has_lost_ranks(self) -> bool: ...
    def kill(self) -> None: ...


class LocalRanks:
    """The ranks of a team that run on this machine: forked as ``plan`` says, they differ only in
    their rank.
    """

    def __init__(self, server: ForkServer, plan: wire.RankSetup) -> None:
        self.ranks = plan.ranks
        self._server = server
        self._folder = server.folder / f"team{next(_numbers)}"
        self._folder.mkdir()
        self.stores = (str(self._folder / f"store{number}") for number in itertools.count())
        shared = replace(plan, folder=str(self._folder), store=plan.store or next(self.stores))

        def setup(rank: int) -> wire.RankSetup:
            temporary = plan.basetemp and f"{plan.basetemp}/{self._folder.name}-rank{rank}"
            return replace(
                shared, rank=rank, basetemp=temporary, worker={**plan.worker, "gt_rank": rank}
            )

        forked = server.fork(list(map(setup, plan.ranks)))
        self._processes = {
            rank: _RankProcess(*each) for rank, each in zip(plan.ranks, forked, strict=True)
        }

    def send(self, command: object, ranks: Iterable[int]) -> None:
        message = pickle.dumps(command)
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._processes[rank].channel.send(message)

    def files(self, ranks: Iterable[int]) -> list[int]:
        return [self._server.fd, *(self._processes[rank].channel.fileno() for rank in ranks)]

    def take(self, ranks: Iterable[int], ready: set[int]) -> dict[int, object]:
        """Waits for no rest of a message: its rank may have been stopped, or have died and left the
        pipe to a child.
        """
        if self._server.fd in ready:
            self._server.pump()
        heard: dict[int, object] = {}
        for rank in ranks:
            process = self._processes[rank]
            channel = process.channel
            try:
                if channel.fileno() in ready and not channel.has_message():
                    channel.read()
                if channel.has_message():  # else there is more of it to come
                    heard[rank] = message = pickle.loads(channel.receive())
                    for fd in message.capture_fds if isinstance(message, wire.Started) else ():
                        with contextlib.suppress(OSError):
                            captured = open(f"/proc/{process.pid}/fd/{fd}", "rb")  # noqa: SIM115
                            process.captured.append(captured)
                elif process.pid in self._server.exit_status and not readable(
                    [channel.fileno()], 0.0
                ):
                    heard[rank] = None  # all that it said is read
            except (EOFError, OSError):
                heard[rank] = None
        return heard

    def ended(self, rank: int) -> wire.Ended:
        process, end = self._processes[rank], time.monotonic() + STATUS_SECONDS
        while (
            process.pid not in self._server.exit_status
            and self._server.alive
            and time.monotonic() < end
        ):
            self._server.pump(0.05)
        if (status := self._server.exit_status.get(process.pid)) is None:
            how = "was lost with the process that had forked it"
        else:
            how = _how_ended(status)
        fatal = answers.fatal_error(answers.file_of(self._folder, rank, "dump"))
        return wire.Ended(
            how, "\n".join(text for text in (self._output(rank), fatal.rstrip()) if text)
        )

    def _output(self, rank: int) -> str:
        """Return what a rank has written to files in the present phase, captured or not."""
        process = self._processes[rank]
        texts = [_read(file) for file in process.captured]
        # Before its first word, it has not said which files pytest captures its output in: its
        # streams lead there.
        for fd in (1, 2) if not process.captured else ():
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/fd/{fd}", "rb") as file:
                if (
                    os.fstat(file.fileno()).st_nlink == 0
                ):  # theirs have no name; the log and a user's file have one
                    texts.append(_read(file))
        with (
            contextlib.suppress(OSError),
            answers.file_of(self._folder, rank, "log").open("rb") as file,
        ):
            texts.append(_read(file))
        return "\n".join(text.rstrip() for text in texts if text.strip())

    def stacks(self, ranks: Iterable[int], kind: str = "stack") -> dict[int, str]:
        pids = {rank: self._processes[rank].pid for rank in ranks}
        stopped = {}
        for rank, pid in pids.items():
            if is_stopped(pid):
                stopped[rank] = f"{answers.STOPPED}: kill -CONT {pid} lets it go on"
        texts = answers.take_answers(
            kind,
            pids.keys() - stopped.keys(),
            self._folder,
            lambda rank, signum: self._server.signal(pids[rank], signum),
        )
        if kind == "output":
            for rank in pids:
                parts = [texts.get(rank, ""), self._output(rank)]
                texts[rank] = "\n".join(filter(None, parts))
        elif kind != "calls":
            texts |= stopped
        return texts

    def interrupt(self, rank: int) -> None:
        self._server.signal(self._processes[rank].pid, signal.SIGINT)

    def has_lost_ranks(self) -> bool:
        self._server.pump()
        return not self._server.alive or any(
            each.pid in self._server.exit_status for each in self._processes.values()
        )

    def kill(self) -> None:
        self._server.kill([process.pid for process in self._processes.values()])
        for process in self._processes.values():
            process.channel.close()
            for file in process.captured:
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Team:
    """The ranks of one world, a part on each machine; they meet at one of the ``stores`` for each
    group they make.
    """

    def __init__(self, size: int, parts: Sequence[Part], stores: Iterator[str]) -> None:
        self.size, self.alive, self.busy, self.used = size, True, False, False
        self.last_test = ""  # that it ran, or that called functions on it
        self._parts, self._stores = parts, stores

    def wait_until_up(self, limit: float = START_LIMIT) -> None:
        """Wait for the first word of every rank; RanksError if they could not be started within
        ``limit`` seconds.
        """
        end, missing = time.monotonic() + limit, set(range(self.size))
        try:
            while missing:
                heard = self.receive(missing, end - time.monotonic())
                if time.monotonic() > end:
                    raise RanksError(self._not_ready(missing, limit))
                for rank, message in heard.items():
                    if message is None:
                        how, words = self.part_of(rank).ended(rank)
                        raise RanksError(f"rank {rank} {how} while it started\n{words}")
                    if isinstance(message, wire.Started) and message.error is not None:
                        raise RanksError(f"rank {rank} could not start:\n{message.error}")
                missing -= heard.keys()
        except (
            BaseException
        ):  # a time limit of another plugin, Ctrl-C: nobody knows of these ranks yet
            self.kill()
            raise

    def _not_ready(self, missing: set[int], limit: float) -> str:
        """Say where each rank is that does not start: plugins and conftest files run there before
        the first test.
        """
        stacks, outputs = self.stacks(missing, kind="dump"), self.stacks(missing, kind="output")
        lines = []
        for rank in sorted(missing):
            lines.append(
                f"rank {rank} did not start within {limit:g} s{answers.whereabouts(stacks[rank])}"
            )
        for rank in sorted(missing):
            lines += ["", f"rank {rank}, Python stack:", answers.readable(stacks[rank])]
            if outputs[rank]:
                lines += [f"rank {rank}, output:", outputs[rank]]
        return "\n".join(lines)

    def send(self, command: object, ranks: Iterable[int] | None = None) -> None:
        """Send a command to all ranks, or to some; the dead are noticed elsewhere."""
        for part, members in self._split(range(self.size) if ranks is None else ranks):
            part.send(command, members)

    def receive(self, ranks: Iterable[int], seconds: float) -> dict[int, object]:
        """The next message of those ``ranks`` that have one; None stands for a dead rank."""
        split = self._split(ranks)
        if heard := self._taken(split, set()):
            return heard
        files = [file for part, members in split for file in part.files(members)]
        return self._taken(split, readable(files, seconds))

    def _taken(self, split: list[tuple[Part, list[int]]], ready: set[int]) -> dict[int, object]:
        return {
            rank: heard
            for part, members in split
            for rank, heard in part.take(members, ready).items()
        }

    def _split(self, ranks: Iterable[int]) -> list[tuple[Part, list[int]]]:
        wanted = list(ranks)
        split = [(part, [rank for rank in wanted if rank in part.ranks]) for part in self._parts]
        return [(part, members) for part, members in split if members]

    def part_of(self, rank: int) -> Part:
        """Return what to ask how a rank has ended, or to pass Ctrl-C on to it."""
        return next(part for part in self._parts if rank in part.ranks)

    def stacks(self, ranks: Iterable[int], *, kind: str = "stack") -> dict[int, str]:
        """Return what running ranks answer: "stack", "calls", or "dump" before the end; "" for one
        that does not.

        "output" is what they have written; of a rank that does not answer, in the present phase.
        """
        split = self._split(ranks)
        return {
            rank: text for part, own in split for rank, text in part.stacks(own, kind=kind).items()
        }

    def heal(self, condition: wire.GroupCondition) -> None:
        """Make the group fit for the next test, or end the team."""
        if condition in ("dead", "killed", "disagreeing"):
            self.kill()  # to destroy a group waits for the collective that only some have issued
        elif condition != "fit":
            is_left = condition == "left"
            command = (
                wire.JoinGroup(next(self._stores), self.size)
                if is_left
                else wire.Do("drop subgroups")
            )
            if self.has_lost_ranks() or not self._obeyed(command, SETTLE_LIMIT):
                self.kill()

    def has_lost_ranks(self) -> bool:
        """Return whether a rank is known to have ended."""
        return any(part.has_lost_ranks() for part in self._parts)

    def _obeyed(self, command: object, limit: float) -> bool:
        """Send a command; return whether every rank sends it back in time.

        Other messages are passed over.
        """
        self.send(command)
        end, missing = time.monotonic() + limit, set(range(self.size))
        while missing and time.monotonic() < end:
            for rank, message in self.receive(missing, end - time.monotonic()).items():
                if message is None:
                    return False
                if message == command:
                    missing.discard(rank)
        return not missing

    def stop(self) -> list[str]:
        """End the ranks: politely if they are idle. Returns what went wrong as their sessions
        ended.
        """
        if not self.alive or self.busy:
            self.kill()
            return []
        try:
            if not self.has_lost_ranks():
                self.send(wire.Do("stop"))
                said = self._last_words(STOP_LIMIT)
            else:
                said = self._last_words(0.0)
        finally:
            self.kill()
        return [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by(said).items()]

    def _last_words(self, limit: float) -> list[tuple[int, str]]:
        """Return what each rank says that was asked to stop, or how it ended instead; with no
        ``limit`` only the latter.
        """
        said = []
        end, missing = time.monotonic() + limit, set(range(self.size))
        while missing:
            heard = self.receive(missing, end - time.monotonic())
            for rank, message in heard.items():
                if isinstance(message, wire.Stopped):
                    said += [(rank, problem) for problem in message.problems]
                elif message is None:
                    how, words = self.part_of(rank).ended(rank)
                    said.append((rank, f"{how} after its last test\n{words}".rstrip()))
                else:
                    continue
                missing.discard(rank)
            if not heard and time.monotonic() >= end:
                break
        if limit and missing:
            for rank, stack in self.stacks(missing).items():
                text = f"its session did not end within {limit:g} s{answers.whereabouts(stack)}"
                said.append((rank, f"{text}\n{answers.readable(stack)}"))
        return said

    def kill(self) -> None:
        """End the ranks at once, with their children."""
        if self.alive:
            self.alive = False
            for part in self._parts:
                part.kill()


def _how_ended(status: int) -> str:
    return (
        f"was killed by {signal.Signals(-status).name}"
        if status < 0
        else f"exited with status {status}"
    )


def _read(file: BinaryIO) -> str:
    with contextlib.suppress(OSError):
        file.seek(max(0, os.fstat(file.fileno()).st_size - OUTPUT_LIMIT))
        return file.read(OUTPUT_LIMIT).decode(errors="replace")
    return ""
