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
from pytest_gtrainer.ranks.team import RanksError, readable
from pytest_gtrainer.ranks.torchrun.line import Line, Refused, shared_key

PORT = "port"
NODES_LIMIT = 300.0
STACKS_SECONDS = 5.0
FAREWELL_SECONDS = 10.0


def connect() -> dist.Store:
    """The store of torchrun's rendezvous."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore("gtrainer", store)


class Nodes:
    """The other processes that torchrun started; ``tell`` gets a line of each one refused."""

    def __init__(self, launch: Launch, tell: Callable[[str], None]) -> None:
        self._launch, self._tell, self._key = launch, tell, shared_key()
        self._numbers = itertools.count()
        self._nodes: list[Node] = []
        self._is_late = False  # a node that has not come once is not waited for again
        self._server = socket.create_server(
            ("localhost" if launch.local_size == launch.size else "", 0)
        )
        self._store = connect()  # which may live in this process
        self._store.set(PORT, str(self._server.getsockname()[1]))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # with a summary, as at Ctrl-C

    def place(self, plan: wire.RankSetup) -> tuple[wire.RankSetup, Iterator[str]]:
        """Yield what a team's ranks on this node start from, once all its nodes are here, and where
        it meets later.
        """
        deadline = time.monotonic() + NODES_LIMIT  # for all, be they refused
        while (
            known := self._launch.local_size + sum(len(node.ranks) for node in self._nodes)
        ) < plan.size:
            if self._is_late or not self._take_in(max(0.0, deadline - time.monotonic())):
                self._is_late = True
                raise RanksError(
                    f"the nodes of ranks {known} to {plan.size - 1} did not come within "
                    f"{NODES_LIMIT:g} s"
                )
        if lost := [node for node in self._nodes_of(plan) if not node.alive]:
            raise RanksError(
                f"the node of rank {lost[0].ranks.start} is lost, and torchrun replaces none"
            )
        team, here = next(self._numbers), range(min(plan.size, self._launch.local_size))
        stores = (f"gtrainer-team{team}-{number}" for number in itertools.count())
        return replace(plan, ranks=here, store=next(stores)), stores

    def start(self, plan: wire.RankSetup) -> "list[RemoteRanks]":
        """Have the other nodes start their ranks of a team that ``place`` has placed."""
        return [RemoteRanks(node, plan) for node in self._nodes_of(plan)]

    def _nodes_of(self, plan: wire.RankSetup) -> "list[Node]":
        return [node for node in self._nodes if node.ranks and node.ranks.start < plan.size]

    def _take_in(self, seconds: float) -> bool:
        """Return whether another process has come in time, be it one that is refused."""
        if not readable([self._server.fileno()], seconds):
            return False
        sock, (host, *_) = self._server.accept()
        try:
            self._nodes.append(Node(Line(sock, self._key, rank_0=True), self._tell))
        except (OSError, EOFError, Refused) as error:
            sock.close()
            self._tell(f"refused a connection from {host}: {error or 'it has closed it'}")
        return True

    def end(self, status: int) -> None:
        """Tell everybody what to exit with, and wait until they have left."""
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # torchrun's, once the first of the others has exited
        end = time.monotonic() + FAREWELL_SECONDS
        while (left := end - time.monotonic()) > 0:
            is_complete = len(self._nodes) == self._launch.size - 1
            if not self._take_in(0.0 if is_complete else left):
                break
        for node in self._nodes:
            node.tell(wire.Over(status))
        for node in self._nodes:
            while node.alive and time.monotonic() < end:
                node.pump(0.1)


class Node:
    """Another process, at the other end of ``line``; the first one of a node forks its ``ranks``,
    others have none.
    """

    def __init__(self, line: Line, tell: Callable[[str], None]) -> None:
        self.line, self.alive, self._tell = line, True, tell
        self.teams: dict[str, RemoteRanks] = {}
        while not (first := line.take()):
            pass
        self.ranks = range(*first[0])

    def tell(self, message: object) -> None:
        with contextlib.suppress(OSError):  # its end is noticed by who reads
            self.line.send(message)

    def pump(self, seconds: float = 0.0) -> None:
        """Take in what it says; wait up to ``seconds`` for the first word."""
        try:
            while self.alive and readable([self.line.fileno()], seconds):
                for message in self.line.take():
                    if message.team in self.teams:
                        self.teams[message.team].hear(message)
                seconds = 0.0
        except (EOFError, OSError, Refused) as error:
            self.alive = False
            if isinstance(error, Refused):
                self._tell(str(error))


class RemoteRanks:
    """The ranks of a team that run on another node: a ``Part``."""

    def __init__(self, node: Node, plan: wire.RankSetup) -> None:
        self.ranks = range(node.ranks.start, min(node.ranks.stop, plan.size))
        self._node, self._team = node, plan.store
        self._heard: dict[int, deque[object]] = {rank: deque() for rank in self.ranks}
        self._ended: dict[int, wire.Ended] = {}
        self._stacks: dict[int, str] | None = None
        node.teams[self._team] = self
        node.tell(wire.StartTeam(self._team, plan.size, dict(plan.worker)))

    def hear(self, message: wire.FromRank) -> None:
        """Keep what the node has said of this team until somebody asks."""
        if message.rank is None:
            self._stacks = message.message
        elif isinstance(message.message, wire.Ended):
            self._ended[message.rank] = message.message
        else:
            self._heard[message.rank].append(message.message)

    def send(self, command: object, ranks: Iterable[int]) -> None:
        self._node.tell(wire.ToTeam(self._team, "send", (command, tuple(ranks))))

    def files(self, ranks: Iterable[int]) -> list[int]:
        return [self._node.line.fileno()] if self._node.alive else []

    def take(self, ranks: Iterable[int], ready: set[int]) -> dict[int, object]:
        if ready.intersection(self.files(ranks)):
            self._node.pump()
        heard: dict[int, object] = {}
        for rank in ranks:
            if self._heard[rank]:
                heard[rank] = self._heard[rank].popleft()
            elif rank in self._ended or not self._node.alive:
                heard[rank] = None
        return heard

    def ended(self, rank: int) -> wire.Ended:
        return self._ended.get(rank, wire.Ended("was lost with its node", ""))

    def stacks(self, ranks: Iterable[int], kind: str = "stack") -> dict[int, str]:
        self._stacks = None
        self._node.tell(wire.ToTeam(self._team, "stacks", (tuple(ranks), kind)))
        end = time.monotonic() + STACKS_SECONDS
        while self._stacks is None and self._node.alive and time.monotonic() < end:
            self._node.pump(0.1)
        return {**dict.fromkeys(ranks, ""), **(self._stacks or {})}

    def interrupt(self, rank: int) -> None:
        """Its terminal, if it has one, is on another machine."""

    def has_lost_ranks(self) -> bool:
        self._node.pump()
        return bool(self._ended) or not self._node.alive

    def kill(self) -> None:
        del self._node.teams[self._team]
        self._node.tell(wire.ToTeam(self._team, "kill"))
