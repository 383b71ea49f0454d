"""A traced graph as the interpreter reads it: nodes, groups, and whether all ranks have the same.

A graph names the groups of the rank that traced it. They stand for dimensions of the device mesh:
"my group along ep". The *partition* of a group is every rank's group along the same dimension.

One graph serves all ranks only if the first rank's graph is also the last one's. The ranks between
are taken to be like one of the two: shards, pads and offsets that depend on the rank show at one of
the two ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
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
from pytest_gtrainer._torch.values import HigherOrderOperator
from pytest_gtrainer.graph.nodes import (
    argument_of,
    graphs_called,
    is_collective,
    is_random,
    parameter,
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


def group_name(node: fx.Node) -> str:
    """Return the name of a collective's group.

    Raises:
        NoModel: the group is a value of the graph.
    """
    name = argument_of(node, GROUP)
    if not isinstance(name, str):
        raise NoModel(
            f"{node.target} ({node.name}) takes its group from the graph: trace with groups by name"
        )
    return name


def is_identity(node: fx.Node) -> bool:
    """Return whether a collective's operator returns its argument: it only waits, or wraps."""
    return is_collective(node) and short_name(node) in ("wait_tensor", "_wrap_tensor_autograd")


def value_node(node: fx.Node) -> fx.Node:
    """Return the node whose value this one has: the one that a wait waits for, else itself."""
    while is_identity(node):
        node = node.all_input_nodes[0]
    return node


def draws(node: fx.Node, root: torch.nn.Module) -> bool:
    """Return whether the operator, or a graph that it calls, draws random numbers."""
    if is_random(node):
        return True
    return any(draws(inner, gm) for gm in graphs_called(root, node) for inner in gm.graph.nodes)


def check_callable(node: fx.Node, root: torch.nn.Module) -> None:
    """Check that a node can be replayed rank by rank.

    Raises:
        NoModel: it calls compiled code, a method, or a module that is no graph.
    """
    called: Any = node.target
    if node.op == "call_module":
        called = root.get_submodule(str(node.target))
    if isinstance(called, HigherOrderOperator):
        is_compiled = called.name() == COMPILED_CODE
    else:
        # A function has its home itself, an instance of Inductor's classes has that of its class.
        homes = (getattr(called, "__module__", None), type(called).__module__)
        is_compiled = any(str(home).startswith(COMPILED_MODULES) for home in homes)

    kind = type(called).__name__
    if is_compiled:
        raise NoModel(
            f"{node.name} calls code that Inductor compiled ({getattr(called, '__name__', kind)}): "
            "a simulated world replays operators, so take the graph before it is compiled"
        )

    if node.op == "call_module" and not isinstance(called, fx.GraphModule):
        raise NoModel(f"{node.name} calls the module {node.target}, a {kind}: trace into it")
    if node.op == "call_method":
        raise NoModel(
            f"{node.name} calls the method {node.target!r}: trace to operators, with make_fx"
        )


@dataclass(frozen=True, slots=True)
class RankGraph:
    """A graph as one rank traced it, with its groups known on all ranks.

    Attributes:
        partitions: by the name of a group in the graph, every rank's group in its place.
        meshes: ranks of the meshes along which groups are looked up.
    """

    gm: fx.GraphModule
    rank: int
    size: int
    partitions: Mapping[str, Partition]
    meshes: tuple[Tensor, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, gm: fx.GraphModule, *meshes: DeviceMesh) -> RankGraph:
        """Look up the groups of ``gm`` along ``meshes``, in the world in which it was traced."""
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return cls(gm, rank, size, {}, tuple(map(root_ranks, meshes))).with_graph(gm)

    def with_graph(self, gm: fx.GraphModule) -> RankGraph:
        """Return another graph of the same rank and meshes, for example that before a pass.

        Its groups are looked up as by ``of``, so the world has to be there.
        """
        collectives = [node for node in nodes_within(gm) if parameter(node.target, GROUP)]
        names = dict.fromkeys(map(group_name, collectives))
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

        raise ValueError(
            f"process group {name!r} of ranks {' '.join(map(str, own))} is no dimension of the "
            "meshes given: give the mesh that it belongs to, one that covers all ranks"
        )

    def group_of(self, rank: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the group of ``rank`` along the dimension of which ``ranks`` are a group."""
        partition = next(partition for partition in self.partitions.values() if ranks in partition)
        return next(group for group in partition if rank in group)


def _partitions_of(mesh: Tensor) -> Iterator[Partition]:
    """Yield the groups along every dimension of a mesh, and along several flattened into one."""
    for count in range(1, mesh.ndim + 1):
        for dims in combinations(range(mesh.ndim), count):
            others = [dim for dim in range(mesh.ndim) if dim not in dims]
            groups = mesh.permute(*others, *dims).flatten(len(others))
            groups = groups.reshape(-1, groups.shape[-1])
            yield tuple(tuple(sorted(group)) for group in groups.tolist())


@dataclass(frozen=True, slots=True)
class RankLiterals:
    """Numbers that differ by rank in graphs that are equal otherwise.

    An example is the first row of a vocabulary that a rank holds.

    Attributes:
        values: by the name of a node and the place of an argument: the dimension of the mesh along
            which the number differs, and the number of every rank along it.
    """

    values: Mapping[tuple[str, int], tuple[int, tuple[Any, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, along: Mapping[int, Sequence[fx.GraphModule]]) -> RankLiterals:
        """Compare the graphs of ranks along dimensions of the mesh, each from rank 0's on."""
        found = {}
        for dim, graphs in along.items():
            for nodes in zip(*(gm.graph.nodes for gm in graphs), strict=False):
                for place, own in enumerate(zip(*(node.args for node in nodes), strict=False)):
                    if all(type(value) in (int, float) for value in own) and len(set(own)) > 1:
                        found[nodes[0].name, place] = dim, own
        return cls(found)

    def of_rank(self, coordinate: Sequence[int]) -> list[Any]:
        """Return the numbers of the rank at this place in the mesh."""
        return [own[coordinate[dim]] for dim, own in self.values.values()]

    def lift(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return a copy of a graph that takes the numbers as inputs, after its others.

        ``gm`` is the first rank's graph, or a rewrite of it.
        """
        if not self.values:
            return gm
        lifted = copied_lazily(gm)
        pairs = zip(gm.graph.nodes, lifted.graph.nodes, strict=True)
        copies = {node.name: copy for node, copy in pairs}
        for (name, place), (_, own) in self.values.items():
            node = copies.get(name)
            if node is None or node.args[place : place + 1] != own[:1]:
                raise DependsOnRank(
                    f"the graph depends on the rank: {own[0]} of {name}, which a pass has removed"
                )
            with lifted.graph.inserting_after(lifted.graph.find_nodes(op="placeholder")[-1]):
                number = lifted.graph.placeholder(f"of_rank_{name}_{place}")
            number.meta["val"] = own[0]
            node.update_arg(place, number)

        return lifted

    def with_numbers_of_first(
        self, first: fx.GraphModule, other: RankGraph, coordinate: Sequence[int]
    ) -> RankGraph:
        """Replace the numbers of a rank by the first's, where they are those of its place.

        A rank with the number of another place keeps it, so its graph still differs.
        """
        replaced = copied_lazily(other.gm)
        numbers = dict(zip(self.values, self.of_rank(coordinate), strict=True))
        for ours, theirs in zip(first.graph.nodes, replaced.graph.nodes, strict=False):
            for place, pair in enumerate(zip(ours.args, theirs.args, strict=False)):
                if (ours.name, place) in numbers and pair[1] == numbers[ours.name, place]:
                    theirs.update_arg(place, pair[0])
        return replace(other, gm=replaced)


def check_same_on_all(first: RankGraph, last: RankGraph) -> None:
    """Check that one graph serves all ranks. Names may differ, and groups along one dimension.

    Raises:
        DependsOnRank: the last rank's graph is another.
    """
    lines = {g.rank: node_lines(g.gm, g.rank, g.partitions) for g in (first, last)}
    found = first_difference(lines)
    if found is not None:
        raise DependsOnRank(
            "the graph depends on the rank, first at "
            f"{found.line.where or found.other_line.where}: rank {found.rank} has "
            f"{found.line.text}, rank {found.other} has {found.other_line.text}; "
            "a simulated world replays one graph on all ranks: choose sizes that "
            "the ranks divide, and code that does not ask for its rank"
        )
