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

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path as FilePath
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.rings import (
    PARTITIONS,
    Rings,
    Stretch,
    after_place,
    after_rank,
    as_listed,
    check_reduction,
    check_rings,
    chunks,
    dealt,
    rail_rings,
    read_rings,
    restrict,
    ring_sum,
    whole_words,
)

ACCUMULATIONS = ("wire", "fp32")
AVERAGES = ("premultiply", "divide")
CHANNELS = 4


@dataclass(frozen=True, slots=True)
class Path:
    """How one element is summed: its channel, and the ranks of the world in the order in which they add."""

    channel: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, channel: int, order: Tensor, place: int, members: Sequence[int] | None) -> Path:
        """From one place on; ``order[hop, place]`` are ranks of the group that ``members`` are, if not of the world."""
        ranks: list[int] = order[:, place].tolist()
        return cls(channel, tuple(ranks if members is None else (members[rank] for rank in ranks)))

    def __str__(self) -> str:
        return f"channel {self.channel}, summed in the order of ranks {' '.join(map(str, self.ranks))}"


class Net(ABC):
    """The order in which a group of ranks adds: what the interpreter and the ranks on threads ask of a net.

    Attributes:
        by_destination: whether the shards of some destinations can be reduced without the others'.
        world_size: number of ranks of the whole world.
        members: ranks of the subgroup that this is the net of, None for the whole world; see ``for_group``.
    """

    __slots__ = ()
    by_destination: ClassVar[bool]
    members: tuple[int, ...] | None

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of ranks that this net connects."""
        return self.world_size if self.members is None else len(self.members)

    def for_group(self, ranks: Sequence[int]) -> Self:
        """The net as a subgroup of these ranks of the world sees it.

        Raises:
            ValueError: no ranks, a repeated one, or one that is not in the world.
        """
        return replace(self, members=tuple(ranks))  # type: ignore[type-var]

    def _check_members(self) -> None:
        if self.members is None:
            return
        members, size = tuple(self.members), self.world_size
        object.__setattr__(self, "members", members)
        if not members:
            raise ValueError("a group without ranks has no net: name at least one rank")
        if len(set(members)) < len(members):
            raise ValueError(f"the group {members} repeats a rank: name each once")
        outside = [rank for rank in members if not 0 <= rank < size]
        if outside:
            raise ValueError(
                f"rank {outside[0]} of the group is not in the world of {size} ranks: they are 0..{size - 1}"
            )

    @abstractmethod
    def reduce_scatter(self, inputs: Tensor, op: str, destinations: range | None = None) -> Tensor:
        """``[n, n * m]``, a row for each rank's input, to ``[n, m]``, a row for each rank's result.

        Args:
            destinations: only the shards of these ranks of the group: ``[n, k * m]`` to ``[k, m]``.

        Raises:
            NoModel: the op or dtype is not modelled.
            ValueError: ``destinations`` of a net that is not ``by_destination``.
        """

    @abstractmethod
    def all_reduce(self, inputs: Tensor, op: str) -> Tensor:
        """``[n, k]``, a row for each rank's input, to ``[k]``, which every rank gets.

        Raises:
            NoModel: the op or dtype is not modelled.
        """

    @abstractmethod
    def explain(self, collective: str, offset: int, count: int, dtype: torch.dtype, destination: int = 0) -> Path:
        """How the element at ``offset`` of a payload of ``count`` elements is summed.

        The payload is what one rank gets: its shard of a reduce-scatter, the whole of an all-reduce.
        ``destination`` is the rank, in the group, whose shard it is.

        Raises:
            ValueError: another collective, or an element outside of the payload.
        """


@dataclass(frozen=True, slots=True)
class NetModel(Net):
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
        check_choice("partition", self.partition, PARTITIONS)
        check_choice("accumulate", self.accumulate, ACCUMULATIONS)
        check_choice("average", self.average, AVERAGES)
        if self.rings is not None:
            object.__setattr__(self, "rings", tuple(tuple(ring) for ring in self.rings))
            if not self.rings:
                raise ValueError("rings is empty: give one ring for each channel, or None for rail rings")
            check_rings(self.rings, self.world_size)
            if self.channels not in (None, len(self.rings)):
                raise ValueError(
                    f"channels={self.channels}, but there are {len(self.rings)} rings: "
                    "leave channels out, or give as many rings"
                )
        self._check_members()

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
        return self.nodes * self.ranks_per_node

    def reduce_scatter(self, inputs: Tensor, op: str, destinations: range | None = None) -> Tensor:
        wanted = range(self.size) if destinations is None else destinations
        orders = _orders(self, "reduce_scatter")[:, :, wanted.start : wanted.stop]
        return self._reduce("reduce_scatter", inputs, orders, len(wanted), op).view(len(wanted), -1)

    def all_reduce(self, inputs: Tensor, op: str) -> Tensor:
        return self._reduce("all_reduce", inputs, _orders(self, "all_reduce"), 1, op)

    def explain(self, collective: str, offset: int, count: int, dtype: torch.dtype, destination: int = 0) -> Path:
        check_choice("collective", collective, ("reduce_scatter", "all_reduce"))
        if not 0 <= offset < count:
            raise ValueError(f"element {offset} is not in a payload of {count}")
        part = next(part for part in self._stretches(collective, count, dtype.itemsize) if offset in part)
        place = part.place if collective == "all_reduce" else destination
        return Path.of(part.channel, _orders(self, collective)[part.channel], place, self.members)

    def _reduce(self, collective: str, inputs: Tensor, orders: Tensor, payloads: int, op: str) -> Tensor:
        check_reduction(collective, op, inputs.dtype)
        if inputs.dim() != 2 or inputs.shape[0] != self.size:
            shape = tuple(inputs.shape)
            raise ValueError(f"{collective} takes one row for each of {self.size} ranks; not shape {shape}")
        if inputs.shape[1] % payloads:
            raise ValueError(f"{collective} of {inputs.shape[1]} elements over {payloads} ranks: pad them first")
        dtype = inputs.dtype
        wide = self.accumulate == "fp32" and dtype.is_floating_point
        return ring_sum(
            inputs,
            self._stretches(collective, inputs.shape[1] // payloads, dtype.itemsize),
            orders,
            op,
            accumulator=torch.promote_types(dtype, torch.float32) if wide else dtype,
            average=self.average,
            payloads=payloads,
        )

    def _stretches(self, collective: str, count: int, itemsize: int) -> list[Stretch]:
        """Which element of a payload goes around which ring, and where it starts there."""
        if not count:
            return []
        if self.accumulate == "fp32":
            return [Stretch(0, 0, count)]
        channels, is_contiguous = len(_rings(self)), self.partition == "contiguous"
        chunks_of_part = 1 if collective == "reduce_scatter" else self.size
        piece = max(1, self.chunk_bytes // itemsize)
        one_each = whole_words(-(-count // channels), itemsize)
        parts = dealt(count, channels, one_each if is_contiguous else chunks_of_part * piece)
        if chunks_of_part == 1:
            return parts
        lengths = [whole_words(-(-p.length // chunks_of_part), itemsize) if is_contiguous else piece for p in parts]
        return [chunk for part, length in zip(parts, lengths, strict=True) for chunk in chunks(part, length)]


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


# --- what a net is built from and given; one sentence each


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a whole number, 1 or more."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(choices)}")


# --- one test under many nets


FIELDS = ("ranks", "nodes", "channels", "partition", "accumulate")
"""What tells the nets of a sweep apart; the columns of its table."""


def sweep_nets(
    size: int,
    *,
    nodes: Sequence[int] = (1, 2),
    channels: Sequence[int] = (1, CHANNELS),
    partition: Sequence[str] = ("contiguous",),
    accumulate: Sequence[str] = ("wire",),
    **fields: Any,
) -> list[Any]:
    """Nets of ``size`` ranks for ``pytest.mark.parametrize``: every combination, each with its id.

    >>> [parameter.id for parameter in sweep_nets(16, nodes=[2], channels=[1, 4])]
    ['nodes2-channels1-contiguous-wire', 'nodes2-channels4-contiguous-wire']

    Args:
        fields: of all nets; see ``NetModel``.

    Raises:
        ValueError: as ``NetModel.of_world``.
    """
    import pytest

    return [
        pytest.param(
            NetModel.of_world(size, count, channels=each, partition=parts, accumulate=sums, **fields),
            id=f"nodes{count}-channels{each}-{parts}-{sums}",
        )
        for count, each, parts, sums in product(nodes, channels, partition, accumulate)
    ]


def row_of(net: Net) -> dict[str, Any]:
    """The net in a table's words; "-" for what a net of another kind does not have.

    >>> row_of(NetModel(2, 8))
    {'ranks': 16, 'nodes': 2, 'channels': 4, 'partition': 'contiguous', 'accumulate': 'wire'}
    """
    row = {name: getattr(net, name, "-") for name in FIELDS}
    if isinstance(net, NetModel):
        row["channels"] = net.channels or len(net.rings or ()) or CHANNELS
    return {**row, "ranks": net.size}
