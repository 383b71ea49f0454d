"""Steps: what is done for a node of the graph that is more than a plain operator, for all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import schema
from pytest_gtrainer.graph.nodes import short_name, written_operands
from pytest_gtrainer.graph.same_on_ranks import Partition, described, value_text
from pytest_gtrainer.worlds.simulated import CollectiveMismatch, DependsOnRank, NoModel, collectives
from pytest_gtrainer.worlds.simulated.collectives import Collective, Contribution
from pytest_gtrainer.worlds.simulated.interpreter import values as on_ranks
from pytest_gtrainer.worlds.simulated.interpreter.graph import source_of
from pytest_gtrainer.worlds.simulated.net import Net

COND = torch.ops.higher_order.cond
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph

_FORMS: dict[Collective, str] = {
    collectives.all_gather: "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    collectives.reduce_scatter: "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    collectives.all_reduce: "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
    collectives.all_to_all: "all_to_all_single",
    collectives.broadcast: "broadcast broadcast_",
    collectives.exchange_dims: "shard_dim_alltoall",
}
_COLLECTIVES = {name: collective for collective, names in _FORMS.items() for name in names.split()}


@dataclass(slots=True)
class Frame:
    """A run of a graph on named ``inputs``: the ``values`` that are still needed, and what all steps use."""

    kinds: on_ranks.Kinds
    random: on_ranks.RankRandomStates
    values: on_ranks.Values
    inputs: Sequence[tuple[str, Any]]

    def of(self, nodes: Sequence[fx.Node]) -> list[Any]:
        return [self.values[source_of(node)] for node in nodes]

    def of_ranks(self, nodes: Sequence[fx.Node]) -> list[list[Any]]:
        values = self.of(nodes)
        return [[on_ranks.at(value, rank) for value in values] for rank in range(self.kinds.size)]

    def own_memory(self, written: Sequence[fx.Node]) -> None:
        """Give ranks memory of their own for what they write to (S7); DependsOnRank if it is an input's."""
        storages = on_ranks.make_private(
            self.values, list(map(source_of, written)), self.kinds.size
        )
        for name, value in self.inputs:
            if on_ranks.reaches(value, storages):
                way_out = "give every rank its own"
                raise DependsOnRank(
                    f"{name} is one tensor for several ranks, and each writes to it: {way_out}"
                )


@dataclass(frozen=True, slots=True)
class Step(ABC):
    """One node; nobody needs the values of ``dying`` after it."""

    node: fx.Node

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> None:
        try:
            frame.values[self.node] = self.value(frame, dying)
        except Exception as error:
            error.add_note(f"in {described(self.node)}")
            raise

    @abstractmethod
    def value(self, frame: Frame, dying: frozenset[fx.Node]) -> Any: ...

    def arguments(self, own: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords, with the values of ``node.all_input_nodes`` filled in."""
        known = dict(zip(self.node.all_input_nodes, own, strict=True))
        args, kwargs = fx.node.map_arg((self.node.args, self.node.kwargs), known.__getitem__)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class EffectStep(Step):
    """An operator that writes to the values of ``written`` or draws random numbers: on every rank by itself."""

    written: Sequence[fx.Node]
    random: bool

    def value(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        operands = frame.of(self.node.all_input_nodes)
        uniform = not any(type(value) is on_ranks.PerRank for value in operands)
        if uniform and (not self.random or frame.random.uniform):
            return self._call(frame, None, operands)
        if self.written:
            frame.own_memory(self.written)
        every = enumerate(frame.of_ranks(self.node.all_input_nodes))
        return frame.kinds.value([self._call(frame, rank, own) for rank, own in every])

    def _call(self, frame: Frame, rank: int | None, own: Sequence[Any]) -> Any:
        args, kwargs = self.arguments(own)
        assert callable(self.node.target)
        with frame.random.drawn_by(rank, frame.kinds.size) if self.random else nullcontext():
            return self.node.target(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class CollectiveStep(Step):
    """A collective among the ranks of each group, with the nets of these."""

    partition: Partition
    nets: Sequence[Net]
    collective: Collective

    def value(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        calls, targets = self._calls(frame), written_operands(self.node)
        if not targets:
            for node in dying.intersection(map(source_of, self.node.all_input_nodes)):
                value = frame.values[node]
                if type(value) is on_ranks.PerRank:
                    value[:] = [None] * len(
                        value
                    )  # a reduction needs the memory of operands that die
        results: list[Any] = [None] * frame.kinds.size
        for ranks, net in zip(self.partition, self.nets, strict=True):
            is_list = "inputs" in calls[ranks[0]]
            given = _contributions([calls[rank] for rank in ranks], ranks)
            for rank, result in zip(ranks, self.collective(net, given), strict=True):
                results[rank] = result if is_list else result[0]
        if not targets:
            return frame.kinds.value(results)
        storages = {
            storage for value in frame.of(targets) for storage in on_ranks.storages_of(value)
        }
        live = [value for node, value in frame.values.items() if node not in dying]
        if not any(
            on_ranks.reaches(value, storages)
            for value in [*live, *(value for _, value in frame.inputs)]
        ):
            return frame.kinds.value(
                results
            )  # nobody sees the memory that is written to: it may lie elsewhere
        frame.own_memory(targets)
        (name,) = (
            argument.name for argument in schema(self.node.target).arguments if argument.is_write
        )
        pairs = zip((call[name] for call in self._calls(frame)), results, strict=True)
        written = [
            own.copy_(new) if isinstance(own, Tensor) else list(map(Tensor.copy_, own, new))
            for own, new in pairs
        ]
        return frame.kinds.value(written)

    def _calls(self, frame: Frame) -> list[dict[str, Any]]:
        names = [argument.name for argument in schema(self.node.target).arguments]
        calls = map(self.arguments, frame.of_ranks(self.node.all_input_nodes))
        return [{**dict(zip(names, args, strict=False)), **kwargs} for args, kwargs in calls]


def collective_of(node: fx.Node) -> Collective:
    """What carries the collective out; NoModel names the operator if nothing does."""
    known = _COLLECTIVES if str(node.target).startswith(("_c10d_functional", "_dtensor")) else {}
    if short_name(node) not in known:
        names = ", ".join(sorted(_COLLECTIVES))
        raise NoModel(
            f"{node.target} ({node.name}) has no model in a simulated world, which has {names}"
        )
    return known[short_name(node)]


def _contributions(calls: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[Contribution]:
    """What these ranks, a group, give, taken out of their arguments; they must agree."""
    members = calls[0].get("group_size", len(ranks))
    if members != len(ranks):
        raise CollectiveMismatch(
            f"the graph was traced for a group of {members}, it has {len(ranks)}"
        )
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
        raise CollectiveMismatch(
            f"the ranks give lists of {' and '.join(map(str, counts))} tensors"
        )
    by_rows = "input_split_sizes" in calls[0]
    for own in given:
        rows = own.inputs[0].shape[0] if by_rows else 0
        if by_rows and ({len(own.sends), len(own.receives)} != {members} or sum(own.sends) != rows):
            wrong = (
                f"rank {own.rank} splits {rows} rows into {own.sends} and receives {own.receives}"
            )
            raise CollectiveMismatch(f"{wrong}, in a group of {members} ranks")
        for first, tensor in zip(given[0].inputs, own.inputs, strict=True):
            if tensor.shape[by_rows:] != first.shape[by_rows:] or tensor.dtype != first.dtype:
                raise CollectiveMismatch(
                    f"rank {ranks[0]} gives {value_text(first)}, rank {own.rank} gives {value_text(tensor)}"
                )
    return given


@dataclass(frozen=True, slots=True)
class NestedStep(Step):
    """A graph that communicates, or is a module; ``runs`` carry out the graphs that the node calls, by identity."""

    runs: dict[int, Callable[[Sequence[Any], on_ranks.RankRandomStates], Any]]

    def value(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        args, _ = self.arguments(frame.of(self.node.all_input_nodes))
        if self.node.target is COND:
            predicate, if_true, if_false, given = args
            ways = {
                bool(own)
                for own in (predicate if type(predicate) is on_ranks.PerRank else [predicate])
            }
            if len(ways) > 1:
                raise CollectiveMismatch(
                    "the ranks disagree on the predicate of a cond with a collective in it: some would wait forever"
                )
            run = self.runs[id(if_true if ways.pop() else if_false)]
        elif self.node.target is INVOKE_SUBGRAPH:
            run, given = self.runs[id(args[0])], args[2:]
        else:
            (run,), given = self.runs.values(), args
        output = run(list(given), frame.random)
        own = [on_ranks.of_rank(output, rank) for rank in range(frame.kinds.size)]
        return frame.kinds.value(on_ranks.interned(own))
