"""Rank 0's side: the other processes of the run, and a team's ranks on other nodes."""

import contextlib
import itertools
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch.distributed as dist

from pytest_gtrainer.devices import Launch
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.team import RanksError, ready_files
from pytest_gtrainer.ranks.torchrun.line import Line, Refused, shared_key
from pytest_gtrainer.worlds import ranks_text

PORT = "port"
NODES_LIMIT = 300.0  # seconds until all nodes of a world have connected
STACKS_SECONDS = 5.0
FAREWELL_SECONDS = 10.0


def connect() -> dist.Store:
    """Return the store of torchrun's rendezvous, with a prefix of our own."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore("gtrainer", store)


class Nodes:
    """The other processes that torchrun started.

    ``write_line`` prints a sentence for each connection that is refused.
    """

    def __init__(self, launch: Launch, write_line: Callable[[str], None]) -> None:
        self._launch = launch
        self._write_line = write_line
        self._key = shared_key()
        self._numbers = itertools.count()
        self._nodes: list[Node] = []
        self._is_late = False  # a node that has not come once is not waited for again
        # With one node nobody needs to reach the port from outside.
        host = "localhost" if launch.local_size == launch.size else ""
        self._server = socket.create_server((host, 0))
        # Kept, since the store may live in this process.
        self._store = connect()
        self._store.set(PORT, str(self._server.getsockname()[1]))
        # torchrun ends its processes by SIGTERM: end with a summary then, as at Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def place(self, plan: wire.RankSetup) -> tuple[wire.RankSetup, Iterator[str]]:
        """Wait until all nodes of a team have connected, and give the team its meeting places.

        Returns:
            The plan for the ranks on this node, and the stores of later groups of the team.

        Raises:
            RanksError: a node did not come in time, or is lost.
        """
        # One limit for all: a connection that is refused does not prolong it.
        deadline = time.monotonic() + NODES_LIMIT
        while missing := self._ranks_missing(plan.size):
            left = 0.0 if self._is_late else deadline - time.monotonic()
            if not self._accept(left):
                self._is_late = True
                raise RanksError(
                    f"the nodes of {ranks_text(missing)} did not come within {NODES_LIMIT:g} s"
                )
        for node in self._nodes_of(plan):
            if not node.alive:
                raise RanksError(
                    f"the node of rank {node.ranks.start} is lost, and torchrun replaces none"
                )
        team = next(self._numbers)
        stores = (f"gtrainer-team{team}-{number}" for number in itertools.count())
        here = range(min(plan.size, self._launch.local_size))
        return replace(plan, ranks=here, store=next(stores)), stores

    def start(self, plan: wire.RankSetup) -> "Iterator[RemoteRanks]":
        """Have the other nodes start their ranks of a team that ``place`` has placed."""
        for node in self._nodes_of(plan):
            yield RemoteRanks(node, plan)

    def _ranks_missing(self, size: int) -> set[int]:
        """Return the ranks of a world whose nodes have not connected: nodes come in any order."""
        return set(range(self._launch.local_size, size)).difference(
            *(node.ranks for node in self._nodes)
        )

    def _nodes_of(self, plan: wire.RankSetup) -> "list[Node]":
        return [node for node in self._nodes if node.ranks and node.ranks.start < plan.size]

    def _accept(self, seconds: float) -> bool:
        """Return whether another process has connected in time, even if it is refused."""
        if not ready_files([self._server.fileno()], seconds):
            return False
        sock, (host, *_) = self._server.accept()
        try:
            self._nodes.append(Node(Line(sock, self._key, rank_0=True), self._write_line))
        except (OSError, EOFError, Refused) as error:
            sock.close()
            self._write_line(f"refused a connection from {host}: {error or 'it has closed it'}")
        return True

    def end(self, status: int) -> None:
        """Send every process its exit status, and wait until they have left."""
        # torchrun sends SIGTERM to the rest as soon as one process exits with an error.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end = time.monotonic() + FAREWELL_SECONDS
        # A run without tests on ranks has waited for nobody so far.
        while (left := end - time.monotonic()) > 0:
            is_complete = len(self._nodes) == self._launch.size - 1
            if not self._accept(0.0 if is_complete else left):
                break
        for node in self._nodes:
            node.send(wire.Over(status))
        for node in self._nodes:
            while node.alive and time.monotonic() < end:
                node.pump(0.1)


class Node:
    """Another process, at the other end of ``line``.

    ``ranks`` are those that it forks: all of its node for the first process there, none for others.
    """

    def __init__(self, line: Line, write_line: Callable[[str], None]) -> None:
        self.line = line
        self.alive = True
        self.teams: dict[str, RemoteRanks] = {}
        self._write_line = write_line
        messages = line.take()
        while not messages:
            messages = line.take()
        self.ranks = range(*messages[0])

    def send(self, message: object) -> None:
        # A closed connection is noticed by ``pump``.
        with contextlib.suppress(OSError):
            self.line.send(message)

    def pump(self, seconds: float = 0.0) -> None:
        """Read its messages; wait up to ``seconds`` for the first one."""
        try:
            while self.alive and ready_files([self.line.fileno()], seconds):
                for message in self.line.take():
                    if message.team in self.teams:
                        self.teams[message.team].receive(message)
                seconds = 0.0
        except (EOFError, OSError):
            self.alive = False
        except Refused as error:
            self.alive = False
            self._write_line(str(error))


class RemoteRanks:
    """The ranks of a team that run on another node: a ``Part``."""

    def __init__(self, node: Node, plan: wire.RankSetup) -> None:
        self.ranks = range(node.ranks.start, min(node.ranks.stop, plan.size))
        self._node = node
        self._team = plan.store
        self._messages: dict[int, deque[object]] = {rank: deque() for rank in self.ranks}
        self._ended: dict[int, wire.Ended] = {}
        self._stacks: dict[int, str] | None = None
        self._questions = 0  # for stacks, which the node has not answered yet
        node.teams[self._team] = self
        node.send(wire.StartTeam(self._team, plan.size, dict(plan.worker)))

    def receive(self, message: wire.FromRank) -> None:
        """Keep what the node has sent for this team until somebody asks."""
        if message.rank is None:
            # Answers come in the order of the questions: an earlier one's is late, and nobody's.
            self._questions -= 1
            if self._questions == 0:
                self._stacks = message.message
        elif isinstance(message.message, wire.Ended):
            self._ended[message.rank] = message.message
        else:
            self._messages[message.rank].append(message.message)

    def send(self, command: object, ranks: Iterable[int]) -> None:
        self._node.send(wire.ToTeam(self._team, "send", (command, tuple(ranks))))

    def files(self, ranks: Iterable[int]) -> list[int]:
        return [self._node.line.fileno()] if self._node.alive else []

    def take(self, ranks: Iterable[int], ready: set[int]) -> dict[int, object]:
        if ready.intersection(self.files(ranks)):
            self._node.pump()
        taken: dict[int, object] = {}
        for rank in ranks:
            if self._messages[rank]:
                taken[rank] = self._messages[rank].popleft()
            elif rank in self._ended or not self._node.alive:
                taken[rank] = None
        return taken

    def ended(self, rank: int) -> wire.Ended:
        return self._ended.get(rank, wire.Ended("was lost with its node", ""))

    def stacks(self, ranks: Iterable[int], kind: str = "stack") -> dict[int, str]:
        self._stacks = None
        self._questions += 1
        self._node.send(wire.ToTeam(self._team, "stacks", (tuple(ranks), kind)))
        end = time.monotonic() + STACKS_SECONDS
        while self._stacks is None and self._node.alive and time.monotonic() < end:
            self._node.pump(0.1)
        return {**dict.fromkeys(ranks, ""), **(self._stacks or {})}

    def interrupt(self, rank: int) -> None:
        """Do nothing: the terminal of the rank, if it has one, is on another machine."""

    def has_lost_ranks(self) -> bool:
        self._node.pump()
        return bool(self._ended) or not self._node.alive

    def kill(self) -> None:
        del self._node.teams[self._team]
        self._node.send(wire.ToTeam(self._team, "kill"))
