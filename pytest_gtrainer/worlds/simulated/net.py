"""Net models: the order, and the roundings, with which a simulated world adds what its ranks send.

Terms. A *ring* is an order of ranks in which each sends to the next. A *channel* is one ring or
tree and the part of every payload that goes through it. A *hop* is one addition, by the rank that
gets a partial sum. The channel of an element, and so its offset in the payload, decides where its
sum starts. So the order of a bucket changes how sums are rounded.

The order is that of NCCL's kernels; lines are of NCCL 2.30.7:

- Ring: in a reduce-scatter the shard of rank d is summed as next(d), next(next(d)), ..., d
  (reduce_scatter.h:38-54). In an all-reduce, chunk i of a loop starts behind the i-th rank of the
  ring, counted from rank 0 (all_reduce.h:23-62, init.cc:797-802).
- Tree and PAT: see ``trees``.

Every hop rounds once, in the dtype of the wire; an average multiplies every input by 1/N first.

A net model exposes a dependence on order. It does not predict the bits of a given system, which has
its own rings, protocols and thresholds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated import rings as ring_sums
from pytest_gtrainer.worlds.simulated import trees as tree_sums
from pytest_gtrainer.worlds.simulated.logs import rings_from_log, trees_from_log
from pytest_gtrainer.worlds.simulated.rings import Rings, Stretch
from pytest_gtrainer.worlds.simulated.trees import Order, Tree
from pytest_gtrainer.worlds.spec import MOST_RANKS

# Bytes of a chunk of a ring all-reduce, with NCCL's default buffers (init.cc:809-813,
# enqueue.cc:2222-2227).
PROTOCOLS = {"Simple": 2 << 20, "LL128": 576_000, "LL": 32 << 10}
CHANNELS = 4
_CHOICES = {
    "partition": ("contiguous", "cells", "round-robin"),
    "accumulate": ("wire", "fp32"),
    "average": ("premultiply", "divide"),
    "algorithm": ("ring", "tree", "pat"),
    "protocol": tuple(PROTOCOLS),
}


@dataclass(frozen=True, slots=True)
class SumOrder:
    """The channel of one element, and the order of the ranks that add it.

    A tuple among the ranks is a sum that arrives as one value.

    >>> str(SumOrder(2, (3, 2, 1, 0), "tree"))
    'channel 2, tree, summed in the order of ranks 3 2 1 0'
    """

    channel: int
    ranks: Order
    algorithm: str = "ring"

    def __str__(self) -> str:
        words = [f"channel {self.channel}"]
        if self.algorithm != "ring":
            words.append(self.algorithm)
        words.append(f"summed in the order of ranks {tree_sums.order_text(self.ranks)}")
        if any(isinstance(term, tuple) for term in self.ranks):
            words.append("where what stands in brackets arrives as one sum")
        return ", ".join(words)


class Net(ABC):
    """The order in which a group of ranks adds; ``NetModel``, or a net of your own.

    A net of your own is a frozen dataclass with a field ``members``. It is deterministic. It only
    adds: collectives that move data need no net. An ``op`` is "sum", "avg", "product", "max",
    "min", or "premul_sum", a sum of inputs that come multiplied. The table of a sweep names the net
    by its class.

    Attributes:
        by_destination: True if the shards of some destinations can be reduced without the others.
        world_size: number of ranks of the whole world.
        members: ranks of the subgroup that the net connects, None for the whole world; see
            ``for_group``.
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
        """Return the net of a subgroup, which are these ranks of the world.

        Raises:
            ValueError: no ranks, a repeated one, or one that is not in the world.
        """
        group = replace(self, members=tuple(ranks))  # type: ignore[type-var]
        group._check_members()  # a net of your own need not do it
        return group

    def _check_members(self) -> None:
        if self.members is None:
            return
        members = tuple(self.members)
        object.__setattr__(self, "members", members)  # the dataclass is frozen
        if not members:
            raise ValueError("a group without ranks has no net: name at least one rank")
        if len(set(members)) < len(members):
            raise ValueError(f"the group {members} repeats a rank: name each once")
        size = self.world_size
        for rank in members:
            if type(rank) is not int or rank not in range(size):
                raise ValueError(
                    f"rank {rank!r} of the group is not in the world of {size} ranks: "
                    f"they are 0..{size - 1}"
                )

    @abstractmethod
    def reduce_scatter(self, inputs: Tensor, op: str, destinations: range | None = None) -> Tensor:
        """Reduce ``[n, n * m]``, a row for each rank's input, to ``[n, m]``, a row for each shard.

        Args:
            destinations: only the shards of these ranks of the group, which follow each other:
                ``[n, k * m]`` to ``[k, m]``.

        Raises:
            NoModel: the op or dtype is not modelled.
            ValueError: ``destinations`` of a net that is not ``by_destination``, or no such ranks.
        """

    @abstractmethod
    def all_reduce(self, inputs: Tensor, op: str) -> Tensor:
        """Reduce ``[n, k]``, a row for each rank's input, to ``[k]``, which every rank gets.

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
    ) -> SumOrder:
        """Return how one element is summed; messages quote it.

        Args:
            offset, count: the element, and the number of elements of its payload: one rank's shard
                of a reduce-scatter, or the whole tensor of an all-reduce.
            destination: the rank of the group that gets the shard.

        Raises:
            NoModel: the op or dtype is not modelled.
            ValueError: another collective, an element outside of the payload, or a destination
                outside of the group.
        """


@dataclass(frozen=True, slots=True)
class NetModel(Net):
    """Rings and trees over several nodes, as NCCL builds them.

    Attributes:
        nodes, ranks_per_node: where the ranks are; rank r is on node r // ranks_per_node.
        channels: number of channels; by default that of ``rings``, else 4.
        partition: which part of a payload goes through which channel. "contiguous" (NCCL 2.20.3 to
            2.22.3): one part each, in words of 16 bytes, so that small payloads use all channels.
            "cells" (2.29.2 and later; with 16 KiB from 2.23.4 on): one part each, in cells of
            32 KiB of traffic, so that small payloads use few channels. "round-robin" (before
            2.20.3): pieces of ``chunk_bytes`` in turn.
        accumulate: "wire" rounds every hop to the payload's dtype. "fp32" adds all ranks in one
            order, in fp32 or better, and rounds once, as NVLS and symmetric kernels do.
        rings: one ring of all ranks for each channel, by default ``rail_rings``; see also
            ``from_log``. A group has the rings of the world without the other ranks.
        average: "premultiply" every input by 1/N, or "divide" the sum by N.
        chunk_bytes: bytes of a chunk of a ring's all-reduce, which loops over ranks * chunk_bytes;
            by default that of the protocol, in round-robin 512.
        members: ranks of the subgroup that the net connects, None for the whole world; see
            ``for_group``.
        algorithm: "ring"; "tree", a double binary tree over nodes for all-reduces; or "pat", for
            reduce-scatters that do not average, with one rank of the group a node. Rings serve what
            trees and PAT do not.
        protocol: "Simple", "LL128" or "LL"; it decides how long the chunks of an all-reduce are,
            and how small the cells.
        trees: a tree of all ranks for each channel, by default over the nodes' chains of ``rings``;
            see ``from_log``.

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
    chunk_bytes: int | None = None
    members: tuple[int, ...] | None = None
    algorithm: str = "ring"
    protocol: str = "Simple"
    trees: tuple[Tree, ...] | None = None

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes)
        check_count("ranks_per_node", self.ranks_per_node)
        if self.world_size > MOST_RANKS:
            raise ValueError(f"a net has at most {MOST_RANKS:,} ranks: take fewer")
        for name in ("channels", "chunk_bytes"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.accumulate == "fp32" and self.algorithm != "ring":
            raise ValueError(
                f'accumulate="fp32" adds all ranks in one order, and algorithm={self.algorithm!r} '
                'does not: take accumulate="wire", or leave the algorithm out'
            )
        if self.rings is not None:
            # Lists become tuples: nets are keys of the caches below.
            object.__setattr__(self, "rings", tuple(map(tuple, self.rings)))
            if not self.rings:
                raise ValueError(
                    "rings is empty: give one ring for each channel, or None for rail rings"
                )
            ring_sums.check_rings(self.rings, self.world_size)
            if self.channels not in (None, len(self.rings)):
                raise ValueError(
                    f"channels={self.channels}, but there are {len(self.rings)} rings: "
                    "leave channels out, or give as many rings"
                )
        if self.trees is not None:
            object.__setattr__(self, "trees", tuple(tuple(map(tuple, tree)) for tree in self.trees))
            tree_sums.check_trees(self.trees, self.world_size, self._channel_count)
        self._check_members()

    @property
    def _channel_count(self) -> int:
        return self.channels or len(self.rings or ()) or CHANNELS

    @property
    def __name__(self) -> str:
        """The id that pytest gives a parameter."""
        words = (self.algorithm, self.partition, self.accumulate)
        return f"nodes{self.nodes}-channels{self._channel_count}-" + "-".join(words)

    @classmethod
    def of_world(cls, size: int, nodes: int = 1, **fields: Any) -> NetModel:
        """Return the net of ``size`` ranks on ``nodes`` nodes.

        Raises:
            ValueError: the nodes do not divide the ranks, or as the class.
        """
        check_count("nodes", nodes)
        if size % nodes:
            raise ValueError(f"{size} ranks do not divide over {nodes} nodes: change one of them")
        return cls(nodes=nodes, ranks_per_node=size // nodes, **fields)

    @classmethod
    def from_log(cls, path: str | Path, nodes: int, **fields: Any) -> NetModel:
        """Return the net whose rings are in a file of channel lines, or in a log of NCCL.

        With ``algorithm="tree"`` its trees are read, too, from lines ``Trees [0] ...`` of all
        ranks. Without such lines they are built over the rings.

        Raises:
            ValueError: the file has no channels, or not all of a ring or tree; or as ``of_world``.
        """
        text = Path(path).read_text()
        found: dict[str, Any] = {}
        try:
            found["rings"] = rings_from_log(text)
            if fields.get("algorithm") == "tree":
                found["trees"] = trees_from_log(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls.of_world(len(found["rings"][0]), nodes, **{**found, **fields})

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def reduce_scatter(self, inputs: Tensor, op: str, destinations: range | None = None) -> Tensor:
        wanted = range(self.size) if destinations is None else destinations
        if not wanted or wanted.step != 1 or wanted.start < 0 or wanted.stop > self.size:
            raise ValueError(
                f"destinations={wanted}: give ranks of 0..{self.size - 1} that follow each other"
            )
        shards = len(wanted)
        count = self._check_inputs("reduce_scatter", inputs, shards, op)
        if self._algorithm_for("reduce_scatter", op) == "ring":
            orders = _orders(self, "reduce_scatter")[:, :, wanted.start : wanted.stop]
            summed = self._ring_sum("reduce_scatter", inputs, orders, op, payloads=shards)
            return summed.view(shards, -1)

        out = inputs.new_empty(shards, count)
        rows = inputs.reshape(self.size, shards, count)
        targets = torch.tensor(wanted)
        for part in self._parts("reduce_scatter", count, inputs.itemsize):
            own = rows.narrow(2, part.start, part.length)

            def own_of_all(distance: int, own: Tensor = own) -> Tensor:
                # The order is written in distances, so one sum serves all destinations at once.
                return own[(targets - distance) % self.size, torch.arange(shards)]

            delta = tree_sums.pat_delta(part.length * inputs.itemsize, self.size)
            order = tree_sums.pat_order(self.size, delta)
            sums = tree_sums.tree_sum(order, own_of_all, op, self.average, self.size)
            out.narrow(1, part.start, part.length).copy_(sums)
        return out

    def all_reduce(self, inputs: Tensor, op: str) -> Tensor:
        count = self._check_inputs("all_reduce", inputs, 1, op)
        if self._algorithm_for("all_reduce", op) == "ring":
            return self._ring_sum("all_reduce", inputs, _orders(self, "all_reduce"), op)

        out = inputs.new_empty(count)
        for part in self._parts("all_reduce", count, inputs.itemsize):
            own = inputs.narrow(1, part.start, part.length)
            order = _tree_orders(self)[part.channel]
            sums = tree_sums.tree_sum(order, own.__getitem__, op, self.average, self.size)
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
    ) -> SumOrder:
        check_choice("collective", collective, ("reduce_scatter", "all_reduce"))
        if not 0 <= offset < count:
            raise ValueError(f"element {offset} is not in a payload of {count}")
        if destination not in range(self.size):
            raise ValueError(f"destination={destination}: the net has ranks 0..{self.size - 1}")
        ring_sums.check_reduction(collective, op, dtype)
        algorithm = self._algorithm_for(collective, op)
        split = self._stretches if algorithm == "ring" else self._parts
        part = next(part for part in split(collective, count, dtype.itemsize) if offset in part)
        if algorithm == "ring":
            place = part.place if collective == "all_reduce" else destination
            order: Order = tuple(_orders(self, collective)[part.channel][:, place].tolist())
        elif algorithm == "tree":
            order = _tree_orders(self)[part.channel]
        else:
            delta = tree_sums.pat_delta(part.length * dtype.itemsize, self.size)
            behind = [(destination - distance) % self.size for distance in range(self.size)]
            order = tree_sums.rename_ranks(tree_sums.pat_order(self.size, delta), behind)
        if self.members is not None:
            order = tree_sums.rename_ranks(order, self.members)
        return SumOrder(part.channel, order, algorithm)

    def _algorithm_for(self, collective: str, op: str) -> str:
        """Return what carries a collective out: rings do what trees and PAT do not serve."""
        if self.algorithm == "tree" and collective == "all_reduce":
            return "tree"
        # NCCL has no PAT for averages, which it premultiplies (enqueue.cc:2009-2012), nor for
        # groups with two ranks on a node (tuning.cc:220).
        has_pat = collective == "reduce_scatter" and op in ("sum", "product", "max", "min")
        if self.algorithm == "pat" and has_pat and len(set(_node_of(self))) == self.size:
            return "pat"
        return "ring"

    def _check_inputs(self, collective: str, inputs: Tensor, payloads: int, op: str) -> int:
        """Check the inputs of a reduction, and return the elements of one of their payloads."""
        ring_sums.check_reduction(collective, op, inputs.dtype)
        if inputs.dim() != 2 or inputs.shape[0] != self.size:
            raise ValueError(
                f"{collective} takes one row for each of {self.size} ranks; "
                f"not shape {tuple(inputs.shape)}"
            )
        if inputs.shape[1] % payloads:
            raise ValueError(
                f"{collective} of {inputs.shape[1]} elements over {payloads} ranks: pad them first"
            )
        return inputs.shape[1] // payloads

    def _ring_sum(
        self, collective: str, inputs: Tensor, orders: Tensor, op: str, payloads: int = 1
    ) -> Tensor:
        dtype = accumulator = inputs.dtype
        if self.accumulate == "fp32" and dtype.is_floating_point:
            accumulator = torch.promote_types(dtype, torch.float32)
        return ring_sums.ring_sum(
            inputs,
            self._stretches(collective, inputs.shape[1] // payloads, dtype.itemsize),
            orders,
            op,
            accumulator=accumulator,
            average=self.average,
            payloads=payloads,
        )

    def _parts(self, collective: str, count: int, itemsize: int) -> list[Stretch]:
        """Split a payload by channel."""
        if not count:
            return []
        channels = len(_rings(self))
        if self.partition == "round-robin":
            piece = self._chunk(itemsize)
            # A ring's piece is a chunk for each place of the ring; a tree has no places.
            if collective == "all_reduce" and self.algorithm != "tree":
                piece *= self.size
            return ring_sums.deal_pieces(count, channels, piece)
        if self.partition == "contiguous":
            piece = ring_sums.round_up_to_words(-(-count // channels), itemsize)
        else:
            traffic = 2 if collective == "all_reduce" else self.size
            if self.protocol == "LL":
                traffic *= 4  # so its cells are a quarter
            piece = ring_sums.cells_of_channel(count, itemsize, channels, traffic)
        return ring_sums.split_into_parts(count, channels, piece)

    def _stretches(self, collective: str, count: int, itemsize: int) -> list[Stretch]:
        """Split a payload by ring and by the place where a sum starts."""
        if self.accumulate == "fp32":
            return [Stretch(0, 0, count)] if count else []
        parts = self._parts(collective, count, itemsize)
        if collective == "reduce_scatter":
            return parts
        chunk = self._chunk(itemsize)
        stretches = []
        for part in parts:
            if self.partition == "round-robin":
                stretches += ring_sums.split_into_chunks(part, chunk)
            else:
                stretches += ring_sums.split_into_loops(part, self.size, chunk, itemsize)
        return stretches

    def _chunk(self, itemsize: int) -> int:
        """Return the elements of a chunk."""
        default = 512 if self.partition == "round-robin" else PROTOCOLS[self.protocol]
        return max(1, (self.chunk_bytes or default) // itemsize)


@lru_cache(maxsize=256)
def _rings(net: NetModel) -> Rings:
    """Return the ring of every channel, restricted to the members."""
    size = (net.nodes, net.ranks_per_node)
    rings = net.rings or ring_sums.rail_rings(*size, net.channels or CHANNELS)
    members = net.members or range(net.world_size)
    return tuple(ring_sums.restrict_ring(ring, members) for ring in rings)


@lru_cache(maxsize=256)
def _orders(net: NetModel, collective: str) -> Tensor:
    """Return ``ring_orders``; the places of a reduce-scatter are the ranks."""
    behind = "rank" if collective == "reduce_scatter" else "place"
    return ring_sums.ring_orders(_rings(net), "first" if net.accumulate == "fp32" else behind)


@lru_cache(maxsize=256)
def _node_of(net: NetModel) -> tuple[int, ...]:
    return tuple(rank // net.ranks_per_node for rank in net.members or range(net.world_size))


@lru_cache(maxsize=256)
def _tree_orders(net: NetModel) -> tuple[Order, ...]:
    """Return the order of every channel's tree."""
    if net.trees is not None and net.members is None:
        return tuple(map(tree_sums.order_of_tree, net.trees))
    rings = _rings(net)
    # NCCL doubles its channels, and each half has a tree of its own (connect.cc:445-460).
    half = -(-len(rings) // 2)
    orders = []
    for channel in range(len(rings)):
        chains = tree_sums.node_chains(rings[channel % half], _node_of(net))
        orders.append(tree_sums.tree_over_chains(chains, second=channel >= half))
    return tuple(orders)


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a whole number, 1 or more."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(choices)}")


# Columns of the table of a sweep: the fields in which its nets differ.
FIELDS = ("ranks", "nodes", "channels", "algorithm", "partition", "accumulate")


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

    >>> nets = sweep_nets(16, nodes=[2], channels=[4], algorithm=["ring", "tree"])
    >>> [net.__name__ for net in nets]
    ['nodes2-channels4-ring-contiguous-wire', 'nodes2-channels4-tree-contiguous-wire']

    Args:
        nodes, channels, algorithm, partition, accumulate: the values to combine; ``fields`` are
            equal in all nets.

    Raises:
        ValueError: as ``NetModel.of_world``; or there is no value of one kind, so there is no net.
    """
    values = {
        "nodes": nodes,
        "channels": channels,
        "algorithm": algorithm,
        "partition": partition,
        "accumulate": accumulate,
    }
    for name, combined in values.items():
        if not len(combined):
            raise ValueError(f"sweep_nets: {name} is empty, so there is no net")
    found = []
    for count, each, by, parts, sums in product(nodes, channels, algorithm, partition, accumulate):
        fields |= {"channels": each, "algorithm": by, "partition": parts, "accumulate": sums}
        found.append(NetModel.of_world(size, count, **fields))
    return found


def row_of(net: Net) -> dict[str, Any]:
    """Return the row of a net in the table of a sweep.

    A net of another class goes by its name, with "-" for fields that it does not have.

    >>> list(row_of(NetModel(2, 8)).values())
    [16, 2, 4, 'ring', 'contiguous', 'wire']
    """
    row = {name: getattr(net, name, "-") for name in FIELDS}
    row["ranks"] = net.size
    if isinstance(net, NetModel):
        row["channels"] = net._channel_count
    elif row["algorithm"] == "-":
        row["algorithm"] = type(net).__name__
    return row
