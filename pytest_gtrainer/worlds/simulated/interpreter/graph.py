"""What a traced graph is to the interpreter: its nodes, its groups, and whether it is the same on all ranks.

A graph names the groups of the rank that traced it, which stand for dimensions of the device mesh: "my
group along ep". The *partition* of a group is every rank's group along the same dimension.

One graph serves all ranks only if the first rank's is also the last one's (S4). Ranks that are neither are taken to
be like one of them: shards, pads and offsets that depend on the rank show at one of the two ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch.graph_modules import copied_lazily
from pytest_gtrainer._torch.passes import (
    COMPILED_CODE,
    COMPILED_MODULES,
    root_ranks,
)
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer._torch.values import HigherOrderOperator, OpOverload, schema
from pytest_gtrainer.graph.nodes import (
    argument_of,
    graphs_called,
    is_collective,
    is_random,
    short_name,
)
from pytest_gtrainer.graph.same_on_ranks import (
    GROUP,
    Partition,
    first_difference,
    node_lines,
    nodes_within,
)
from pytest_gtrainer.worlds.simulated import DependsOnRank, NoModel

_PASSED_THROUGH = ("wait_tensor", "_wrap_tensor_autograd")


def group_name(node: fx.Node) -> str:
    """The group of a collective; NoModel if it is no name."""
    name = argument_of(node, GROUP)
    if not isinstance(name, str):
        raise NoModel(
            f"{node.target} ({node.name}) takes its group from the graph: trace with groups by name"
        )
    return name


def passes_through(node: fx.Node) -> bool:
    """Whether a collective's operator gives its argument back: a wait."""
    return is_collective(node) and short_name(node) in _PASSED_THROUGH


def source_of(node: fx.Node) -> fx.Node:
    """The node whose value this one has: what a wait waits for, else itself."""
    while passes_through(node):
        node = node.all_input_nodes[0]
    return node


def draws(node: fx.Node, root: torch.nn.Module) -> bool:
    """Whether the operator, or a graph that it calls, draws random numbers."""
    return is_random(node) or any(
        draws(inner, gm) for gm in graphs_called(root, node) for inner in gm.graph.nodes
    )


def check_callable(node: fx.Node, root: torch.nn.Module) -> None:
    """Refuse what is no operator that could be replayed rank by rank: compiled code, a module that is no graph."""
    called: Any = root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    homes = (getattr(called, "__module__", None), type(called).__module__)
    is_module = any(str(home).startswith(COMPILED_MODULES) for home in homes)
    if called.name() == COMPILED_CODE if isinstance(called, HigherOrderOperator) else is_module:
        name = getattr(called, "__name__", None) or type(called).__name__
        wrong = f"{node.name} calls code that Inductor compiled ({name})"
        raise NoModel(
            f"{wrong}: a simulated world replays operators, so take the graph before it is compiled"
        )
    if node.op == "call_module" and not isinstance(called, fx.GraphModule):
        raise NoModel(
            f"{node.name} calls the module {node.target}, a {type(called).__name__}: trace into it"
        )
    if node.op == "call_method":
        raise NoModel(
            f"{node.name} calls the method {node.target!r}: trace to operators, with make_fx"
        )


@dataclass(frozen=True, slots=True)
class RankGraph:
    """A graph as one rank traced it, with its groups known on all ranks."""

    gm: fx.GraphModule
    rank: int
    size: int
    partitions: Mapping[str, Partition]  # of the ranks, by name of the group
    meshes: tuple[Tensor, ...] = field(
        default=(), compare=False
    )  # their ranks; groups are looked up in them

    @classmethod
    def of(cls, gm: fx.GraphModule, *meshes: DeviceMesh) -> RankGraph:
        """Look the groups of ``gm`` up along ``meshes``, in the world that it was traced in, while that is there."""
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return cls(gm, rank, size, {}, tuple(map(root_ranks, meshes))).with_graph(gm)

    def with_graph(self, gm: fx.GraphModule) -> RankGraph:
        """Another graph of the same rank and meshes, before a pass for example; as ``of``, in the same world."""
        called = (node for node in nodes_within(gm) if isinstance(node.target, OpOverload))
        with_group = (
            node
            for node in called
            if any(arg.name == GROUP for arg in schema(node.target).arguments)
        )
        names = dict.fromkeys(map(group_name, with_group))
        return replace(self, gm=gm, partitions={name: self._partition(name) for name in names})

    def _partition(self, name: str) -> Partition:
        if name in self.partitions:
            return self.partitions[name]
        own = group_ranks(name)
        if len(own) == self.size:
            return (own,)
        if len(own) == 1:
            return tuple((rank,) for rank in range(self.size))
        for mesh in self.meshes:
            for partition in _partitions_of(mesh):
                if own in partition and sum(map(len, partition)) == self.size:
                    return partition
        wrong = f"process group {name!r} of ranks {' '.join(map(str, own))} is no dimension of the meshes given"
        raise ValueError(f"{wrong}: give the mesh that it belongs to, one that covers all ranks")

    def group_of(self, rank: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The group of ``rank`` along the dimension of the mesh that ``ranks`` are a group of in this graph."""
        partition = next(partition for partition in self.partitions.values() if ranks in partition)
        return next(group for group in partition if rank in group)


def _partitions_of(mesh: Tensor) -> Iterator[Partition]:
    """The groups along every dimension of a mesh, and along several flattened into one; ranks ascend."""
    for count in range(1, mesh.ndim + 1):
        for dims in combinations(range(mesh.ndim), count):
            others = [dim for dim in range(mesh.ndim) if dim not in dims]
            groups = mesh.permute(*others, *dims).reshape(-1, prod(mesh.shape[dim] for dim in dims))
            yield tuple(tuple(sorted(group)) for group in groups.tolist())


@dataclass(frozen=True, slots=True)
class RankLiterals:
    """Numbers that each rank has of its own in an otherwise equal graph: where its rows of a vocabulary begin, say."""

    # by name of the node and place among its arguments: the dimension of the mesh along which the number differs, and
    # the number of every rank along it
    values: Mapping[tuple[str, int], tuple[int, tuple[Any, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, along: Mapping[int, Sequence[fx.GraphModule]]) -> RankLiterals:
        """Those of the graphs of ranks along dimensions of the mesh, each from rank 0's on."""
        found = {}
        for dim, graphs in along.items():
            for nodes in zip(*(gm.graph.nodes for gm in graphs), strict=False):
                for place, own in enumerate(zip(*(node.args for node in nodes), strict=False)):
                    if all(type(value) in (int, float) for value in own) and len(set(own)) > 1:
                        found[nodes[0].name, place] = dim, own
        return cls(found)

    def of_rank(self, coordinate: Sequence[int]) -> list[Any]:
        """The numbers of the rank at this place in the mesh."""
        return [own[coordinate[dim]] for dim, own in self.values.values()]

    def lifted(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A copy of the first rank's graph, or of a rewrite, with an input for each number, behind the others."""
        if not self.values:
            return gm
        made = copied_lazily(gm)
        named = {old.name: new for old, new in zip(gm.graph.nodes, made.graph.nodes, strict=True)}
        for (name, place), (_, own) in self.values.items():
            if (
                name not in named
                or place >= len(named[name].args)
                or named[name].args[place] != own[0]
            ):
                raise DependsOnRank(
                    f"the graph depends on the rank: {own[0]} of {name}, which a pass has removed"
                )
            with made.graph.inserting_after(made.graph.find_nodes(op="placeholder")[-1]):
                number = made.graph.placeholder(f"of_rank_{name}_{place}")
            number.meta["val"] = own[0]
            named[name].update_arg(place, number)
        return made

    def with_firsts(
        self, first: fx.GraphModule, other: RankGraph, coordinate: Sequence[int]
    ) -> RankGraph:
        """The graph of the rank at this place with the first's numbers, wherever its own are those of its place."""
        made, numbers = (
            copied_lazily(other.gm),
            dict(zip(self.values, self.of_rank(coordinate), strict=True)),
        )
        for ours, theirs in zip(first.graph.nodes, made.graph.nodes, strict=False):
            for index in range(min(len(ours.args), len(theirs.args))):
                if (ours.name, index) in numbers and theirs.args[index] == numbers[
                    ours.name, index
                ]:
                    theirs.update_arg(index, ours.args[index])
        return replace(other, gm=made)


def check_same_on_all(first: RankGraph, last: RankGraph) -> None:
    """DependsOnRank if the last rank's graph is another; names may differ, and groups along one dimension."""
    lines = {
        graph.rank: node_lines(graph.gm, graph.rank, graph.partitions) for graph in (first, last)
    }
    found = first_difference(lines)
    if found is not None:
        raise DependsOnRank(
            f"the graph depends on the rank, first at {found.line.where or found.other_line.where}: "
            f"rank {found.rank} has {found.line.text}, rank {found.other} has {found.other_line.text}; "
            "a simulated world replays one graph on all ranks: choose sizes that "
            "the ranks divide, and code that does not ask for its rank"
        )
