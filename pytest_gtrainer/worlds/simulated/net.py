"""Net models: in which order, and with which roundings, a simulated world adds what its ranks send.

Terms. A *ring* is an order of ranks in which each sends to the next. A *channel* is one ring or tree and the part of
every payload that goes through it. A *hop* is one addition, by the rank that gets a partial sum. The channel of an
element, and so its offset in the payload, decides where its sum starts: so the order of a bucket changes rounding.

The order is that of NCCL's kernels. Ring: in a reduce-scatter the shard of rank d is summed as
next(d), next(next(d)), ..., d (reduce_scatter.h:38-54); in an all-reduce chunk i of a loop starts behind the
i-th rank of the ring, counted from rank 0 (all_reduce.h:23-62, init.cc:797-802). Tree and PAT: see ``trees``. Every
hop rounds once, in the dtype of the wire; an average multiplies every input by 1/N first. Lines are of NCCL 2.30.7.

A net model exposes a dependence on order; it does not predict the bits of a given system, whose rings, protocols
and thresholds are its own.
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

from pytest_gtrainer.worlds.simulated import rings as by_ring
from pytest_gtrainer.worlds.simulated import trees as by_tree
from pytest_gtrainer.worlds.simulated.logs import rings_from_log, trees_from_log

PROTOCOLS = {"Simple": 2 << 20, "LL128": 576_000, "LL": 32 << 10}
"""The bytes of a chunk of a ring all-reduce, with NCCL's default buffers (init.cc:809-813, enqueue.cc:2222-2227)."""
CHANNELS = 4
_CHOICES = {
    "partition": by_ring.PARTITIONS,
    "accumulate": ("wire", "fp32"),
    "average": ("premultiply", "divide"),
    "algorithm": ("ring", "tree", "pat"),
    "protocol": tuple(PROTOCOLS),
}


@dataclass(frozen=True, slots=True)
class Path:
    """How one element is summed: its channel, and the ranks that add, in order; a tuple among them arrives as one sum.

    >>> str(Path(2, (3, 2, 1, 0, (7, 6)), "tree"))
    'channel 2, tree, summed in the order of ranks 3 2 1 0 (7 6), where what stands in brackets arrives as one sum'
    """

    channel: int
    ranks: by_tree.Order
    algorithm: str = "ring"

    @classmethod
    def of(
        cls,
        channel: int,
        order: by_tree.Order,
        members: Sequence[int] | None,
        algorithm: str = "ring",
    ) -> Path:
        """From an order of ranks of the group that ``members`` are, if not of the world."""
        return cls(channel, order if members is None else by_tree.mapped(order, members), algorithm)

    def __str__(self) -> str:
        by = "" if self.algorithm == "ring" else f" {self.algorithm},"
        forks = any(isinstance(term, tuple) for term in self.ranks)
        legend = ", where what stands in brackets arrives as one sum" if forks else ""
        return f"channel {self.channel},{by} summed in the order of ranks {by_tree.told(self.ranks)}{legend}"


class Net(ABC):
    """The order in which a group of ranks adds: what a simulated world asks of a net, ``NetModel`` or one of your own.

    One of your own is a frozen dataclass with a field ``members``. It is deterministic, and it adds: what only moves
    data needs no net. An ``op`` is "sum", "avg", "product", "max", "min", or "premul_sum", a sum of inputs that come
    multiplied. The table of a sweep calls it by the name of its class.

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
        for rank in members:
            if rank not in range(size):
                raise ValueError(
                    f"rank {rank} of the group is not in the world of {size} ranks: they are 0..{size - 1}"
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
    def explain(
        self,
        collective: str,
        offset: int,
        count: int,
        dtype: torch.dtype,
        destination: int = 0,
        op: str = "sum",
    ) -> Path:
        """How the element at ``offset`` of a payload of ``count`` elements is summed: for messages.

        The payload is what one rank gets: its shard of a reduce-scatter, the whole of an all-reduce.
        ``destination`` is the rank, in the group, whose shard it is.

        Raises:
            ValueError: another collective, or an element outside of the payload.
        """


@dataclass(frozen=True, slots=True)
class NetModel(Net):
    """Rings and trees over several nodes, as NCCL builds them.

    Attributes:
        nodes, ranks_per_node: where the ranks lie; rank r is on node r // ranks_per_node.
        channels: number of channels; by default that of ``rings``, else 4.
        partition: which part of a payload goes through which channel: "contiguous", one part each, in words of 16
            bytes (NCCL 2.20.3 to 2.22.3), so that small payloads use all channels; "cells", one part each, in cells
            of 32 KiB of traffic (2.29.2 and later; 16 KiB from 2.23.4 on), so that small payloads use few; or
            "round-robin", pieces of ``chunk_bytes`` in turn (before).
        accumulate: "wire" rounds every hop to the payload's dtype; "fp32" adds all ranks in one order, in fp32
            or better, and rounds once, as NVLS and symmetric kernels do.
        rings: one ring of all ranks for each channel, by default ``rail_rings``; see also ``from_log``. A group has
            those of the world without the other ranks.
        average: "premultiply" every input by 1/N, or "divide" the sum by N.
        chunk_bytes: of an all-reduce by a ring, which loops over ranks * chunk_bytes, by default as the protocol has
            it; in round-robin 512.
        members: ranks of the subgroup that this is the net of, None for the whole world; see ``for_group``.
        algorithm: "ring"; "tree", a double binary tree over nodes for all-reduces; or "pat", for reduce-scatters with
            one rank of the group a node that do not average, which NCCL leaves to rings (enqueue.cc:2009-2012,
            tuning.cc:220). What tree and PAT do not serve goes around the rings.
        protocol: "Simple", "LL128" or "LL": how long the chunks of an all-reduce are, and how small the cells.
        trees: of all ranks for each channel, by default over the nodes' chains of ``rings``; see ``from_log``.

    Raises:
        ValueError: in one sentence, naming the value.
    """

    by_destination: ClassVar[bool] = True

    nodes: int = 1
    ranks_per_node: int = 8
    channels: int | None = None
    partition: str = "contiguous"
    accumulate: str = "wire"
    rings: by_ring.Rings | None = None
    average: str = "premultiply"
    chunk_bytes: int | None = None
    members: tuple[int, ...] | None = None
    algorithm: str = "ring"
    protocol: str = "Simple"
    trees: tuple[by_tree.Tree, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "channels", "chunk_bytes"):
            if name in ("nodes", "ranks_per_node") or getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.accumulate == "fp32" and self.algorithm != "ring":
            wrong = f'accumulate="fp32" adds all ranks in one order, and algorithm={self.algorithm!r} does not'
            raise ValueError(f'{wrong}: take accumulate="wire", or leave the algorithm out')
        if self.rings is not None:
            object.__setattr__(self, "rings", tuple(map(tuple, self.rings)))
            if not self.rings:
                raise ValueError(
                    "rings is empty: give one ring for each channel, or None for rail rings"
                )
            by_ring.check_rings(self.rings, self.world_size)
            if self.channels not in (None, len(self.rings)):
                told = f"channels={self.channels}, but there are {len(self.rings)} rings"
                raise ValueError(f"{told}: leave channels out, or give as many rings")
        if self.trees is not None:
            object.__setattr__(self, "trees", tuple(tuple(map(tuple, tree)) for tree in self.trees))
            by_tree.check_trees(
                self.trees, self.world_size, self.channels or len(self.rings or ()) or CHANNELS
            )
        self._check_members()

    @property
    def __name__(self) -> str:
        """The id that pytest gives a parameter."""
        number = len(self.rings) if self.rings is not None else CHANNELS
        words = (self.algorithm, self.partition, self.accumulate)
        return f"nodes{self.nodes}-channels{self.channels or number}-" + "-".join(words)

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

        With ``algorithm="tree"`` also its trees, if the log has the lines ``Trees [0] ...`` of all ranks; without such
        lines they are built over the rings.

        Raises:
            ValueError: the file has no channels, or not all of a ring or tree; or as ``of_world``.
        """
        text = FilePath(path).read_text()
        try:
            rings = rings_from_log(text)
            trees = trees_from_log(text) if fields.get("algorithm") == "tree" else None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls.of_world(len(rings[0]), nodes, **{"rings": rings, "trees": trees, **fields})

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def reduce_scatter(self, inputs: Tensor, op: str, destinations: range | None = None) -> Tensor:
        wanted = range(self.size) if destinations is None else destinations
        count = self._payload("reduce_scatter", inputs, len(wanted), op)
        if self._algorithm("reduce_scatter", op) == "ring":
            orders = _orders(self, "reduce_scatter")[:, :, wanted.start : wanted.stop]
            return self._ring_sum("reduce_scatter", inputs, orders, op, payloads=len(wanted)).view(
                len(wanted), -1
            )
        rows, out = (
            inputs.reshape(self.size, len(wanted), count),
            inputs.new_empty(len(wanted), count),
        )
        columns, targets = torch.arange(len(wanted)), torch.tensor(wanted)
        for part in self._parts("reduce_scatter", count, inputs.itemsize):
            own = rows.narrow(2, part.start, part.length)
            order = by_tree.pat_order(
                self.size, by_tree.pat_delta(part.length * inputs.itemsize, self.size)
            )

            def behind(distance: int, own: Tensor = own) -> Tensor:
                return own[(targets - distance) % self.size, columns]

            sums = by_tree.tree_sum(order, behind, op, self.average, self.size)
            out.narrow(1, part.start, part.length).copy_(sums)
        return out

    def all_reduce(self, inputs: Tensor, op: str) -> Tensor:
        count = self._payload("all_reduce", inputs, 1, op)
        if self._algorithm("all_reduce", op) == "ring":
            return self._ring_sum("all_reduce", inputs, _orders(self, "all_reduce"), op)
        out = inputs.new_empty(count)
        for part in self._parts("all_reduce", count, inputs.itemsize):
            own = inputs.narrow(1, part.start, part.length)
            sums = by_tree.tree_sum(
                _tree_orders(self)[part.channel], own.__getitem__, op, self.average, self.size
            )
            out.narrow(0, part.start, part.length).copy_(sums)
        return out

    def explain(
        self,
        collective: str,
        offset: int,
        count: int,
        dtype: torch.dtype,
        destination: int = 0,
        op: str = "sum",
    ) -> Path:
        check_choice("collective", collective, ("reduce_scatter", "all_reduce"))
        if not 0 <= offset < count:
            raise ValueError(f"element {offset} is not in a payload of {count}")
        algorithm = self._algorithm(collective, op)
        cut = self._stretches if algorithm == "ring" else self._parts
        part = next(part for part in cut(collective, count, dtype.itemsize) if offset in part)
        if algorithm == "ring":
            place = part.place if collective == "all_reduce" else destination
            order: by_tree.Order = tuple(_orders(self, collective)[part.channel][:, place].tolist())
        elif algorithm == "tree":
            order = _tree_orders(self)[part.channel]
        else:
            behind = [(destination - distance) % self.size for distance in range(self.size)]
            delta = by_tree.pat_delta(part.length * dtype.itemsize, self.size)
            order = by_tree.mapped(by_tree.pat_order(self.size, delta), behind)
        return Path.of(part.channel, order, self.members, algorithm)

    def _algorithm(self, collective: str, op: str) -> str:
        """What carries it out: rings do what tree and PAT do not serve."""
        if self.algorithm == "tree" and collective == "all_reduce":
            return "tree"
        if (
            self.algorithm == "pat"
            and collective == "reduce_scatter"
            and op in ("sum", "product", "max", "min")
        ):
            return "pat" if len(set(_node_of(self))) == self.size else "ring"
        return "ring"

    def _payload(self, collective: str, inputs: Tensor, payloads: int, op: str) -> int:
        """Elements of a payload, of which ``inputs`` has several."""
        by_ring.check_reduction(collective, op, inputs.dtype)
        if inputs.dim() != 2 or inputs.shape[0] != self.size:
            shape = tuple(inputs.shape)
            raise ValueError(
                f"{collective} takes one row for each of {self.size} ranks; not shape {shape}"
            )
        if inputs.shape[1] % payloads:
            raise ValueError(
                f"{collective} of {inputs.shape[1]} elements over {payloads} ranks: pad them first"
            )
        return inputs.shape[1] // payloads

    def _ring_sum(
        self, collective: str, inputs: Tensor, orders: Tensor, op: str, payloads: int = 1
    ) -> Tensor:
        dtype = inputs.dtype
        wide = self.accumulate == "fp32" and dtype.is_floating_point
        accumulator = torch.promote_types(dtype, torch.float32) if wide else dtype
        stretches = self._stretches(collective, inputs.shape[1] // payloads, dtype.itemsize)
        how = {"accumulator": accumulator, "average": self.average, "payloads": payloads}
        return by_ring.ring_sum(inputs, stretches, orders, op, **how)

    def _parts(self, collective: str, count: int, itemsize: int) -> list[by_ring.Stretch]:
        """Which element of a payload goes through which channel."""
        if not count:
            return []
        channels = len(_rings(self))
        if self.partition == "round-robin":
            around = self.size if collective == "all_reduce" and self.algorithm != "tree" else 1
            return by_ring.dealt(count, channels, around * self._chunk(itemsize))
        if self.partition == "contiguous":
            return by_ring.parts_of(
                count, channels, by_ring.whole_words(-(-count // channels), itemsize)
            )
        traffic = (2 if collective == "all_reduce" else self.size) * (
            4 if self.protocol == "LL" else 1
        )
        return by_ring.parts_of(
            count, channels, by_ring.in_cells(count, itemsize, channels, traffic)
        )

    def _stretches(self, collective: str, count: int, itemsize: int) -> list[by_ring.Stretch]:
        """Which element of a payload goes around which ring, and where it starts there."""
        if self.accumulate == "fp32":
            return [by_ring.Stretch(0, 0, count)] if count else []
        parts, chunk = self._parts(collective, count, itemsize), self._chunk(itemsize)
        if collective == "reduce_scatter":
            return parts
        if self.partition == "round-robin":
            return [each for part in parts for each in by_ring.chunks(part, chunk)]
        return [each for part in parts for each in by_ring.looped(part, self.size, chunk, itemsize)]

    def _chunk(self, itemsize: int) -> int:
        """Elements."""
        usual = 512 if self.partition == "round-robin" else PROTOCOLS[self.protocol]
        return max(1, (self.chunk_bytes or usual) // itemsize)


@lru_cache(maxsize=256)
def _rings(net: NetModel) -> by_ring.Rings:
    """The ring of every channel, restricted to the members."""
    rings = net.rings or by_ring.rail_rings(net.nodes, net.ranks_per_node, net.channels or CHANNELS)
    return tuple(by_ring.restrict(ring, net.members or range(net.world_size)) for ring in rings)


@lru_cache(maxsize=256)
def _orders(net: NetModel, collective: str) -> Tensor:
    """``[channel, hop, place]``: who adds when; the places of a reduce-scatter are the ranks."""
    behind = "rank" if collective == "reduce_scatter" else "place"
    return by_ring.orders(_rings(net), "first" if net.accumulate == "fp32" else behind)


@lru_cache(maxsize=256)
def _node_of(net: NetModel) -> tuple[int, ...]:
    return tuple(rank // net.ranks_per_node for rank in net.members or range(net.world_size))


@lru_cache(maxsize=256)
def _tree_orders(net: NetModel) -> tuple[by_tree.Order, ...]:
    """Who adds when, by channel: NCCL doubles its channels, each half with a tree of its own (connect.cc:445-460)."""
    if net.trees is not None and net.members is None:
        return tuple(by_tree.tree_from(tree) for tree in net.trees)
    rings = _rings(net)
    half = -(-len(rings) // 2)
    chains = [
        by_tree.chains_of(rings[channel % half], _node_of(net)) for channel in range(len(rings))
    ]
    return tuple(
        by_tree.tree_over(each, second=channel >= half) for channel, each in enumerate(chains)
    )


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a whole number, 1 or more."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(choices)}")


FIELDS = ("ranks", "nodes", "channels", "algorithm", "partition", "accumulate")
"""What tells the nets of a sweep apart; the columns of its table."""


def sweep_nets(
    size: int,
    *,
    nodes: Sequence[int] = (1, 2),
    channels: Sequence[int] = (1, CHANNELS),
    algorithm: Sequence[str] = ("ring",),
    partition: Sequence[str] = ("contiguous",),
    accumulate: Sequence[str] = ("wire",),
    **fields: Any,
) -> list[NetModel]:
    """Return nets of ``size`` ranks for ``pytest.mark.parametrize``: every combination.

    >>> [net.__name__ for net in sweep_nets(16, nodes=[2], channels=[4], algorithm=["ring", "tree"])]
    ['nodes2-channels4-ring-contiguous-wire', 'nodes2-channels4-tree-contiguous-wire']

    Args:
        nodes, channels, algorithm, partition, accumulate: the values to combine; ``fields`` are equal in all nets.

    Raises:
        ValueError: as ``NetModel.of_world``.
    """
    found = []
    for count, each, by, parts, sums in product(nodes, channels, algorithm, partition, accumulate):
        fields |= {"channels": each, "algorithm": by, "partition": parts, "accumulate": sums}
        found.append(NetModel.of_world(size, count, **fields))
    return found


def row_of(net: Net) -> dict[str, Any]:
    """The net in a table's words; a net of another kind goes by its name, with "-" for what it does not have.

    >>> row_of(NetModel(2, 8))
    {'ranks': 16, 'nodes': 2, 'channels': 4, 'algorithm': 'ring', 'partition': 'contiguous', 'accumulate': 'wire'}
    """
    row = {name: getattr(net, name, "-") for name in FIELDS}
    if isinstance(net, NetModel):
        row["channels"] = net.channels or len(net.rings or ()) or CHANNELS
    elif row["algorithm"] == "-":
        row["algorithm"] = type(net).__name__
    return {**row, "ranks": net.size}
