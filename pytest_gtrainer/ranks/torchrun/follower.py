"""Every other process that torchrun has started: the first of a node forks its ranks, the others
wait for the end.
"""

import os
import signal
import socket
import sys
from dataclasses import replace
from datetime import timedelta

import pytest

from pytest_gtrainer.devices import Launch
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.pool import Pool, rank_environment
from pytest_gtrainer.ranks.team import LocalRanks, RanksError, readable
from pytest_gtrainer.ranks.torchrun.line import Line, Refused, shared_key
from pytest_gtrainer.ranks.torchrun.nodes import PORT, connect

FOREVER = timedelta(days=7)  # a limit that is reached would make torch write warnings


def follow_rank_0(launch: Launch, config: pytest.Config) -> int:
    """Do what rank 0 says until the run is over, report nothing; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    try:
        key, store = shared_key(), connect()
        store.wait([PORT], FOREVER)
        port = store.get(PORT)
        if not port.isdigit() or int(port) > 65535:
            raise Refused(f"torchrun's store holds as {PORT!r} what is no port: {port[:40]!r}")
        host = (
            "localhost" if launch.local_size == launch.size else os.environ["MASTER_ADDR"]
        )  # as rank 0 listens
        line = Line(socket.create_connection((host, int(port))), key, rank_0=False)
        return _Follower(launch, config, line).serve()
    except (
        RuntimeError,
        OSError,
        EOFError,
        Refused,
    ) as error:  # torch's errors of a lost store are RuntimeErrors
        told = (
            str(error)
            if isinstance(error, Refused)
            else "rank 0, which reports for all ranks, has ended"
        )
        print(f"gtrainer: {told}: rank {launch.rank} ends too", file=sys.stderr, flush=True)
        return 1


class _Follower:
    """Forks the ranks of this node as rank 0 says, and passes on what it and they say, while they
    are ``running``.
    """

    def __init__(self, launch: Launch, config: pytest.Config, line: Line) -> None:
        first, last = (
            launch.rank,
            launch.rank + (launch.local_size if launch.local_rank == 0 else 0),
        )
        self.ranks, self.config, self.line, self.pool = (
            range(first, last),
            config,
            line,
            Pool(config),
        )
        self.teams: dict[str, LocalRanks] = {}
        self.running: dict[str, list[int]] = {}

    def serve(self) -> int:
        """The exit status, once rank 0 has told it; EOFError or OSError if it is gone."""
        try:
            self.line.send((self.ranks.start, self.ranks.stop))
            while True:
                files = [
                    file
                    for team, ranks in self.running.items()
                    for file in self.teams[team].files(ranks)
                ]
                if self.line.fileno() in readable([self.line.fileno(), *files], 3600.0):
                    for command in self.line.take():
                        if isinstance(command, wire.Over):
                            return command.status
                        self._obey(command)
                for team, ranks in self.running.items():
                    self._pass_on(team, ranks)
        finally:
            for each in self.teams.values():
                each.kill()
            self.pool.close()

    def _pass_on(self, team: str, ranks: list[int]) -> None:
        part = self.teams[team]
        while heard := part.take(tuple(ranks), readable(part.files(ranks), 0.0)):
            for rank, message in heard.items():
                if message is None:
                    ranks.remove(rank)
                    message = part.ended(rank)
                self.line.send(wire.FromRank(team, rank, message))

    def _obey(self, command: object) -> None:
        match command:
            case wire.StartTeam(team):
                ranks = range(self.ranks.start, min(self.ranks.stop, command.size))
                plan = self.pool.plan(command.size, rank_environment(self.config), command.worker)
                try:
                    part = LocalRanks(
                        self.pool.forkserver(), replace(plan, ranks=ranks, store=team)
                    )
                except RanksError as error:
                    self.line.send(wire.FromRank(team, ranks[0], wire.Started(str(error))))
                else:
                    self.teams[team], self.running[team] = part, list(ranks)
            case wire.ToTeam(team, "send" | "stacks" | "kill" as method, arguments) if (
                team in self.teams
            ):
                answer = getattr(self.teams[team], method)(*arguments)
                if method == "stacks":
                    self.line.send(wire.FromRank(team, None, answer))
                elif method == "kill":
                    del self.running[team], self.teams[team]
