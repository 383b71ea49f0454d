"""Say whether ranks that run these graphs wait for each other for ever, without running them."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.passes import WAITS
from pytest_gtrainer._torch.process_groups import group_ranks, names_of_live_groups
from pytest_gtrainer._torch.values import OpOverload, schema
from pytest_gtrainer.attack.queues import (
    RECEIVE,
    SEND,
    Launch,
    Mismatch,
    Operation,
    Queues,
    Schedule,
    Wait,
    orders_by_luck,
)
from pytest_gtrainer.graph.collectives import (
    group_of,
    kind_of,
    launches,
    ranks_given,
    reduction_of,
)
from pytest_gtrainer.graph.foreign import AnyGraph, adopt
from pytest_gtrainer.graph.nodes import argument_of, graphs_called, node_fqn, short_name
from pytest_gtrainer.graph.same_on_ranks import dtype_text, nodes_within

Groups = Mapping[str, Sequence[Sequence[int]]]
_EVEN = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives whose payloads have one size on all ranks."""


@dataclass(frozen=True)
class Send:
    """A node that sends to a rank of the world."""

    to: int


@dataclass(frozen=True)
class Receive:
    """A node that receives from a rank of the world."""

    source: int


@dataclass(frozen=True)
class Collective:
    """A node that all these ranks of the world have to reach."""

    ranks: Sequence[int]


Communication = Callable[[fx.Node, int], Send | Receive | Collective]
"""Says of a node, on a rank, with whom it communicates."""


class Deadlock(facts.FailedCheck):
    """Ranks wait for each other, or call different collectives."""

    __module__ = "pytest_gtrainer"


class OrderByLuck(UserWarning):
    """Ranks start communications of two groups in opposite order, and nothing decides it."""

    __module__ = "pytest_gtrainer"


@facts.check
def assert_no_deadlock(
    graphs: AnyGraph | Mapping[int, Any],
    *,
    groups: Groups | None = None,
    communications: Mapping[str, Communication] | None = None,
) -> tuple[str, ...]:
    """Fail if the ranks that run these graphs would wait for ever.

    Collectives and messages are put into the queues of their communicators, as NCCL does, in the
    order of each graph; waits are where the graph waits. No value is computed, so the ranks may be
    many. Sends and receives of a pair share one communicator, those of ``batch_p2p_ops`` run
    together in that of their group.

        assert_no_deadlock({rank: graph_of(rank) for rank in range(8)}, groups={"pp": [[0, 1]]})

    Args:
        graphs: by rank, a graph or a sequence of graphs that run one after the other; or one graph
            that every rank of the present world runs.
        groups: the ranks of process groups by name: ``{"fsdp": [[0, 1], [2, 3]]}``. A group of this
            process that holds all ranks is known.
        communications: operators that communicate besides torch's, such as ``{"mine::send":
            lambda node, rank: Send(to=rank + 1)}``. They block.

    Returns:
        What only luck keeps in order, in words. Each is a warning, too, ``OrderByLuck``.

    Raises:
        Deadlock: the cycle of ranks, each with the node and module where it waits; or two ranks
            that call different collectives.
        ValueError: no graph communicates, a group is unknown, or there is no world.
    """
    __tracebackhide__ = True
    by_rank = _by_rank(graphs)
    reader = _Reader(groups or {}, communications or {}, sorted(by_rank))
    schedules = {rank: reader.schedule(rank, own) for rank, own in by_rank.items()}
    if not any(schedules.values()):
        raise ValueError(
            "no graph communicates, so no rank could wait: name operators of your own in "
            "communications="
        )
    try:
        stuck = Queues(schedules).run()
    except Mismatch as error:
        facts.emit("verdict", outcome="deadlock", tensors=len(schedules), what="schedule")
        raise Deadlock(str(error)) from None
    outcome = "deadlock" if stuck else "no deadlock"
    facts.emit("verdict", outcome=outcome, tensors=len(schedules), what="schedule")
    if stuck:
        raise Deadlock(f"ranks wait for each other\n{stuck}")
    lucky = tuple(orders_by_luck(schedules))
    for line in lucky:
        warnings.warn(line, OrderByLuck, stacklevel=2)
    return lucky


def _by_rank(graphs: AnyGraph | Mapping[int, Any]) -> dict[int, list[fx.GraphModule]]:
    if not isinstance(graphs, Mapping):
        if not dist.is_initialized():
            raise ValueError(
                "one graph for all ranks needs a world: mark the test gt_world, or give a graph "
                "for each rank, {0: graph, 1: graph}"
            )
        graphs = dict.fromkeys(range(dist.get_world_size()), graphs)
    found = {}
    for rank, given in graphs.items():
        own = given if isinstance(given, list | tuple) else [given]
        found[rank] = [adopt(graph) for graph in own]
    return found


class _Reader:
    """Reads schedules from graphs."""

    def __init__(
        self, groups: Groups, communications: Mapping[str, Communication], ranks: Sequence[int]
    ) -> None:
        self._groups, self._communications, self._ranks = groups, communications, ranks

    def schedule(self, rank: int, graphs: Sequence[fx.GraphModule]) -> Schedule:
        """Return the launches and waits of a rank, in the order of its graphs."""
        steps: list[Launch | Wait] = []
        for gm in graphs:
            started: dict[fx.Node, int] = {}
            for node in gm.graph.nodes:
                self._read(node, rank, steps, started)
        return steps

    def _read(
        self, node: fx.Node, rank: int, steps: list[Launch | Wait], started: dict[fx.Node, int]
    ) -> None:
        own = self._declared(node, rank)
        if own is not None:
            steps.append(own)
            steps.append(Wait(len(steps) - 1))
        elif node.target in WAITS:
            for waited in node.all_input_nodes:
                launch = started.get(_launch_of(waited))
                if launch is not None:
                    steps.append(Wait(launch))
        elif any(launches(inner.target) for inner in self._inside(node)):
            raise ValueError(
                f"{node.name} calls a graph that communicates: put its nodes into the graph that "
                "calls it"
            )
        elif launches(node.target):
            started[node] = len(steps)
            steps.append(self._launch(node, rank))

    def _inside(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes of graphs that a node calls."""
        for gm in graphs_called(node.graph.owning_module, node):
            yield from nodes_within(gm)

    def _declared(self, node: fx.Node, rank: int) -> Launch | None:
        if not isinstance(node.target, OpOverload):
            return None
        communication = self._communications.get(schema(node.target).name)
        if communication is None:
            return None
        given = communication(node, rank)
        if isinstance(given, Collective):
            ranks = tuple(given.ranks)
            operation = Operation(short_name(node), ranks)
            return Launch((operation,), f"{node.target} {ranks}", _where(node))
        operation = _message(given, rank)
        return Launch((operation,), _pair(operation), _where(node))

    def _launch(self, node: fx.Node, rank: int) -> Launch:
        name = short_name(node)
        ranks = self._ranks_of(node, rank)
        if name in ("isend", "irecv", "send", "recv_"):
            operation = _message(_end(name, node, ranks), rank)
            return Launch((operation,), _pair(operation), _where(node))
        group = f"group {list(ranks)}"
        if name == "batch_p2p_ops":
            operations = []
            kinds, peers = argument_of(node, "op_list"), argument_of(node, "peer_list")
            for kind, peer in zip(kinds, peers, strict=True):
                end = Send(ranks[peer]) if "send" in kind else Receive(ranks[peer])
                operations.append(_message(end, rank))
            return Launch(tuple(operations), group, _where(node))
        operation = Operation(kind_of(node) or name, ranks, _payload(node))
        return Launch((operation,), group, _where(node))

    def _ranks_of(self, node: fx.Node, rank: int) -> tuple[int, ...]:
        """Return the group of a rank for a collective.

        Raises:
            ValueError: nobody knows its ranks.
        """
        given = ranks_given(node)
        if given is not None:
            return given
        name = group_of(node)
        partition = self._groups.get(name or "")
        if partition is None and name is not None and name in names_of_live_groups().values():
            everyone = group_ranks(name)
            if len(everyone) == dist.get_world_size():
                partition = [everyone]
        if partition is None:
            raise ValueError(
                f"nobody knows the ranks of group {name!r} ({node.name}): say them, "
                f"groups={{{name!r}: [[0, 1], ...]}}"
            )
        for ranks in partition:
            if rank in ranks:
                return tuple(ranks)
        raise ValueError(f"rank {rank} is in no group of {name!r}: {partition}")


def _launch_of(node: fx.Node) -> fx.Node:
    """Return the launch whose result this is, or an item of it."""
    while node.op == "call_function" and not isinstance(node.target, OpOverload):
        if not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return node


def _end(name: str, node: fx.Node, ranks: Sequence[int]) -> Send | Receive:
    """Return the end of a message; its other rank is counted in the group."""
    if "send" in name:
        return Send(ranks[argument_of(node, "dst")])
    return Receive(ranks[argument_of(node, "src")])


def _message(end: Any, rank: int) -> Operation:
    if isinstance(end, Send):
        return Operation(SEND, (rank, end.to))
    if isinstance(end, Receive):
        return Operation(RECEIVE, (end.source, rank))
    raise ValueError(f"a communication is Send, Receive or Collective; not {end!r}")


def _pair(operation: Operation) -> str:
    """Return the queue of messages between two ranks, in both directions."""
    return f"messages of {sorted(operation.ranks)}"


def _payload(node: fx.Node) -> str:
    """Return what has to be equal on all ranks: dtype and reduction, and the size where it is."""
    parts = []
    reduction = reduction_of(node)
    if reduction is not None:
        parts.append(reduction)
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if isinstance(value, Tensor):
            size = f"[{value.numel()}]" if kind_of(node) in _EVEN else ""
            parts.append(f"{dtype_text(value)}{size}")
    return " ".join(parts)


def _where(node: fx.Node) -> str:
    module = node_fqn(node)
    return f"{node.name} of {module}" if module else node.name
