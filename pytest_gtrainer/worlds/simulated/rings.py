"""Rings: in which order the ranks of each channel send to each other, and the sum around them for all ranks at once.

An *order* is a tensor of the ranks that add, hop after hop, from every place of a ring on. A *payload* is what one rank
gets from a reduce-scatter, or the whole tensor of an all-reduce. A *stretch* of it goes around one ring. It starts
behind one *place*: behind the rank whose payload it is, or in an all-reduce behind the place that it names.

*Units* are stretches with one order and one length; hop k of many units is one gather of rows and one addition.
Invariant: a partial sum is rounded to the accumulator's dtype after every hop, as if rank after rank had added. Cost:
as many gathers and additions as ranks, in blocks that stay in the cache: every input byte comes from memory once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated import NoModel

Ring = tuple[int, ...]
Rings = tuple[Ring, ...]


def rail_rings(nodes: int, ranks_per_node: int, channels: int) -> Rings:
    """Rings of nodes whose GPUs have a network card (a rail) each, nodes in order.

    Channel c enters every node at local rank c mod ``ranks_per_node`` and descends cyclically.

    >>> rail_rings(2, 4, 2)
    ((0, 3, 2, 1, 4, 7, 6, 5), (1, 0, 3, 2, 5, 4, 7, 6))
    """

    def ring(channel: int) -> Ring:
        hops = product(range(nodes), range(ranks_per_node))
        return tuple(node * ranks_per_node + (channel - hop) % ranks_per_node for node, hop in hops)

    return tuple(map(ring, range(channels)))


def restrict(ring: Ring, members: Sequence[int]) -> Ring:
    """The ring of a group, by rank in the group, from rank 0 on as NCCL counts (``ring->index``, init.cc:797-802).

    >>> restrict((0, 3, 2, 1), (1, 3)), restrict((1, 0, 3, 2), range(4))
    ((0, 1), (0, 3, 2, 1))
    """
    place = {rank: index for index, rank in enumerate(members)}
    own = tuple(place[rank] for rank in ring if rank in place)
    return own[own.index(0) :] + own[: own.index(0)]


def orders(rings: Rings, behind: str) -> Tensor:
    """``[channel, hop, place]``: who adds, where a sum starts behind each "place" of a ring, or each "rank", and ends
    with it, or where every sum starts with the "first" rank of the ring.

    >>> [orders(((0, 2, 1),), behind)[0].tolist() for behind in ("place", "rank", "first")]
    [[[2, 1, 0], [1, 0, 2], [0, 2, 1]], [[2, 0, 1], [1, 2, 0], [0, 1, 2]], [[0, 0, 0], [2, 2, 2], [1, 1, 1]]]
    """
    table, size = torch.tensor(rings), len(rings[0])
    if behind == "first":
        return table[:, :, None].expand(-1, -1, size)
    ends = table.argsort(1) if behind == "rank" else torch.arange(size).expand(len(rings), -1)
    places = (ends[:, None] + 1 + torch.arange(size)[:, None]) % size
    return table[:, None].expand_as(places).gather(2, places)


def check_rings(rings: Sequence[Ring], size: int) -> None:
    """Every ring must visit every rank of the world once; a ValueError names the channel and the rank."""
    everyone = set(range(size))
    for channel, ring in enumerate(rings):
        visited, short = (
            set(ring),
            " ".join(map(str, ring[:16])) + (" ..." if len(ring) > 16 else ""),
        )
        if repeated := sorted(rank for rank in visited if ring.count(rank) > 1):
            wrong = f"visits rank {repeated[0]} more than once, {short}"
        elif unknown := sorted(visited - everyone):
            wrong = f"visits rank {unknown[0]}, but ranks are 0..{size - 1}"
        elif missing := sorted(everyone - visited):
            wrong = f"leaves out rank {missing[0]} of {size}, {short}"
        else:
            continue
        raise ValueError(
            f"the ring of channel {channel} {wrong}: list every rank of the world once"
        )


HOPS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("sum", "avg", "premul_sum"), torch.add),
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""How a rank combines what arrives with what it has; ``(arrived, own, out=...)``. For "premul_sum" it is a product."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

BLOCK_BYTES = (
    1 << 18
)  # of one hop's rows: large enough to hide the cost of a call, small enough for the cache
ROW_BYTES = 1 << 14


def check_reduction(collective: str, op: str, dtype: torch.dtype) -> None:
    """Refuse what no net models; NoModel names the collective, the op or the dtype, and what to use instead."""
    if op not in HOPS:
        raise NoModel(
            f"{collective} with op {op!r} has no model in a simulated world: use one of {', '.join(HOPS)}"
        )
    if dtype not in (*_FLOATS, *_INTEGERS):
        raise NoModel(
            f"{collective} of {dtype} has no model in a simulated world: cast to a floating dtype first"
        )
    if op == "avg" and dtype in _INTEGERS:
        raise NoModel(
            f"{collective} averages {dtype}, which backends truncate differently: sum it and divide"
        )


PARTITIONS = ("contiguous", "cells", "round-robin")
WORD = 16  # bytes: the word in which kernels move data, at which parts and chunks begin
CELL_TRAFFIC = (
    32 << 10
)  # bytes over the wire, all hops of a payload together; NCCL 2.29.2 and later


@dataclass(frozen=True, slots=True)
class Stretch:
    """``length`` elements from ``start`` on."""

    channel: int
    start: int
    length: int
    place: int = 0

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.start + self.length


def dealt(total: int, channels: int, piece: int) -> list[Stretch]:
    """Pieces of ``piece`` elements, dealt to the channels in turn.

    >>> [(part.channel, part.start, part.length) for part in dealt(7, 2, piece=2)]
    [(0, 0, 2), (1, 2, 2), (0, 4, 2), (1, 6, 1)]
    """
    return [
        Stretch(part.place % channels, part.start, part.length)
        for part in chunks(Stretch(0, 0, total), piece)
    ]


def parts_of(total: int, channels: int, piece: int) -> list[Stretch]:
    """One part for each channel: ``piece`` elements, and what is left for the last.

    >>> [(part.channel, part.start, part.length) for part in parts_of(7, 2, piece=3)]
    [(0, 0, 3), (1, 3, 4)]
    """
    starts = list(range(0, total, piece))[:channels]
    ends = [*starts[1:], total]
    return [
        Stretch(channel, starts[channel], ends[channel] - starts[channel])
        for channel in range(len(starts))
    ]


def in_cells(count: int, itemsize: int, channels: int, traffic_per_byte: int) -> int:
    """Elements of a channel's part, in whole cells of ``CELL_TRAFFIC``, so that a small payload takes few channels.

    As NCCL plans one collective by itself (enqueue.cc:573-709); ``traffic_per_byte`` is how often a byte is sent.

    >>> in_cells(1000, 4, channels=4, traffic_per_byte=8), in_cells(1_000_000, 4, channels=4, traffic_per_byte=8)
    (1024, 250880)
    """
    cell = -(-CELL_TRAFFIC // traffic_per_byte // WORD) * WORD
    per_channel = (
        -(-(max(CELL_TRAFFIC, count * itemsize * traffic_per_byte) // channels) // WORD) * WORD
    )
    return -(-per_channel // (cell * traffic_per_byte)) * cell // itemsize


def looped(part: Stretch, places: int, longest: int, itemsize: int) -> list[Stretch]:
    """A part of an all-reduce in loops of a chunk for each place, the last with shorter chunks (all_reduce.h:23-38).

    >>> [(chunk.start, chunk.length, chunk.place) for chunk in looped(Stretch(0, 0, 20), 2, longest=8, itemsize=8)]
    [(0, 8, 0), (8, 8, 1), (16, 2, 0), (18, 2, 1)]
    """
    found = []
    for loop in chunks(part, places * longest):
        is_whole = loop.length == places * longest
        found += chunks(
            loop, longest if is_whole else whole_words(-(-loop.length // places), itemsize)
        )
    return found


def chunks(part: Stretch, length: int) -> list[Stretch]:
    """A part of an all-reduce as chunks, each of which starts behind the next place of the ring.

    >>> [(chunk.start, chunk.length, chunk.place) for chunk in chunks(Stretch(1, start=10, length=5), length=2)]
    [(10, 2, 0), (12, 2, 1), (14, 1, 2)]
    """
    end = part.start + part.length
    starts = range(part.start, end, length)
    return [
        Stretch(part.channel, start, min(length, end - start), place)
        for place, start in enumerate(starts)
    ]


def whole_words(elements: int, itemsize: int) -> int:
    """``elements`` rounded up to whole words.

    >>> whole_words(9, itemsize=2), whole_words(9, itemsize=8)
    (16, 10)
    """
    word = max(1, WORD // itemsize)
    return -(-elements // word) * word


def _units(
    stretches: Sequence[Stretch], payloads: int, size: int, itemsize: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Length, channels, places and starts of some units. With several ``payloads``, a payload's number is its place."""
    by_length: dict[int, list[tuple[int, int, int]]] = {}
    for part in stretches:
        for unit in chunks(part, max(1, ROW_BYTES // itemsize)):
            by_length.setdefault(unit.length, []).append((part.channel, part.place, unit.start))
    for length, rows in by_length.items():
        channel, place, start = torch.tensor(rows).t()
        payload = torch.arange(payloads).repeat_interleave(len(rows))
        places = place if payloads == 1 else payload
        yield length, channel.repeat(payloads), places, payload * size + start.repeat(payloads)


def ring_sum(
    inputs: Tensor,
    stretches: Sequence[Stretch],
    orders: Tensor,
    op: str,
    *,
    accumulator: torch.dtype,
    average: str,
    payloads: int = 1,
) -> Tensor:
    """Reduce ``[ranks, elements]`` to ``[elements]`` by stretches that cover each payload. ``orders`` are ``[channel,
    hop, place]``; partial sums have the dtype ``accumulator``. An "avg" divides, or scales inputs by 1 / ranks in the
    dtype of the wire ("premultiply")."""
    (ranks, elements), flat, hop = inputs.shape, inputs.contiguous().view(-1), HOPS[op]
    factor = (
        torch.tensor(1.0 / ranks, dtype=inputs.dtype)
        if op == "avg" and average == "premultiply"
        else None
    )
    out = inputs.new_empty(elements)
    for length, *units in _units(stretches, payloads, elements // payloads, flat.itemsize):
        rows = flat.as_strided(
            (flat.numel() - length + 1, length), (1, 1)
        )  # row i begins at element i
        together = max(1, BLOCK_BYTES // (length * flat.itemsize))
        for channel, place, offset in zip(
            *(column.split(together) for column in units), strict=True
        ):
            sources = (orders[channel, :, place].t() * elements + offset).contiguous()
            own = rows.index_select(0, sources[0])
            if factor is not None:
                own.mul_(factor)
            partial = own.to(accumulator, copy=True)
            for source in sources[1:]:
                torch.index_select(rows, 0, source, out=own)
                if factor is not None:
                    own.mul_(factor)
                hop(partial, own, out=partial)
            if op == "avg" and factor is None:
                partial.div_(ranks)
            out[(offset[:, None] + torch.arange(length)).view(-1)] = partial.view(-1).to(out.dtype)
    return out
