"""Steps: what is done for a node of the graph that is more than a plain operator, for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from pytest_gtrainer.worlds.simulated import CollectiveMismatch, DependsOnRank, NoModel, collectives
from pytest_gtrainer.worlds.simulated.collectives import Collective, Contribution, dtype_text
from pytest_gtrainer.worlds.simulated.interpreter.blocks import Scratch
from pytest_gtrainer.worlds.simulated.interpreter.groups import Partition
from pytest_gtrainer.worlds.simulated.interpreter.operators import Binder, short_name, source_of
from pytest_gtrainer.worlds.simulated.interpreter.values import (
    Kinds,
    PerRank,
    RankRandomStates,
    Values,
    at,
    interned,
    make_private,
    of_rank,
    reaches,
    storages_of,
)
from pytest_gtrainer.worlds.simulated.net import Net

COND = torch.ops.higher_order.cond
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph

_COLLECTIVES: dict[str, Collective] = {
    "all_gather_into_tensor": collectives.all_gather,
    "all_gather_into_tensor_out": collectives.all_gather,
    "all_gather_into_tensor_coalesced": collectives.all_gather,
    "reduce_scatter_tensor": collectives.reduce_scatter,
    "reduce_scatter_tensor_out": collectives.reduce_scatter,
    "reduce_scatter_tensor_coalesced": collectives.reduce_scatter,
    "all_reduce": collectives.all_reduce,
    "all_reduce_": collectives.all_reduce,
    "all_reduce_coalesced": collectives.all_reduce,
    "all_reduce_coalesced_": collectives.all_reduce,
    "all_to_all_single": collectives.all_to_all,
    "broadcast": collectives.broadcast,
    "broadcast_": collectives.broadcast,
    "shard_dim_alltoall": collectives.exchange_dims,
}


@dataclass(slots=True)
class Frame:
    """A run of a graph: the values that are still needed, and what all steps use.

    ``inputs`` are the names and values that the graph was called with.
    """

    kinds: Kinds
    random: RankRandomStates
    scratch: Scratch
    values: Values
    inputs: Sequence[tuple[str, Any]]

    def of(self, nodes: Sequence[fx.Node]) -> list[Any]:
        """The values of nodes."""
        return [self.values[source_of(node)] for node in nodes]

    def own_memory(self, written: Sequence[fx.Node]) -> None:
        """Give every rank memory of its own for what it is about to write to (S7).

        Raises:
            DependsOnRank: it is memory of an input, in which the ranks' writes would be lost.
        """
        storages = make_private(self.values, list(map(source_of, written)), self.kinds.size)
        for name, value in self.inputs if storages else ():
            if reaches(value, storages):
                raise DependsOnRank(
                    f"{name} is one tensor for several ranks, and each writes to it: give every rank its own"
                )


class Step(Protocol):
    """One node; nobody needs the values of ``dying`` after it."""

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any: ...


@dataclass(frozen=True, slots=True)
class ConstantStep:
    """An attribute of the graph's module."""

    value: Any

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class EffectStep:
    """An operator that writes to operands or draws random numbers: its effect is on every rank by itself.

    Attributes:
        operands: the nodes that ``bind`` takes the values of.
        written: the nodes whose values it writes to.
        random: whether it draws.
    """

    target: Callable[..., Any]
    operands: Sequence[fx.Node]
    bind: Binder
    written: Sequence[fx.Node]
    random: bool

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        operands, size = frame.of(self.operands), frame.kinds.size
        uniform = not any(type(value) is PerRank for value in operands)
        if uniform and (not self.random or frame.random.uniform):
            with frame.random.drawn_uniformly() if self.random else nullcontext():
                return self._call(operands)
        if self.written:
            frame.own_memory(self.written)
            operands = frame.of(self.operands)
        results = []
        for rank in range(size):
            with frame.random.drawn_by(rank, size) if self.random else nullcontext():
                results.append(self._call([at(value, rank) for value in operands]))
        return frame.kinds.value(results)

    def _call(self, own: Sequence[Any]) -> Any:
        args, kwargs = self.bind(own)
        return self.target(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """A collective among the ranks of each group.

    Attributes:
        names: of the arguments that ``bind`` gives by position.
        nets: those of the groups.
        written: the argument that the result is written to, in place, and the nodes in it.
    """

    operands: Sequence[fx.Node]
    bind: Binder
    names: Sequence[str]
    partition: Partition
    nets: Sequence[Net]
    collective: Collective
    written: tuple[str, Sequence[fx.Node]] | None

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        calls = self._calls(frame)
        if self.written is None:
            for node in dying.intersection(map(source_of, self.operands)):
                value = frame.values[node]
                if type(value) is PerRank:
                    value[:] = [None] * len(value)  # a reduction needs the memory of operands that die
        results: list[Any] = [None] * frame.kinds.size
        for ranks, net in zip(self.partition, self.nets, strict=True):
            is_list = "inputs" in calls[ranks[0]]
            given = _contributions([calls[rank] for rank in ranks], ranks)
            for rank, result in zip(ranks, self.collective(net, given), strict=True):
                results[rank] = result if is_list else result[0]
        frame.scratch.give_back()
        if self.written is None or self._nobody_sees(frame, dying):
            return frame.kinds.value(results)
        argument, nodes = self.written
        frame.own_memory(nodes)
        written = []
        for call, result in zip(self._calls(frame), results, strict=True):
            target = call[argument]
            pairs = [(target, result)] if isinstance(target, Tensor) else zip(target, result, strict=True)
            copied = [own.copy_(value) for own, value in pairs]
            written.append(copied[0] if isinstance(target, Tensor) else copied)
        return frame.kinds.value(written)

    def _calls(self, frame: Frame) -> list[dict[str, Any]]:
        """Every rank's arguments by name."""
        operands, calls = frame.of(self.operands), []
        for rank in range(frame.kinds.size):
            args, kwargs = self.bind([at(value, rank) for value in operands])
            calls.append({**dict(zip(self.names, args, strict=False)), **kwargs})
        return calls

    def _nobody_sees(self, frame: Frame, dying: frozenset[fx.Node]) -> bool:
        """No value that lives on looks into the memory that is written to: then the result may lie elsewhere."""
        assert self.written is not None
        storages = {storage for value in frame.of(self.written[1]) for storage in storages_of(value)}
        live = [value for node, value in frame.values.items() if node not in dying]
        return not any(reaches(value, storages) for value in [*live, *(value for _, value in frame.inputs)])


def collective_of(node: fx.Node) -> Collective:
    """What carries the collective out.

    Raises:
        NoModel: naming the operator.
    """
    known = _COLLECTIVES if str(node.target).startswith(("_c10d_functional", "_dtensor")) else {}
    if short_name(node) not in known:
        names = ", ".join(sorted(_COLLECTIVES))
        raise NoModel(f"{node.target} ({node.name}) has no model in a simulated world, which has {names}")
    return known[short_name(node)]


def _contributions(calls: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[Contribution]:
    """What these ranks, a group, give; taken out of their arguments.

    Raises:
        CollectiveMismatch: they do not agree; names the first rank that differs.
    """
    members = calls[0].get("group_size", len(ranks))
    if members != len(ranks):
        raise CollectiveMismatch(f"the graph was traced for a group of {members}, it has {len(ranks)}")
    given = [
        Contribution(
            rank=rank,
            inputs=list(call.pop("inputs")) if "inputs" in call else [call.pop("input")],
            op=str(call.get("reduce_op")).lower(),
            root=call.get("src", 0),
            sends=list(map(int, call.get("input_split_sizes", ()))),
            receives=list(map(int, call.get("output_split_sizes", ()))),
            dims=(call.get("gather_dim", 0), call.get("shard_dim", 0)),
        )
        for rank, call in zip(ranks, calls, strict=True)
    ]
    counts = sorted({len(own.inputs) for own in given})
    if len(counts) > 1:
        raise CollectiveMismatch(f"the ranks give lists of {' and '.join(map(str, counts))} tensors")
    by_rows = "input_split_sizes" in calls[0]
    for own in given:
        rows = own.inputs[0].shape[0] if by_rows else 0
        if by_rows and (len(own.sends) != members or len(own.receives) != members or sum(own.sends) != rows):
            raise CollectiveMismatch(
                f"rank {own.rank} splits {rows} rows into {own.sends} and receives {own.receives}, "
                f"in a group of {members} ranks"
            )
        for first, tensor in zip(given[0].inputs, own.inputs, strict=True):
            if tensor.shape[by_rows:] != first.shape[by_rows:] or tensor.dtype != first.dtype:
                one, other = (f"{dtype_text(each)}{list(each.shape)}" for each in (first, tensor))
                raise CollectiveMismatch(f"rank {ranks[0]} gives {one}, rank {own.rank} gives {other}")
    return given


@dataclass(frozen=True, slots=True)
class NestedStep:
    """A graph that communicates, or is a module, called with values of this one: its nodes are steps like those here.

    ``runs`` carry out the graphs, by their identity. ``bind`` gives the arguments of the call with nodes' values
    filled in, uniform or per rank. A graph that an operator calls and that does not communicate needs none of this:
    the operator is plain.
    """

    target: Any
    operands: Sequence[fx.Node]
    bind: Binder
    runs: dict[int, Callable[[Sequence[Any], RankRandomStates], Any]]

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        args, _ = self.bind(frame.of(self.operands))
        graph, given = self._called(args)
        output = self.runs[id(graph)](given, frame.random)
        return frame.kinds.value(interned([of_rank(output, rank) for rank in range(frame.kinds.size)]))

    def _called(self, args: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The graph and what it is called with."""
        if self.target is COND:
            predicate, if_true, if_false, given = args
            return (if_true if _decided(predicate) else if_false), list(given)
        if self.target is INVOKE_SUBGRAPH:
            return args[0], list(args[2:])
        return self.target, list(args)


def _decided(predicate: Any) -> bool:
    """The one way that all ranks go."""
    ways = {bool(own) for own in (predicate if type(predicate) is PerRank else [predicate])}
    if len(ways) > 1:
        raise CollectiveMismatch(
            "the ranks disagree on the predicate of a cond with a collective in it: some would wait forever"
        )
    return ways.pop()
