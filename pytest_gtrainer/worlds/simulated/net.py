"""Net models: in which order, and with which roundings, a simulated world adds what its ranks send.

Terms. A *ring* is an order of ranks in which each sends to the next. A *channel* is one ring and the
part of every payload that goes around it. A *hop* is one addition, by the rank that a partial sum
arrives at. Where the sum of an element starts, and so its rounding, depends on its channel and
thereby on its offset in the payload: that is what makes the order of parameters in a bucket visible.

The order is that of NCCL's ring kernels: in a reduce-scatter the shard of rank d is summed as
next(d), next(next(d)), ..., d, with one rounding per hop in the dtype of the wire; an average
multiplies every input by 1/N first. A net model exposes a dependence on order; it does not predict
the bits of a given system, whose rings, protocols and thresholds are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated import runs
from pytest_gtrainer.worlds.simulated.checks import (
    check_choice,
    check_count,
    check_element,
    check_members,
    check_rows,
)
from pytest_gtrainer.worlds.simulated.orders import after_place, after_rank, as_listed, told
from pytest_gtrainer.worlds.simulated.reductions import check_reduction
from pytest_gtrainer.worlds.simulated.ring_sum import Reduction, ring_sum, units_of
from pytest_gtrainer.worlds.simulated.rings import Rings, check_rings, rail_rings, read_rings, restrict
from pytest_gtrainer.worlds.simulated.runs import Run

ACCUMULATIONS = ("wire", "fp32")
AVERAGES = ("premultiply", "divide")
CHANNELS = 4


class Net(Protocol):
    """What the interpreter and the ranks on threads ask of a net.

    ``by_destination``: whether the shards of some destinations can be reduced without the others'.
    """

    by_destination: ClassVar[bool]

    @property
    def size(self) -> int:
        """How many ranks it connects."""
        ...

    def for_group(self, ranks: Sequence[int]) -> Net:
        """The net of a group of these ranks of its own."""
        ...

    def reduce_scatter(self, inputs: Tensor, op: str, destinations: range | None = None) -> Tensor:
        """What the ranks of ``destinations``, else all, get of ``inputs``, one row a rank."""
        ...

    def all_reduce(self, inputs: Tensor, op: str) -> Tensor:
        """What every rank gets of ``inputs``, one row a rank."""
        ...

    def explain(self, collective: str, offset: int, count: int, dtype: torch.dtype, destination: int = 0) -> Path:
        """How the element at ``offset`` of a payload of ``count`` elements is summed."""
        ...


@dataclass(frozen=True, slots=True)
class Path:
    """How one element is summed: its channel, and the ranks of the world in the order in which they add."""

    channel: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"channel {self.channel}, summed in the order of ranks {' '.join(map(str, self.ranks))}"


@dataclass(frozen=True, slots=True)
class NetModel:
    """Rings over several nodes, as NCCL builds them.

    Attributes:
        nodes, ranks_per_node: where the ranks lie; rank r is on node r // ranks_per_node.
        channels: number of channels; by default that of ``rings``, else 4.
        partition: which part of a payload goes through which channel: "contiguous", one part each (NCCL
            from 2.20.3 on), or "round-robin", pieces of ``chunk_bytes`` in turn (before).
        accumulate: "wire" rounds every hop to the payload's dtype; "fp32" adds all ranks in one order, in fp32
            or better, and rounds once, as NVLS and symmetric kernels do.
        rings: one ring of all ranks for each channel, by default ``rail_rings``; see also ``from_log``.
        average: "premultiply" every input by 1/N, or "divide" the sum by N.
        chunk_bytes: of the round-robin partition.
        members: ranks of the subgroup that this is the net of, None for the whole world; see ``for_group``.

    Raises:
        ValueError: in one sentence, naming the value.
    """

    by_destination: ClassVar[bool] = True

    nodes: int = 1
    ranks_per_node: int = 8
    channels: int | None = None
    partition: str = "contiguous"
    accumulate: str = "wire"
    rings: Rings | None = None
    average: str = "premultiply"
    chunk_bytes: int = 512
    members: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "chunk_bytes"):
            check_count(name, getattr(self, name))
        if self.channels is not None:
            check_count("channels", self.channels)
        check_choice("partition", self.partition, runs.PARTITIONS)
        check_choice("accumulate", self.accumulate, ACCUMULATIONS)
        check_choice("average", self.average, AVERAGES)
        if self.rings is not None:
            object.__setattr__(self, "rings", tuple(tuple(ring) for ring in self.rings))
            self._check_rings(self.rings)
        if self.members is not None:
            object.__setattr__(self, "members", tuple(self.members))
            check_members(self.members, self.world_size)

    def _check_rings(self, rings: Rings) -> None:
        if not rings:
            raise ValueError("rings is empty: give one ring for each channel, or None for rail rings")
        check_rings(rings, self.world_size)
        if self.channels not in (None, len(rings)):
            raise ValueError(
                f"channels={self.channels}, but there are {len(rings)} rings: leave channels out, or give as many rings"
            )

    @classmethod
    def of_world(cls, size: int, nodes: int = 1, **fields: Any) -> NetModel:
        """The net of ``size`` ranks on ``nodes`` nodes.

        Raises:
            ValueError: the nodes do not divide the ranks, or as the class.
        """
        check_count("nodes", nodes)
        if size % nodes:
            raise ValueError(f"{size} ranks do not divide over {nodes} nodes: change one of them")
        return cls(nodes=nodes, ranks_per_node=size // nodes, **fields)

    @classmethod
    def from_log(cls, path: str | FilePath, nodes: int, **fields: Any) -> NetModel:
        """The net whose rings are in a file of channel lines, or in a log that NCCL wrote.

        Raises:
            ValueError: the file has no channels, or as ``of_world``.
        """
        rings = read_rings(path)
        return cls.of_world(len(rings[0]), nodes, rings=rings, **fields)

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole world."""
        return self.nodes * self.ranks_per_node

    @property
    def size(self) -> int:
        """Number of ranks that this net connects."""
        return self.world_size if self.members is None else len(self.members)

    def for_group(self, ranks: Sequence[int]) -> NetModel:
        """The net as a subgroup of these ranks of the world sees it: the same rings, without the others.

        Raises:
            ValueError: no ranks, a repeated one, or one that is not in the world.
        """
        return replace(self, members=tuple(ranks))

    def reduce_scatter(self, inputs: Tensor, op: str, destinations: range | None = None) -> Tensor:
        """``[n, n * m]``, a row for each rank's input, to ``[n, m]``, a row for each rank's result.

        Args:
            destinations: only the shards of these ranks of the group: ``[n, k * m]`` to ``[k, m]``.

        Raises:
            NoModel: the op or dtype is not modelled.
        """
        wanted = range(self.size) if destinations is None else destinations
        check_reduction("reduce_scatter", op, inputs.dtype)
        check_rows("reduce_scatter", inputs, self.size, parts=len(wanted))
        orders = _orders(self, "reduce_scatter")[:, :, wanted.start : wanted.stop]
        return self._reduce("reduce_scatter", inputs, orders, len(wanted), op).view(len(wanted), -1)

    def all_reduce(self, inputs: Tensor, op: str) -> Tensor:
        """``[n, k]``, a row for each rank's input, to ``[k]``, which every rank gets.

        Raises:
            NoModel: the op or dtype is not modelled.
        """
        check_reduction("all_reduce", op, inputs.dtype)
        check_rows("all_reduce", inputs, self.size)
        return self._reduce("all_reduce", inputs, _orders(self, "all_reduce"), 1, op)

    def explain(self, collective: str, offset: int, count: int, dtype: torch.dtype, destination: int = 0) -> Path:
        """How the element at ``offset`` of a payload of ``count`` elements is summed.

        The payload is what one rank gets: its shard of a reduce-scatter, the whole of an all-reduce.
        ``destination`` is the rank, in the group, whose shard it is.

        Raises:
            ValueError: another collective, or an element outside of the payload.
        """
        check_element(collective, offset, count)
        run = next(run for run in self._runs(collective, count, dtype.itemsize) if offset in run)
        place = run.place if collective == "all_reduce" else destination
        return Path(run.channel, told(_orders(self, collective)[run.channel], place, self.members))

    def _reduce(self, collective: str, inputs: Tensor, orders: Tensor, payloads: int, op: str) -> Tensor:
        size, dtype = inputs.shape[1] // payloads, inputs.dtype
        wide = self.accumulate == "fp32" and dtype.is_floating_point
        accumulator = torch.promote_types(dtype, torch.float32) if wide else dtype
        units = units_of(self._runs(collective, size, dtype.itemsize), payloads, size, dtype.itemsize)
        return ring_sum(inputs, units, orders, Reduction(op, accumulator, self.average))

    def _runs(self, collective: str, count: int, itemsize: int) -> list[Run]:
        """Which element of a payload goes around which ring, and where it starts there."""
        if not count:
            return []
        if self.accumulate == "fp32":
            return [Run(0, 0, count)]
        if collective == "reduce_scatter":
            return self._parts(count, itemsize, chunks=1)
        parts = self._parts(count, itemsize, chunks=self.size)
        return [chunk for part in parts for chunk in runs.chunks(part, self._chunk(part, itemsize))]

    def _parts(self, count: int, itemsize: int, chunks: int) -> list[Run]:
        """What goes through one channel; a round-robin piece holds so many chunks."""
        channels = len(_rings(self))
        if self.partition == "contiguous":
            return runs.contiguous(count, channels, itemsize)
        return runs.round_robin(count, channels, chunks * max(1, self.chunk_bytes // itemsize))

    def _chunk(self, part: Run, itemsize: int) -> int:
        """Elements of one chunk of an all-reduce."""
        if self.partition == "contiguous":
            return runs.whole_words(-(-part.length // self.size), itemsize)
        return max(1, self.chunk_bytes // itemsize)


@lru_cache(maxsize=256)
def _rings(net: NetModel) -> Rings:
    """The ring of every channel, restricted to the members, by rank in the group."""
    rings = net.rings or rail_rings(net.nodes, net.ranks_per_node, net.channels or CHANNELS)
    return rings if net.members is None else tuple(restrict(ring, net.members) for ring in rings)


@lru_cache(maxsize=256)
def _orders(net: NetModel, collective: str) -> Tensor:
    """``[channel, hop, place]``: who adds when; the places of a reduce-scatter are the ranks."""
    order = after_rank if collective == "reduce_scatter" else after_place
    return torch.stack([(as_listed if net.accumulate == "fp32" else order)(ring) for ring in _rings(net)])
