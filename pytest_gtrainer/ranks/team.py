"""Forked ranks, as the parent sees them: the forkserver, and teams of ranks.

A *team* has the ranks of one world, and stays warm between tests. Its ranks on one machine are a
*part*; only under torchrun there are several.
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
from pytest_gtrainer.ranks.forkserver import (
    FOLDER_VARIABLE,
    PRELOADING,
    is_stopped,
    is_tracker,
    refuse_preload,
)
from pytest_gtrainer.worlds import ranks_by, ranks_text

# The imports take 3 to 6 s of CPU time; xdist workers on a busy machine start theirs together.
SERVER_START_LIMIT = 300.0
SERVER_END_LIMIT = 10.0
LEAST_START_LIMIT, START_LIMIT = 20.0, 120.0
SETTLE_LIMIT = 10.0
STOP_LIMIT = 30.0
STATUS_SECONDS = 10.0  # for the exit status of a rank whose channel is closed
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


def ready_files(fds: Iterable[int], seconds: float) -> set[int]:
    """Return the descriptors of ``fds`` that can be read, or whose other end is closed.

    Wait ``seconds`` for the first one, an hour at most.
    """
    # multiprocessing's ``wait`` makes a selector each time, which costs more than all else in a
    # test.
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(min(max(0.0, seconds), 3600.0) * 1000)}


class ForkServer:
    """A running forkserver.

    Attributes:
        exit_status: of the ranks that have ended, by pid.
        folder: holds the files of all its ranks, and lives as long as the forkserver.
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
        """Return why the forkserver has ended or hangs.

        These are the module of the user that it was importing, and the output that it wrote.
        """
        text = module = ""
        with contextlib.suppress(OSError):
            text = (self.folder / "forkserver.log").read_text(errors="replace")[-4000:]
        with contextlib.suppress(OSError):
            module = (self.folder / PRELOADING).read_text()
        if module:
            wrong = f"did not end within {SERVER_START_LIMIT:g} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                # Its end of the connection is closed a little earlier.
                status = self._process.wait(1.0)
                wrong = f"ends the process that forks ranks: it {_how_ended(status)}"
            refusal = refuse_preload(module, f"whose import {wrong}")
            text = f"{refusal}\n{text}" if text else refusal
        return text or "it ended without a word"

    def fork(self, setups: list[wire.RankSetup]) -> list[tuple[int, wire.Channel]]:
        """Fork a rank for each setup; return its pid and channel.

        Raises:
            RanksError: it cannot, with what the forkserver wrote.
        """
        if not self._ready:
            self._wait_until_ready()
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
        except BaseException:
            # Broken off in the middle: nobody knows whose the ranks are that it forks now.
            for channel in channels:
                channel.close()
            self.close()
            raise
        pids, self._forked = self._forked, []
        return list(zip(pids, channels, strict=True))

    def _wait_until_ready(self) -> None:
        message: object = None
        # A forkserver that ends as it starts sends nothing.
        with contextlib.suppress(EOFError, OSError):
            if self.conn.poll(SERVER_START_LIMIT):
                message = self.conn.recv()
        error = message.error if isinstance(message, wire.Started) else self._log()
        if error is not None:
            self.close()
            raise RanksError(f"the process that forks ranks did not start: {error}")
        self._ready = True

    def pump(self, seconds: float = 0.0) -> None:
        """Read the forkserver's messages; wait up to ``seconds`` for the first one."""
        try:
            while self.alive and ready_files([self.fd], seconds):
                message = self.conn.recv()
                if isinstance(message, wire.Exited):
                    self.exit_status[message.pid] = message.status
                elif isinstance(message, wire.Forked):
                    # An earlier rank may have had this pid.
                    self.exit_status.pop(message.pid, None)
                    self._forked.append(message.pid)
                seconds = 0.0
        except (EOFError, OSError):
            self.alive = False
            self._kill_left_behind()

    def _kill_left_behind(self) -> None:
        """Kill what ranks had started, in place of a forkserver that is gone.

        These processes have the forkserver's folder in their environment, as the ranks themselves.
        """
        # A process that is just being started may be missed: it comes after the list was read, or
        # has no environment yet. So look until there was none twice.
        looks_in_vain, end = 0, time.monotonic() + SERVER_END_LIMIT
        while looks_in_vain < 2 and time.monotonic() < end:
            found = self._look_for_left_behind()
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            looks_in_vain = 0 if found else looks_in_vain + 1
            time.sleep(0.02)

    def _look_for_left_behind(self) -> list[int]:
        mark = f"{FOLDER_VARIABLE}={self.folder}".encode()
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                pid = int(file.parent.name)
                if mark in file.read_bytes().split(b"\0") and not is_tracker(pid):
                    found.append(pid)
        return found

    def signal(self, pid: int, signum: int) -> None:
        """Signal a rank, through the forkserver.

        Only its parent knows that a pid is still the rank's.
        """
        with contextlib.suppress(OSError):
            self.conn.send(wire.SendSignal(pid, signum))

    def kill(self, pids: list[int]) -> None:
        """Kill ranks with their children, and wait until they are gone."""
        for pid in pids:
            if pid not in self.exit_status:
                self.signal(pid, signal.SIGKILL)
        end = time.monotonic() + SERVER_END_LIMIT
        for pid in pids:
            while self.alive and pid not in self.exit_status and time.monotonic() < end:
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
        if self._process.returncode != 0:  # it was killed, here or by somebody else
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
        # It may be another user's, be held, or have gone meanwhile.
        with contextlib.suppress(OSError), lock.open("r+") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)


@dataclass(slots=True)
class _RankProcess:
    pid: int
    channel: wire.Channel
    captured: list[BinaryIO] = field(default_factory=list)

    def open_captured(self, fds: Iterable[int]) -> None:
        """Open the files in which pytest captures the rank's output: they have no name."""
        for fd in fds:
            with contextlib.suppress(OSError):
                self.captured.append(open(f"/proc/{self.pid}/fd/{fd}", "rb"))  # noqa: SIM115


class Part(Protocol):
    """The ranks of a team on one machine.

    ``files`` are readable when ranks have sent something. ``take`` returns one message of each rank
    that has any, and None for a rank that has ended.
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
    """The ranks of a team on this machine, forked from one ``plan``."""

    def __init__(self, server: ForkServer, plan: wire.RankSetup) -> None:
        self.ranks = plan.ranks
        self._server = server
        self._folder = server.folder / f"team{next(_numbers)}"
        self._folder.mkdir()
        self.stores = (str(self._folder / f"store{number}") for number in itertools.count())
        store = plan.store or next(self.stores)
        setups = []
        for rank in plan.ranks:
            basetemp = plan.basetemp
            if basetemp is not None:
                basetemp = f"{basetemp}/{self._folder.name}-rank{rank}"
            worker = {**plan.worker, "gt_rank": rank}
            setups.append(
                replace(
                    plan,
                    rank=rank,
                    folder=str(self._folder),
                    store=store,
                    basetemp=basetemp,
                    worker=worker,
                )
            )
        self._processes: dict[int, _RankProcess] = {}
        for rank, (pid, channel) in zip(plan.ranks, server.fork(setups), strict=True):
            self._processes[rank] = _RankProcess(pid, channel)

    def send(self, command: object, ranks: Iterable[int]) -> None:
        message = pickle.dumps(command)
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._processes[rank].channel.send(message)

    def files(self, ranks: Iterable[int]) -> list[int]:
        return [self._server.fd, *(self._processes[rank].channel.fileno() for rank in ranks)]

    def take(self, ranks: Iterable[int], ready: set[int]) -> dict[int, object]:
        """Do not wait for the rest of a message.

        Its rank may have been stopped, or have died and left the pipe to a child.
        """
        if self._server.fd in ready:
            self._server.pump()
        taken: dict[int, object] = {}
        for rank in ranks:
            process = self._processes[rank]
            channel = process.channel
            try:
                if channel.fileno() in ready and not channel.has_message():
                    channel.read()
                if channel.has_message():
                    message = pickle.loads(channel.receive())
                    taken[rank] = message
                    if isinstance(message, wire.Started):
                        process.open_captured(message.capture_fds)
                    continue
                # What an ended rank has sent is still read.
                has_ended = process.pid in self._server.exit_status
                if has_ended and not ready_files([channel.fileno()], 0.0):
                    taken[rank] = None
            except (EOFError, OSError):
                taken[rank] = None
        return taken

    def ended(self, rank: int) -> wire.Ended:
        process = self._processes[rank]
        exit_status = self._server.exit_status
        # The channel of a rank is closed a little before the forkserver reports its end.
        end = time.monotonic() + STATUS_SECONDS
        while process.pid not in exit_status and self._server.alive and time.monotonic() < end:
            self._server.pump(0.05)
        how = "was lost with the process that had forked it"
        if process.pid in exit_status:
            how = _how_ended(exit_status[process.pid])
        fatal = answers.fatal_error(answers.file_of(self._folder, rank, "dump"))
        texts = [self._output(rank), fatal.rstrip()]
        return wire.Ended(how, "\n".join(filter(None, texts)))

    def _output(self, rank: int) -> str:
        """Return what a rank has written to files in the present phase, captured or not."""
        process = self._processes[rank]
        texts = [_tail(file) for file in process.captured]
        if not process.captured:
            # The rank has not yet sent its capture files, but its streams may lead there already.
            for fd in (1, 2):
                path = f"/proc/{process.pid}/fd/{fd}"
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    # pytest's have no name; the log and a user's file have one.
                    if os.fstat(file.fileno()).st_nlink == 0:
                        texts.append(_tail(file))
        log = answers.file_of(self._folder, rank, "log")
        with contextlib.suppress(OSError), log.open("rb") as file:
            texts.append(_tail(file))
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
        elif kind != "calls":  # these are JSON
            texts |= stopped
        return texts

    def interrupt(self, rank: int) -> None:
        self._server.signal(self._processes[rank].pid, signal.SIGINT)

    def has_lost_ranks(self) -> bool:
        self._server.pump()
        if not self._server.alive:
            return True
        return any(each.pid in self._server.exit_status for each in self._processes.values())

    def kill(self) -> None:
        try:
            self._server.kill([process.pid for process in self._processes.values()])
        finally:
            for process in self._processes.values():
                process.channel.close()
                for file in process.captured:
                    file.close()
            shutil.rmtree(self._folder, ignore_errors=True)


class Team:
    """The ranks of one world, a part on each machine.

    For each group that they make they meet at the next one of ``stores``.
    """

    def __init__(self, size: int, parts: Sequence[Part], stores: Iterator[str]) -> None:
        self.size = size
        self.alive = True
        self.busy = False
        self.used = False
        self.last_test = ""  # the test that ran on it, or called functions on it
        self._parts, self._stores = parts, stores

    def wait_until_up(self, limit: float = START_LIMIT) -> None:
        """Wait for the first message of every rank.

        Raises:
            RanksError: a rank could not start, or not within ``limit`` seconds.
        """
        end, missing = time.monotonic() + limit, set(range(self.size))
        try:
            while missing:
                received = self.receive(missing, end - time.monotonic())
                if time.monotonic() > end:
                    raise RanksError(self._not_ready(missing, limit))
                for rank, message in received.items():
                    if message is None:
                        how, words = self.part_of(rank).ended(rank)
                        raise RanksError(f"rank {rank} {how} while it started\n{words}")
                    if isinstance(message, wire.Started) and message.error is not None:
                        raise RanksError(f"rank {rank} could not start:\n{message.error}")
                missing -= received.keys()
        except BaseException:
            # Also at Ctrl-C and the time limit of a plugin: nobody else knows these ranks yet.
            self.kill()
            raise

    def _not_ready(self, missing: set[int], limit: float) -> str:
        """Return where each rank is that does not start.

        Plugins and conftest files run there before the first test.
        """
        stacks, outputs = self.stacks(missing, kind="dump"), self.stacks(missing, kind="output")
        lines = []
        for rank in sorted(missing):
            lines.append(
                f"rank {rank} did not start within {limit:g} s{answers.whereabouts(stacks[rank])}"
            )
        for rank in sorted(missing):
            lines += [
                "",
                f"rank {rank}, Python stack:",
                answers.without_pytest_frames(stacks[rank]),
            ]
            if outputs[rank]:
                lines += [f"rank {rank}, output:", outputs[rank]]
        return "\n".join(lines)

    def send(self, command: object, ranks: Iterable[int] | None = None) -> None:
        """Send a command to all ranks, or to some; the dead are noticed elsewhere."""
        for part, members in self._split(range(self.size) if ranks is None else ranks):
            part.send(command, members)

    def receive(self, ranks: Iterable[int], seconds: float) -> dict[int, object]:
        """Return the next message of those ``ranks`` that have one; None for a dead rank.

        Wait up to ``seconds`` for the first message.
        """
        split = self._split(ranks)
        # A message that came with the one before does not make its file readable.
        taken = _take_from(split, set())
        if taken:
            return taken
        files: list[int] = []
        for part, members in split:
            files += part.files(members)
        return _take_from(split, ready_files(files, seconds))

    def _split(self, ranks: Iterable[int]) -> list[tuple[Part, list[int]]]:
        """Return the parts that have some of ``ranks``, each with those."""
        wanted = list(ranks)
        split = []
        for part in self._parts:
            members = [rank for rank in wanted if rank in part.ranks]
            if members:
                split.append((part, members))
        return split

    def part_of(self, rank: int) -> Part:
        """Return the part that has a rank."""
        return next(part for part in self._parts if rank in part.ranks)

    def stacks(self, ranks: Iterable[int], *, kind: str = "stack") -> dict[int, str]:
        """Return an answer of each rank, without waiting for its test; "" if it does not answer.

        Args:
            ranks: those to ask.
            kind: "stack"; "calls" of collectives; "dump", the stack that faulthandler writes,
                before the ranks are ended; or "output", what they have written, in the present
                phase only if a rank does not answer.
        """
        texts: dict[int, str] = {}
        for part, members in self._split(ranks):
            texts |= part.stacks(members, kind=kind)
        return texts

    def heal(self, condition: wire.GroupCondition) -> None:
        """Make the group fit for the next test, or end the team."""
        if condition == "fit":
            return
        command: wire.JoinGroup | wire.Do
        if condition == "left":
            command = wire.JoinGroup(next(self._stores), self.size)
        elif condition == "with subgroups":
            command = wire.Do("drop subgroups")
        else:
            # To destroy a group would wait for a collective that only some have issued.
            self.kill()
            return
        if self.has_lost_ranks() or not self._is_obeyed(command, SETTLE_LIMIT):
            self.kill()

    def has_lost_ranks(self) -> bool:
        """Return whether a rank is known to have ended."""
        return any(part.has_lost_ranks() for part in self._parts)

    def _is_obeyed(self, command: object, limit: float) -> bool:
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
        """End the ranks, and return what went wrong as their sessions ended.

        Idle ranks end their sessions themselves; a busy team is killed.
        """
        if not self.alive or self.busy:
            self.kill()
            return []
        try:
            if self.has_lost_ranks():
                problems = self._last_problems(0.0)
            else:
                self.send(wire.Do("stop"))
                problems = self._last_problems(STOP_LIMIT)
        finally:
            self.kill()
        lines = []
        for text, ranks in ranks_by(problems).items():
            lines.append(f"{ranks_text(ranks)}: {text}")
        return lines

    def _last_problems(self, limit: float) -> list[tuple[int, str]]:
        """Return what went wrong on each rank that was asked to stop.

        With a ``limit`` of 0 only the ranks that have ended are asked how they did.
        """
        problems = []
        end, missing = time.monotonic() + limit, set(range(self.size))
        while missing:
            received = self.receive(missing, end - time.monotonic())
            for rank, message in received.items():
                if isinstance(message, wire.Stopped):
                    problems += [(rank, problem) for problem in message.problems]
                elif message is None:
                    how, words = self.part_of(rank).ended(rank)
                    problems.append((rank, f"{how} after its last test\n{words}".rstrip()))
                else:
                    continue
                missing.discard(rank)
            if not received and time.monotonic() >= end:
                break
        if limit and missing:
            for rank, stack in self.stacks(missing).items():
                text = f"its session did not end within {limit:g} s{answers.whereabouts(stack)}"
                problems.append((rank, f"{text}\n{answers.without_pytest_frames(stack)}"))
        return problems

    def kill(self) -> None:
        """End the ranks at once, with their children."""
        if self.alive:
            self.alive = False
            with contextlib.ExitStack() as stack:  # each part in any case
                for part in reversed(self._parts):
                    stack.callback(part.kill)


def _take_from(split: list[tuple[Part, list[int]]], ready: set[int]) -> dict[int, object]:
    taken: dict[int, object] = {}
    for part, members in split:
        taken |= part.take(members, ready)
    return taken


def _how_ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _tail(file: BinaryIO) -> str:
    """Return the last ``OUTPUT_LIMIT`` bytes of a file as text."""
    with contextlib.suppress(OSError):
        file.seek(max(0, os.fstat(file.fileno()).st_size - OUTPUT_LIMIT))
        return file.read(OUTPUT_LIMIT).decode(errors="replace")
    return ""
