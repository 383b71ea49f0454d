"""Rings: the order in which the ranks of a channel send to each other, and sums around them.

- A *payload* is what one rank gets from a reduce-scatter, or the whole tensor of an all-reduce.
- A *stretch* is a part of a payload that goes around one ring.
- Its *place* is the index in the ring at which its sum ends. The sum starts at place + 1 and goes
  around once. In a reduce-scatter the place is that of the rank which gets the shard; in an
  all-reduce the stretch has its own.
- An *order* is a tensor of ranks, ``[channel, hop, place]``: who adds at each hop of a sum.

Stretches of one length are summed together: a hop of them all is one gather of rows and one
addition. Invariant: a partial sum is rounded to the accumulator's dtype after every hop, as if one
rank after the other had added. Cost: as many gathers and additions as ranks, in blocks that stay in
the cache, so every input byte is read from memory once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated import NoModel

Ring = tuple[int, ...]
Rings = tuple[Ring, ...]

# Bytes that a kernel moves at once; parts and chunks begin at multiples of it.
WORD = 16
# Bytes of a cell over the wire, all hops of a payload together (NCCL 2.29.2 and later).
CELL_TRAFFIC = 32 << 10
# Bytes of one hop's rows: enough to hide the cost of a call, and small enough for the cache.
BLOCK_BYTES = 1 << 18
ROW_BYTES = 1 << 14

# How a rank combines the partial sum that arrives with its own value.
HOPS: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,  # its inputs come multiplied
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class Stretch:
    """``length`` elements of a payload, from ``start`` on."""

    channel: int
    start: int
    length: int
    place: int = 0

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.start + self.length


def rail_rings(nodes: int, ranks_per_node: int, channels: int) -> Rings:
    """Return a ring for each channel, for nodes whose GPUs have a network card (a rail) each.

    A ring visits the nodes in order. On every node, that of channel c enters at local rank
    c mod ``ranks_per_node`` and descends cyclically.

    >>> rail_rings(2, 4, 2)
    ((0, 3, 2, 1, 4, 7, 6, 5), (1, 0, 3, 2, 5, 4, 7, 6))
    """
    rings = []
    for channel in range(channels):
        ring: list[int] = []
        for first in range(0, nodes * ranks_per_node, ranks_per_node):
            ring += [first + (channel - hop) % ranks_per_node for hop in range(ranks_per_node)]
        rings.append(tuple(ring))
    return tuple(rings)


def restrict_ring(ring: Ring, members: Sequence[int]) -> Ring:
    """Return the ring of a group, in ranks of the group, from rank 0 on.

    NCCL counts places of a ring from rank 0 (``ring->index``, init.cc:797-802).

    >>> restrict_ring((0, 3, 2, 1), (1, 3)), restrict_ring((1, 0, 3, 2), range(4))
    ((0, 1), (0, 3, 2, 1))
    """
    rank_in_group = dict(zip(members, range(len(members)), strict=True))
    own = tuple(rank_in_group[rank] for rank in ring if rank in rank_in_group)
    start = own.index(0)
    return own[start:] + own[:start]


def ring_orders(rings: Rings, behind: str) -> Tensor:
    """Return ``[channel, hop, place]``: the rank that adds at each hop of each sum.

    Args:
        behind: where sum i starts. "place": at place i + 1, so that it ends at place i. "rank": at
            the place after that of rank i, so that it ends at rank i. "first": at place 0.

    >>> for behind in ("place", "rank", "first"):
    ...     ring_orders(((0, 2, 1),), behind)[0].tolist()
    [[2, 1, 0], [1, 0, 2], [0, 2, 1]]
    [[2, 0, 1], [1, 2, 0], [0, 1, 2]]
    [[0, 0, 0], [2, 2, 2], [1, 1, 1]]
    """
    table = torch.tensor(rings)
    channels, size = table.shape
    if behind == "first":
        return table[:, :, None].expand(-1, -1, size)
    ends = table.argsort(1) if behind == "rank" else torch.arange(size).expand(channels, -1)
    places = (ends[:, None] + 1 + torch.arange(size)[:, None]) % size
    return table[:, None].expand_as(places).gather(2, places)


def check_rings(rings: Sequence[Ring], size: int) -> None:
    """Check that every ring visits every rank of the world once.

    Raises:
        ValueError: it does not; the message names the channel and the rank.
    """
    everyone = set(range(size))
    for channel, ring in enumerate(rings):
        visited = set(ring)
        shown = " ".join(map(str, ring[:16])) + " ..." * (len(ring) > 16)
        if repeated := [rank for rank in ring if ring.count(rank) > 1]:
            wrong = f"visits rank {min(repeated)} more than once, {shown}"
        elif unknown := visited - everyone:
            wrong = f"visits rank {min(unknown)}, but ranks are 0..{size - 1}"
        elif missing := everyone - visited:
            wrong = f"leaves out rank {min(missing)} of {size}, {shown}"
        else:
            continue
        raise ValueError(
            f"the ring of channel {channel} {wrong}: list every rank of the world once"
        )


def check_reduction(collective: str, op: str, dtype: torch.dtype) -> None:
    """Check that nets model ``op`` on ``dtype``.

    Raises:
        NoModel: they do not; the message says what to use instead.
    """
    no_model = "has no model in a simulated world"
    if op not in HOPS:
        raise NoModel(f"{collective} with op {op!r} {no_model}: use one of {', '.join(HOPS)}")
    if dtype not in (*_FLOATS, *_INTEGERS):
        raise NoModel(f"{collective} of {dtype} {no_model}: cast to a floating dtype first")
    if op == "avg" and dtype in _INTEGERS:
        raise NoModel(
            f"{collective} averages {dtype}, which backends truncate differently: sum it and divide"
        )


def deal_pieces(total: int, channels: int, piece: int) -> list[Stretch]:
    """Cut a payload into pieces of ``piece`` elements, and deal them to the channels in turn.

    >>> [(part.channel, part.start, part.length) for part in deal_pieces(7, 2, piece=2)]
    [(0, 0, 2), (1, 2, 2), (0, 4, 2), (1, 6, 1)]
    """
    pieces = split_into_chunks(Stretch(0, 0, total), piece)
    return [Stretch(part.place % channels, part.start, part.length) for part in pieces]


def split_into_parts(total: int, channels: int, piece: int) -> list[Stretch]:
    """Cut a payload into a part for each channel: ``piece`` elements, and the rest for the last.

    >>> [(part.channel, part.start, part.length) for part in split_into_parts(7, 2, piece=3)]
    [(0, 0, 3), (1, 3, 4)]
    """
    starts = list(range(0, total, piece))[:channels]
    ends = [*starts[1:], total]
    pairs = enumerate(zip(starts, ends, strict=False))
    return [Stretch(channel, start, end - start) for channel, (start, end) in pairs]


def split_into_loops(part: Stretch, places: int, longest: int, itemsize: int) -> list[Stretch]:
    """Cut a part of an all-reduce into loops of one chunk for each place of the ring.

    The last loop has shorter chunks (all_reduce.h:23-38).

    >>> loops = split_into_loops(Stretch(0, 0, 20), 2, longest=8, itemsize=8)
    >>> [(chunk.start, chunk.length, chunk.place) for chunk in loops]
    [(0, 8, 0), (8, 8, 1), (16, 2, 0), (18, 2, 1)]
    """
    found = []
    for loop in split_into_chunks(part, places * longest):
        length = longest
        if loop.length < places * longest:
            length = round_up_to_words(-(-loop.length // places), itemsize)
        found += split_into_chunks(loop, length)
    return found


def split_into_chunks(part: Stretch, length: int) -> list[Stretch]:
    """Cut a part of a payload into chunks, each for the next place of the ring.

    >>> chunks = split_into_chunks(Stretch(1, start=10, length=5), length=2)
    >>> [(chunk.start, chunk.length, chunk.place) for chunk in chunks]
    [(10, 2, 0), (12, 2, 1), (14, 1, 2)]
    """
    end = part.start + part.length
    starts = enumerate(range(part.start, end, length))
    return [Stretch(part.channel, at, min(length, end - at), place) for place, at in starts]


def cells_of_channel(count: int, itemsize: int, channels: int, traffic_per_byte: int) -> int:
    """Return how many elements each channel gets, rounded up to whole cells.

    So a small payload takes fewer channels. NCCL plans a collective in this way if it has a launch
    to itself (enqueue.cc:573-709).

    Args:
        traffic_per_byte: how often a byte of the payload is sent.

    >>> cells_of_channel(1000, 4, channels=4, traffic_per_byte=8)
    1024
    >>> cells_of_channel(1_000_000, 4, channels=4, traffic_per_byte=8)
    250880
    """
    cell = -(-CELL_TRAFFIC // traffic_per_byte // WORD) * WORD
    traffic = max(CELL_TRAFFIC, count * itemsize * traffic_per_byte)
    per_channel = -(-(traffic // channels) // WORD) * WORD
    return -(-per_channel // (cell * traffic_per_byte)) * cell // itemsize


def round_up_to_words(elements: int, itemsize: int) -> int:
    """Round ``elements`` up to whole words.

    >>> round_up_to_words(9, itemsize=2), round_up_to_words(9, itemsize=8)
    (16, 10)
    """
    word = max(1, WORD // itemsize)
    return -(-elements // word) * word


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
    """Reduce ``[ranks, elements]`` to ``[elements]``, in the dtype of ``inputs``.

    Args:
        stretches: stretches that cover each payload.
        orders: ``[channel, hop, place]``, see ``ring_orders``.
        accumulator: dtype of the partial sums.
        average: how "avg" divides: it multiplies inputs by 1 / ranks in the dtype of the wire
            ("premultiply"), or divides the sum ("divide").
        payloads: how many payloads ``elements`` are. If several, payload i ends at index i of the
            orders, whatever places the stretches have.
    """
    ranks, elements = inputs.shape
    flat = inputs.contiguous().view(-1)
    factor = None
    if op == "avg" and average == "premultiply":
        factor = torch.tensor(1.0 / ranks, dtype=inputs.dtype)
    out = inputs.new_empty(elements)
    for length, *columns in _stretches_by_length(
        stretches, payloads, elements // payloads, flat.itemsize
    ):
        # Row i of this view begins at element i, so one index_select reads stretches anywhere.
        rows = flat.as_strided((flat.numel() - length + 1, length), (1, 1))
        block = max(1, BLOCK_BYTES // (length * flat.itemsize))
        blocks = zip(*(column.split(block) for column in columns), strict=True)
        for channel, place, offset in blocks:
            sources = (orders[channel, :, place].t() * elements + offset).reshape(-1)
            partial = None
            # Several hops of a small payload are read at once, one of a large one. All go into the
            # same memory: to allocate it for each hop takes as long as to add it.
            at_once = min(max(1, block // len(offset)), len(sources) // len(offset))
            read = rows.new_empty(at_once * len(offset), length)
            hops = read.split(len(offset))
            for some in sources.split(at_once * len(offset)):
                count = some.numel()  # the last ones may be fewer
                torch.index_select(rows, 0, some, out=read[:count])
                if factor is not None:
                    read[:count].mul_(factor)
                for own in hops[: count // len(offset)]:
                    # A sum that started at zero would turn a sum of negative zeros into zero.
                    if partial is None:
                        partial = own.to(accumulator, copy=True)
                    else:
                        HOPS[op](partial, own, out=partial)
            assert partial is not None
            # Before the sum is rounded to the dtype of the wire: afterwards it would round twice.
            if op == "avg" and factor is None:
                partial.div_(ranks)
            out[(offset[:, None] + torch.arange(length)).view(-1)] = partial.view(-1).to(out.dtype)
    return out


def _stretches_by_length(
    stretches: Sequence[Stretch], payloads: int, size: int, itemsize: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield the length, channels, places and starts of all stretches of one length.

    Args:
        payloads: how many there are. If several, their numbers are the places.
        size: elements of each payload.
    """
    by_length: dict[int, list[tuple[int, int, int]]] = {}
    for part in stretches:
        for row in split_into_chunks(part, max(1, ROW_BYTES // itemsize)):
            # A long stretch is cut into rows, and every row keeps the stretch's place.
            by_length.setdefault(row.length, []).append((part.channel, part.place, row.start))
    for length, rows in by_length.items():
        channel, place, start = torch.tensor(rows).t()
        payload = torch.arange(payloads).repeat_interleave(len(rows))
        if payloads > 1:
            place = payload
        yield length, channel.repeat(payloads), place, payload * size + start.repeat(payloads)
