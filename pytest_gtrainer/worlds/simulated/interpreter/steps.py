"""Carry out, for all ranks, the nodes of a graph that are more than a plain operator."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.values import schema
from pytest_gtrainer.graph.nodes import (
    named_arguments,
    parameter,
    short_name,
    tensors_in,
    written_operands,
)
from pytest_gtrainer.graph.same_on_ranks import Partition, describe_node, value_text
from pytest_gtrainer.worlds.simulated import CollectiveMismatch, DependsOnRank, NoModel, collectives
from pytest_gtrainer.worlds.simulated.collectives import Collective, Contribution
from pytest_gtrainer.worlds.simulated.interpreter import values as rank_values
from pytest_gtrainer.worlds.simulated.interpreter.graph import value_node
from pytest_gtrainer.worlds.simulated.interpreter.values import PerRank
from pytest_gtrainer.worlds.simulated.net import Net

COND = torch.ops.higher_order.cond
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph

COLLECTIVES: dict[str, Collective] = {
    "all_gather_into_tensor": collectives.all_gather,
    "all_gather_into_tensor_coalesced": collectives.all_gather,
    "all_gather_into_tensor_out": collectives.all_gather,
    "all_reduce": collectives.all_reduce,
    "all_reduce_": collectives.all_reduce,
    "all_reduce_coalesced": collectives.all_reduce,
    "all_reduce_coalesced_": collectives.all_reduce,
    "all_to_all_single": collectives.all_to_all,
    "broadcast": collectives.broadcast,
    "broadcast_": collectives.broadcast,
    "reduce_scatter_tensor": collectives.reduce_scatter,
    "reduce_scatter_tensor_coalesced": collectives.reduce_scatter,
    "reduce_scatter_tensor_out": collectives.reduce_scatter,
    "shard_dim_alltoall": collectives.exchange_dims,
}


@dataclass(slots=True)
class Frame:
    """A run of a graph: the ``values`` that are still needed, its named ``inputs``, and states."""

    sharings: rank_values.Sharings
    random: rank_values.RankRandomStates
    values: rank_values.Values
    inputs: Sequence[tuple[str, Any]]

    def of(self, nodes: Iterable[fx.Node]) -> list[Any]:
        return [self.values[value_node(node)] for node in nodes]

    def of_ranks(self, nodes: Sequence[fx.Node]) -> list[list[Any]]:
        values = self.of(nodes)
        own = []
        for rank in range(self.sharings.size):
            own.append([rank_values.at(value, rank) for value in values])
        return own

    def make_private(self, written: Sequence[fx.Node]) -> None:
        """Give ranks memory of their own for the values that they write to.

        Raises:
            DependsOnRank: an input has this memory; the caller would not see what ranks write.
        """
        nodes = map(value_node, written)
        storages = rank_values.make_private(self.values, list(nodes), self.sharings.size)
        for name, value in self.inputs:
            if not storages.isdisjoint(rank_values.storages_of(value)):
                raise DependsOnRank(
                    f"{name} is one tensor for several ranks, and each writes to it: "
                    "give every rank its own"
                )


@dataclass(frozen=True, slots=True)
class Step(ABC):
    """One node of the graph."""

    node: fx.Node

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> None:
        """Compute the node. Nobody needs the values of ``dying`` afterwards."""
        try:
            frame.values[self.node] = self.value(frame, dying)
        except Exception as error:
            error.add_note(f"in {describe_node(self.node)}")
            raise

    @abstractmethod
    def value(self, frame: Frame, dying: frozenset[fx.Node]) -> Any: ...

    def arguments(self, own: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keywords; ``own`` are the values of ``node.all_input_nodes``."""
        known = dict(zip(self.node.all_input_nodes, own, strict=True))
        args, kwargs = fx.node.map_arg((self.node.args, self.node.kwargs), known.__getitem__)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class EffectStep(Step):
    """An operator that writes to ``written`` or draws random numbers: on every rank by itself."""

    written: Sequence[fx.Node]
    random: bool

    def value(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        operands = frame.of(self.node.all_input_nodes)
        is_uniform = PerRank not in map(type, operands)
        # Ranks that draw from one state draw alike, so one call serves all.
        if is_uniform and (not self.random or frame.random.uniform):
            return self._call(frame, None, operands)
        if self.written:
            frame.make_private(self.written)
        own = frame.of_ranks(self.node.all_input_nodes)
        return frame.sharings.value([self._call(frame, rank, o) for rank, o in enumerate(own)])

    def _call(self, frame: Frame, rank: int | None, own: Sequence[Any]) -> Any:
        args, kwargs = self.arguments(own)
        assert callable(self.node.target)
        if not self.random:
            return self.node.target(*args, **kwargs)
        with frame.random.drawn_by(rank, frame.sharings.size):
            return self.node.target(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class CollectiveStep(Step):
    """A collective among the ranks of each group, with the nets of these."""

    partition: Partition
    nets: Sequence[Net]
    collective: Collective

    def value(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        calls = self._calls(frame)
        targets = written_operands(self.node)
        if not targets:
            # A reduction over hundreds of ranks frees each operand as soon as it is added. For that
            # the calls have to hold the last references.
            for node in dying.intersection(map(value_node, self.node.all_input_nodes)):
                value = frame.values[node]
                if type(value) is PerRank:
                    value[:] = [None] * len(value)

        results = self._carry_out(calls)

        # If nobody sees the memory that is written to, the result may lie elsewhere. Then the ranks
        # of a group go on with one tensor; a write to each rank's memory would part them for good.
        if not targets or not self._is_seen(targets, frame, dying):
            return frame.sharings.value(results)
        frame.make_private(targets)
        (name,) = [each.name for each in schema(self.node.target).arguments if each.is_write]
        written = [call[name] for call in self._calls(frame)]
        for own, new in zip(tensors_in(written), tensors_in(results), strict=True):
            own.copy_(new)
        return frame.sharings.value(written)

    def _carry_out(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """Return the result of each rank, from the arguments of each."""
        takes_list = parameter(self.node.target, "inputs")
        results: list[Any] = [None] * len(calls)
        for ranks, net in zip(self.partition, self.nets, strict=True):
            given = contributions([calls[rank] for rank in ranks], ranks)
            for rank, outputs in zip(ranks, self.collective(net, given), strict=True):
                if takes_list:  # a coalesced collective returns a list, all others a tensor
                    results[rank] = outputs
                else:
                    (results[rank],) = outputs
        return results

    def _calls(self, frame: Frame) -> list[dict[str, Any]]:
        """Return the arguments of each rank, by name."""
        calls = []
        for own in frame.of_ranks(self.node.all_input_nodes):
            calls.append(named_arguments(self.node.target, *self.arguments(own)))
        return calls

    def _is_seen(self, written: list[fx.Node], frame: Frame, dying: frozenset[fx.Node]) -> bool:
        """Return whether a live value, or an input, shows the memory of ``written``."""
        live = [value for node, value in frame.values.items() if node not in dying]
        live += [value for _, value in frame.inputs]
        storages = rank_values.storages_of(frame.of(written))
        return not storages.isdisjoint(rank_values.storages_of(live))


def collective_of(node: fx.Node) -> Collective:
    """Return the function that carries the collective out.

    Raises:
        NoModel: there is none; the message names the operator.
    """
    is_functional = str(node.target).startswith(("_c10d_functional", "_dtensor"))
    if not is_functional or short_name(node) not in COLLECTIVES:
        raise NoModel(
            f"{node.target} ({node.name}) has no model in a simulated world, which has "
            f"{', '.join(sorted(COLLECTIVES))}"
        )
    return COLLECTIVES[short_name(node)]


def contributions(calls: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[Contribution]:
    """Take the tensors of the ranks of a group out of their arguments.

    Raises:
        CollectiveMismatch: the ranks do not agree.
    """
    members = calls[0].get("group_size", len(ranks))
    if members != len(ranks):
        raise CollectiveMismatch(
            f"the graph was traced for a group of {members}, it has {len(ranks)}"
        )

    given = []
    for rank, call in zip(ranks, calls, strict=True):
        # Out of the call, so that the collective can free each tensor after its last use.
        if "inputs" in call:
            inputs = list(call.pop("inputs"))
        else:
            inputs = [call.pop("input")]
        contribution = Contribution(
            rank=rank,
            inputs=inputs,
            op=str(call.get("reduce_op")).lower(),
            root=call.get("src", 0),
            sends=list(map(int, call.get("input_split_sizes", ()))),
            receives=list(map(int, call.get("output_split_sizes", ()))),
            dims=(call.get("gather_dim", 0), call.get("shard_dim", 0)),
        )
        given.append(contribution)

    counts = sorted({len(own.inputs) for own in given})
    if len(counts) > 1:
        raise CollectiveMismatch(
            f"the ranks give lists of {' and '.join(map(str, counts))} tensors"
        )

    moves_rows = "input_split_sizes" in calls[0]
    # An all-to-all takes other numbers of rows from each rank: tokens are routed unevenly.
    first_common_dim = 1 if moves_rows else 0
    for own in given:
        if moves_rows:
            _check_splits(own, members)
        for first, tensor in zip(given[0].inputs, own.inputs, strict=True):
            shapes = {each.shape[first_common_dim:] for each in (first, tensor)}
            if len(shapes) > 1 or tensor.dtype != first.dtype:
                raise CollectiveMismatch(
                    f"rank {ranks[0]} gives {value_text(first)}, "
                    f"rank {own.rank} gives {value_text(tensor)}"
                )

    return given


def _check_splits(own: Contribution, members: int) -> None:
    """Check that the splits of an all-to-all have an entry for each member and sum to the rows."""
    rows = own.inputs[0].shape[0]
    has_all = len(own.sends) == len(own.receives) == members
    if not has_all or sum(own.sends) != rows:
        raise CollectiveMismatch(
            f"rank {own.rank} splits {rows} rows into {own.sends} and receives "
            f"{own.receives}, in a group of {members} ranks"
        )


@dataclass(frozen=True, slots=True)
class NestedStep(Step):
    """A called module, or a graph with a collective in it that an operator calls.

    ``runs`` carry out the graphs that the node calls, by the identity of their modules.
    """

    runs: dict[int, Callable[[Sequence[Any], rank_values.RankRandomStates], Any]]

    def value(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        args, _ = self.arguments(frame.of(self.node.all_input_nodes))
        if self.node.target is COND:
            predicate, if_true, if_false, given = args
            ways = set(map(bool, predicate if type(predicate) is PerRank else [predicate]))
            if len(ways) > 1:
                raise CollectiveMismatch(
                    "the ranks disagree on the predicate of a cond with a collective in it: "
                    "some would wait forever"
                )
            taken = if_true if ways.pop() else if_false
            run = self.runs[id(taken)]
        elif self.node.target is INVOKE_SUBGRAPH:
            run, given = self.runs[id(args[0])], args[2:]
        else:
            (run,), given = self.runs.values(), args

        output = run(list(given), frame.random)

        # Ranks that have the same objects get one tuple: values are shared by identity.
        same: dict[Any, Any] = {}
        results = []
        for rank in range(frame.sharings.size):
            own = rank_values.of_rank(output, rank)
            key = tuple(map(id, own)) if isinstance(own, tuple) else id(own)
            results.append(same.setdefault(key, own))
        return frame.sharings.value(results)
