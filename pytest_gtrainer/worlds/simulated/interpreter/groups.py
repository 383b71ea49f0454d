"""One rank's graph on all ranks: what the groups are that it names, and whether it is the same everywhere.

A graph names the groups of the rank that traced it, which stand for dimensions of the device mesh: "my
group along ep". The *partition* of a group is every rank's group along the same dimension.

One graph serves all ranks only if the first rank's is also the last one's (S4). Ranks that are neither are taken to
be like one of them: shards, pads and offsets that depend on the rank show at one of the two ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch.passes import ALL_GATHER_OUT, PRE_BUCKET_ALL_GATHER, root_ranks
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer._torch.values import OpOverload, schema
from pytest_gtrainer.worlds.simulated import DependsOnRank
from pytest_gtrainer.worlds.simulated.collectives import dtype_text
from pytest_gtrainer.worlds.simulated.interpreter.operators import (
    GROUP,
    attribute,
    described,
    group_name,
    input_name,
)

Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RankGraph:
    """A graph as one rank traced it, with its groups known on all ranks.

    Attributes:
        rank: the rank that traced it; size: the number of ranks.
        partitions: by group name; each is a partition of the ranks.
        meshes: the ranks of the meshes that the groups were looked up in.
    """

    gm: fx.GraphModule
    rank: int
    size: int
    partitions: Mapping[str, Partition]
    meshes: tuple[Tensor, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, gm: fx.GraphModule, *meshes: DeviceMesh) -> RankGraph:
        """Look the groups of ``gm`` up, in the world that it was traced in: call it while that is there.

        Args:
            meshes: device meshes whose dimensions, or several of them flattened, the groups are.

        Raises:
            ValueError: a group that is no dimension of a mesh; pass its mesh, or build a RankGraph by hand.
        """
        size = torch.distributed.get_world_size()
        tensors = tuple(root_ranks(mesh) for mesh in meshes)
        partitions = {name: _partition(name, group_ranks(name), size, tensors) for name in group_names(gm)}
        return cls(gm, torch.distributed.get_rank(), size, partitions, tensors)

    def with_graph(self, gm: fx.GraphModule) -> RankGraph:
        """Another graph of the same rank and meshes, before a pass for example; as ``of``, in the same world."""
        names = group_names(gm)
        known = {name: self.partitions[name] for name in names if name in self.partitions}
        others = [name for name in names if name not in known]
        partitions = {name: _partition(name, group_ranks(name), self.size, self.meshes) for name in others}
        return replace(self, gm=gm, partitions={**known, **partitions})

    def group_of(self, rank: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The group of ``rank`` along the dimension of the mesh that ``ranks`` are a group of in this graph."""
        partition = next(partition for partition in self.partitions.values() if ranks in partition)
        return next(group for group in partition if rank in group)


def group_names(gm: fx.GraphModule) -> list[str]:
    """Names of the groups in ``gm`` and graphs in it, each once."""
    nodes = (node for module in gm.modules() if isinstance(module, fx.GraphModule) for node in module.graph.nodes)
    called = (node for node in nodes if isinstance(node.target, OpOverload))
    with_group = (node for node in called if any(arg.name == GROUP for arg in schema(node.target).arguments))
    return list(dict.fromkeys(map(group_name, with_group)))


def _partition(name: str, own: tuple[int, ...], size: int, meshes: Sequence[Tensor]) -> Partition:
    if len(own) == size:
        return (own,)
    if len(own) == 1:
        return tuple((rank,) for rank in range(size))
    for mesh in meshes:
        for partition in _partitions_of(mesh):
            if own in partition and sum(map(len, partition)) == size:
                return partition
    raise ValueError(
        f"process group {name!r} of ranks {' '.join(map(str, own))} is no dimension of the meshes given: give the "
        "mesh that it belongs to, one that covers all ranks"
    )


def _partitions_of(mesh: Tensor) -> Iterator[Partition]:
    """The groups along every dimension of a mesh, and along several flattened into one; ranks ascend."""
    for count in range(1, mesh.ndim + 1):
        for dims in combinations(range(mesh.ndim), count):
            others = [dim for dim in range(mesh.ndim) if dim not in dims]
            extent = prod(mesh.shape[dim] for dim in dims)
            groups = mesh.permute(*others, *dims).reshape(-1, extent)
            yield tuple(tuple(sorted(group)) for group in groups.tolist())


# --- the same graph on all ranks


def check_same_on_all(first: RankGraph, last: RankGraph) -> None:
    """Refuse a graph that is another on the last rank than on the first.

    Names of nodes and of groups may differ; groups must stand for the same dimension of the mesh.

    Raises:
        DependsOnRank: naming the first node that differs.
    """
    pairs = zip_longest(_lines(first, first.gm), _lines(last, last.gm), fillvalue=("nothing more", ""))
    for (ours, where), (theirs, elsewhere) in pairs:
        if ours != theirs:
            raise DependsOnRank(
                f"the graph depends on the rank, first at {where or elsewhere}: rank {first.rank} has {ours}, "
                f"rank {last.rank} has {theirs}; a simulated world replays one graph on all ranks: choose sizes that "
                "the ranks divide, and code that does not ask for its rank"
            )


def _lines(graph: RankGraph, gm: fx.GraphModule, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every node without what may differ between ranks, and in which place it stands."""
    numbers = {node: index for index, node in enumerate(gm.graph.nodes)}
    for node, index in numbers.items():
        where = f"node {prefix}{index}, {input_name(node) if node.op == 'placeholder' else described(node)}"
        yield _line(graph, gm, node, numbers), where
        module = attribute(gm, str(node.target)) if node.op in ("get_attr", "call_module") else None
        if isinstance(module, fx.GraphModule):
            yield from _lines(graph, module, f"{prefix}{index}.")


def _line(graph: RankGraph, gm: fx.GraphModule, node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    target = "" if node.op in ("placeholder", "output") else str(node.target)
    if node.op == "get_attr":
        constant = attribute(gm, str(node.target))
        is_tensor = isinstance(constant, torch.Tensor)
        target = f"{_value(constant)} {constant.tolist()}" if is_tensor else type(constant).__name__
    arguments = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda leaf: f"%{numbers[leaf]}" if isinstance(leaf, fx.Node) else leaf
    )
    return f"{node.op} {target}{_without_rank(graph, node, arguments)} -> {_value(node.meta.get('val'))}"


def _without_rank(graph: RankGraph, node: fx.Node, arguments: Any) -> Any:
    """A group by its ranks everywhere; the place of the own part in a gather's buffer by that."""
    if not isinstance(node.target, OpOverload):
        return arguments
    args = list(arguments[0])
    for place, argument in enumerate(schema(node.target).arguments[: len(args)]):
        if argument.name == GROUP:
            args[place] = graph.partitions.get(args[place], args[place])
        elif argument.name == "rank" and schema(node.target).name == PRE_BUCKET_ALL_GATHER:
            args[place] = "own rank"
    if _is_own_part(graph, node):
        args[2:] = ["own part"]
    return args, arguments[1]


def _is_own_part(graph: RankGraph, node: fx.Node) -> bool:
    """Whether this cuts the rank's own place out of a buffer that a gather fills."""
    if node.target is not torch.ops.aten.slice.Tensor or len(node.args) != 4:
        return False
    buffer, _, start, stop = node.args
    for user in buffer.users:
        if user.target is ALL_GATHER_OUT and user.kwargs.get("out") is buffer:
            own = next(ranks for ranks in graph.partitions[group_name(user)] if graph.rank in ranks)
            return bool(start == own.index(graph.rank) * (stop - start))
    return False


def _value(value: Any) -> str:
    """
    >>> _value((torch.ones(2, 3), 1, None))
    '(float32[2, 3], 1, None)'
    """
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value)}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_value, value)) + ")"
    return str(value)
