"""Process groups: what the groups that one rank's graph names are on all ranks.

A graph names the groups of the rank that traced it, which stand for dimensions of the device mesh: "my
group along ep". The *partition* of a group is every rank's group along the same dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch.interpreter import group_of, root_ranks
from pytest_gtrainer._torch.operators import OpOverload, schema
from pytest_gtrainer.worlds.simulated import NoModel
from pytest_gtrainer.worlds.simulated.interpreter.binding import named_arguments

Partition = tuple[tuple[int, ...], ...]
GROUP = "group_name"


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
        partitions = {name: _partition(name, group_of(name), size, tensors) for name in group_names(gm)}
        return cls(gm, torch.distributed.get_rank(), size, partitions, tensors)

    def with_graph(self, gm: fx.GraphModule) -> RankGraph:
        """Another graph of the same rank and meshes, before a pass for example; as ``of``, in the same world."""
        names = group_names(gm)
        known = {name: self.partitions[name] for name in names if name in self.partitions}
        others = [name for name in names if name not in known]
        partitions = {name: _partition(name, group_of(name), self.size, self.meshes) for name in others}
        return replace(self, gm=gm, partitions={**known, **partitions})

    def group_of(self, rank: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The group of ``rank`` along the dimension of the mesh that ``ranks`` are a group of in this graph."""
        partition = next(partition for partition in self.partitions.values() if ranks in partition)
        return next(group for group in partition if rank in group)


def group_names(gm: fx.GraphModule) -> list[str]:
    """Names of the groups in ``gm`` and graphs in it, each once."""
    names: dict[str, None] = {}
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            names.update(dict.fromkeys(_names(module.graph)))
    return list(names)


def _names(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and any(arg.name == GROUP for arg in schema(node.target).arguments):
            yield group_name(node)


def group_name(node: fx.Node) -> str:
    """The group of a collective.

    Raises:
        NoModel: it is no name.
    """
    name = named_arguments(node)[GROUP]
    if not isinstance(name, str):
        raise NoModel(f"{node.target} ({node.name}) takes its group from the graph: trace with groups by name")
    return name


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
