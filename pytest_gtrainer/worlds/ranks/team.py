"""A team: the rank processes of one world, kept warm between tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pytest_gtrainer.worlds.ranks import wire
from pytest_gtrainer.worlds.ranks.channel import Channel
from pytest_gtrainer.worlds.ranks.launcher import ForkServer, RanksError, readable
from pytest_gtrainer.worlds.ranks.outcome import Outcome, disagreement
from pytest_gtrainer.worlds.ranks.stacks import (
    STACK_SIGNAL,
    fatal_error,
    log_file,
    stack_file,
    take_stacks,
)

START_LIMIT = 120.0
SETTLE_LIMIT = 10.0
STOP_LIMIT = 10.0
STATUS_SECONDS = 1.0
OUTPUT_LIMIT = 64 * 1024

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class TeamPlan:
    """What the ranks of a team are: their number, their device, and the pytest that they repeat."""

    size: int
    device: str
    backend: str
    cwd: str
    args: tuple[str, ...]
    worker: Mapping[str, Any]
    basetemp: str
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    live_output: bool

    def setup(self, rank: int, folder: Path, store: Path) -> wire.RankSetup:
        identity = {
            "gt_rank": rank,
            "gt_size": self.size,
            "gt_device": self.device,
            "gt_backend": self.backend,
        }
        return wire.RankSetup(
            rank=rank, size=self.size, device=self.device, backend=self.backend,
            folder=str(folder), store=str(store), environ=self.environ, sys_path=self.sys_path,
            cwd=self.cwd, args=self.args,
            basetemp=f"{self.basetemp}/{folder.name}-rank{rank}",
            worker={**self.worker, **identity}, live_output=self.live_output,
        )  # fmt: skip


@dataclass(slots=True)
class RankProcess:
    """The parent's handle of one rank."""

    rank: int
    pid: int
    channel: Channel
    captured: list[BinaryIO] = field(default_factory=list)


class Team:
    """Starts the ranks of a plan and keeps their process group fit for the next test."""

    def __init__(self, server: ForkServer, plan: TeamPlan) -> None:
        self.plan, self.size = plan, plan.size
        self.alive = True
        self.busy = False
        self._server = server
        self._folder = server.folder / f"team{next(_numbers)}"
        self._folder.mkdir()
        self._stores = itertools.count()
        store = self._new_store()
        setups = [plan.setup(rank, self._folder, store) for rank in range(plan.size)]
        self.ranks = [
            RankProcess(rank, pid, channel) for rank, (pid, channel) in enumerate(server.fork(setups))
        ]
        try:
            self._wait_until_up()
        except BaseException:  # a time limit of another plugin, Ctrl-C: nobody knows of these ranks yet
            self.kill()
            raise

    def _new_store(self) -> Path:
        return self._folder / f"store{next(self._stores)}"

    # --- starting -------------------------------------------------------------------------

    def _wait_until_up(self) -> None:
        end = time.monotonic() + START_LIMIT
        missing = {rank.channel.fileno(): rank for rank in self.ranks}
        while missing:
            ready = readable(missing, end - time.monotonic())
            if not ready:
                self._give_up(f"{len(missing)} of {self.size} ranks were not ready within {START_LIMIT:g} s")
            for fd in sorted(ready):
                self._take_up(missing.pop(fd))

    def _take_up(self, rank: RankProcess) -> None:
        try:
            message: Any = pickle.loads(rank.channel.receive())
        except (EOFError, OSError):
            how = self.how_it_ended(rank)
            self._give_up(f"rank {rank.rank} {how} while it started\n{self.last_words(rank)}")
        if isinstance(message, wire.StartFailed):
            self._give_up(f"rank {rank.rank} could not start:\n{message.text}")
        for fd in message.capture_fds:
            with contextlib.suppress(OSError):
                rank.captured.append(open(f"/proc/{rank.pid}/fd/{fd}", "rb"))  # noqa: SIM115

    def _give_up(self, why: str) -> None:
        self.kill()
        raise RanksError(why)

    # --- talking --------------------------------------------------------------------------

    def send(self, command: object, ranks: Iterable[int] | None = None) -> None:
        """Send a command to all ranks, or to some; the dead are noticed elsewhere."""
        message = pickle.dumps(command)
        for rank in range(self.size) if ranks is None else ranks:
            with contextlib.suppress(OSError):
                self.ranks[rank].channel.send(message)

    def receive(self, ranks: Iterable[int], seconds: float) -> dict[int, object]:
        """The next message of those ``ranks`` that have one; None stands for a dead rank.

        Waits for no rest of a message: its rank may have been stopped, or have died and left the pipe to a child.
        """
        fds = {self.ranks[rank].channel.fileno(): rank for rank in ranks}
        read = {fd for fd, rank in fds.items() if self.ranks[rank].channel.has_message()}
        ended = {fd for fd, rank in fds.items() if self.ranks[rank].pid in self._server.exit_status}
        ready = read | readable([*fds, self._server.fd], 0.0 if read or ended else seconds)
        if self._server.fd in ready:
            self._server.pump()
        heard: dict[int, object] = dict.fromkeys(fds[fd] for fd in ended - ready)  # all that they said is read
        for fd, rank in fds.items():
            if fd in ready:
                heard.update((rank, message) for message in _next_message(self.ranks[rank].channel))
        return heard

    def how_it_ended(self, rank: RankProcess) -> str:
        """The end of a process in words."""
        end = time.monotonic() + STATUS_SECONDS
        while rank.pid not in self._server.exit_status and self._server.alive and time.monotonic() < end:
            self._server.pump(0.05)
        status = self._server.exit_status.get(rank.pid)
        if status is None:
            return "was lost with the process that had forked it"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    def last_words(self, rank: RankProcess) -> str:
        """What a dead rank wrote that no report carries: captured output, log, fatal error."""
        texts = [_read(file) for file in rank.captured]
        log = log_file(self._folder, rank.rank)
        if log.exists():
            with log.open("rb") as file:
                texts.append(_read(file))
        texts.append(fatal_error(stack_file(self._folder, rank.rank)))
        return "\n".join(text.rstrip() for text in texts if text.strip())

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """The Python stacks of running ranks."""
        files = {rank: stack_file(self._folder, rank) for rank in ranks}
        return take_stacks(files, lambda rank: self._server.signal(self.ranks[rank].pid, STACK_SIGNAL))

    # --- between tests ---------------------------------------------------------------------

    def heal(self, outcome: Outcome) -> None:
        """Make the group fit for the next test, or end the team.

        Ranks that disagree have a collective under way that will never end, and destroying
        its group would wait for it: such a team is ended.
        """
        agreed = outcome.agreed()
        if agreed is not None and not agreed.state.subgroups:
            return None
        if outcome.killed or outcome.dead or (outcome.is_troubled and self.has_lost_ranks()):
            return self.kill()
        states = {rank: answer.state for rank, answer in outcome.answers.items()}
        if outcome.unblocked_at is not None or not all(state.intact for state in states.values()):
            self._settle(wire.JoinGroup(str(self._new_store()), self.size), wire.JoinedGroup)
        elif disagreement(states):
            self.kill()
        elif any(state.subgroups for state in states.values()):
            self._settle(wire.DropSubgroups(), wire.DroppedSubgroups)
        return None

    def _settle(self, command: object, answer: type) -> None:
        self.send(command)
        if not self._await(answer, SETTLE_LIMIT):
            self.kill()

    def has_lost_ranks(self) -> bool:
        """Whether a rank is known to have ended."""
        self._server.pump()
        return not self._server.alive or any(rank.pid in self._server.exit_status for rank in self.ranks)

    def _await(self, kind: type, limit: float) -> bool:
        """Whether every rank says a message of that kind in time; others are passed over."""
        end, missing = time.monotonic() + limit, set(range(self.size))
        while missing and time.monotonic() < end:
            for rank, message in self.receive(missing, end - time.monotonic()).items():
                if message is None:
                    return False
                if isinstance(message, kind):
                    missing.discard(rank)
        return not missing

    # --- ending -----------------------------------------------------------------------------

    def stop(self) -> None:
        """End the ranks: politely if they are idle."""
        try:
            if self.alive and not self.busy and self._server.alive:
                self.send(wire.Stop())
                self._await(wire.Stopped, STOP_LIMIT)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the ranks at once, with their children."""
        if not self.alive:
            return
        self.alive = False
        self._server.kill([rank.pid for rank in self.ranks])
        for rank in self.ranks:
            rank.channel.close()
            for file in rank.captured:
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _next_message(channel: Channel) -> list[object]:
    """The next message, or None for the end; nothing if there is more of it to come."""
    try:
        if not channel.has_message():
            channel.read()
        return [pickle.loads(channel.receive())] if channel.has_message() else []
    except (EOFError, OSError):
        return [None]


def _read(file: BinaryIO) -> str:
    with contextlib.suppress(OSError):
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - OUTPUT_LIMIT))
        return file.read(OUTPUT_LIMIT).decode(errors="replace")
    return ""
