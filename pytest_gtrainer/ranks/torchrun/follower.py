"""The processes of torchrun other than rank 0.

The first one of a node forks the node's ranks. The others only wait for the end of the run.
"""

import contextlib
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
from pytest_gtrainer.ranks.team import LocalRanks, RanksError, ready_files
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
        # Rank 0 listens on all interfaces only if there is another node.
        host = "localhost"
        if launch.local_size != launch.size:
            host = os.environ["MASTER_ADDR"]
        line = Line(socket.create_connection((host, int(port))), key, rank_0=False)
        return _Follower(launch, config, line).serve()
    except Refused as error:
        cause = str(error)
    except (RuntimeError, OSError, EOFError):
        # torch's errors of a lost store are RuntimeErrors.
        cause = "rank 0, which reports for all ranks, has ended"
    print(f"gtrainer: {cause}: rank {launch.rank} ends too", file=sys.stderr, flush=True)
    return 1


class _Follower:
    """Runs the teams of this node for rank 0, and sends on what their ranks say.

    ``running`` has the ranks of each team that have not ended.
    """

    def __init__(self, launch: Launch, config: pytest.Config, line: Line) -> None:
        # Only the first process of a node has ranks.
        count = launch.local_size if launch.local_rank == 0 else 0
        self.ranks = range(launch.rank, launch.rank + count)
        self.config = config
        self.line = line
        self.pool = Pool(config)
        self.teams: dict[str, LocalRanks] = {}
        self.running: dict[str, list[int]] = {}

    def serve(self) -> int:
        """Obey rank 0, and return the exit status that it sends at the end.

        Raises:
            EOFError, OSError: rank 0 is gone.
        """
        try:
            self.line.send((self.ranks.start, self.ranks.stop))
            while True:
                files = [self.line.fileno()]
                for team, ranks in self.running.items():
                    files += self.teams[team].files(ranks)
                if self.line.fileno() in ready_files(files, 3600.0):
                    for command in self.line.take():
                        if isinstance(command, wire.Over):
                            return command.status
                        self._obey(command)
                for team, ranks in self.running.items():
                    self._pass_on(team, ranks)
        finally:
            with contextlib.ExitStack() as stack:  # the pool last, each in any case
                stack.callback(self.pool.close)
                for each in self.teams.values():
                    stack.callback(each.kill)

    def _pass_on(self, team: str, ranks: list[int]) -> None:
        """Send rank 0 what ``ranks`` have said; take those that have ended out of the list."""
        part = self.teams[team]
        while heard := part.take(tuple(ranks), ready_files(part.files(ranks), 0.0)):
            for rank, message in heard.items():
                if message is None:
                    ranks.remove(rank)
                    message = part.ended(rank)
                self.line.send(wire.FromRank(team, rank, message))

    def _obey(self, command: object) -> None:
        match command:
            case wire.StartTeam():
                self._start(command)
            # A team whose start failed is not in the table: rank 0 learns of it by ``Started``.
            case wire.ToTeam(team, "send", arguments) if team in self.teams:
                self.teams[team].send(*arguments)
            case wire.ToTeam(team, "stacks", arguments) if team in self.teams:
                stacks = self.teams[team].stacks(*arguments)
                self.line.send(wire.FromRank(team, None, stacks))
            case wire.ToTeam(team, "kill") if team in self.teams:
                self.teams[team].kill()
                del self.running[team], self.teams[team]

    def _start(self, command: wire.StartTeam) -> None:
        team = command.team
        ranks = range(self.ranks.start, min(self.ranks.stop, command.size))
        plan = self.pool.plan(command.size, rank_environment(self.config), command.worker)
        plan = replace(plan, ranks=ranks, store=team)
        try:
            self.teams[team] = LocalRanks(self.pool.forkserver(), plan)
        except RanksError as error:
            self.line.send(wire.FromRank(team, ranks[0], wire.Started(str(error))))
        else:
            self.running[team] = list(ranks)
