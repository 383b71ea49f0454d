"""The sum around rings, for all elements of all ranks at once.

Terms. A *payload* is what one rank gets from a reduce-scatter, or the whole tensor of an all-reduce. A
*stretch* of it goes around one ring, and starts there behind one *place*: in a reduce-scatter behind the rank
whose payload it is, in an all-reduce behind a place of the ring that the stretch names.

Idea: *units* are stretches of elements with one order and one length; hop k of many units is one gather of rows
and one addition. Invariant: a unit's partial sum is rounded to the dtype of the accumulator after every hop,
exactly as if rank after rank had added. Cost: as many gathers and additions as ranks, in blocks that stay in the
cache, so that every input byte comes from memory once, whatever the rings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated import NoModel

HOPS: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""How a rank combines what arrives with what it has; ``(arrived, own, out=...)``."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

BLOCK_BYTES = 1 << 18
"""Of one hop's rows: large enough to hide the cost of a call, small enough for the cache."""
ROW_BYTES = 1 << 14


def check_reduction(collective: str, op: str, dtype: torch.dtype) -> None:
    """Refuse what no net models.

    Raises:
        NoModel: naming the collective, the op or the dtype, and what to use instead.
    """
    if op not in HOPS:
        raise NoModel(f"{collective} with op {op!r} has no model in a simulated world: use one of {', '.join(HOPS)}")
    if dtype not in (*_FLOATS, *_INTEGERS):
        raise NoModel(f"{collective} of {dtype} has no model in a simulated world: cast to a floating dtype first")
    if op == "avg" and dtype in _INTEGERS:
        raise NoModel(f"{collective} averages {dtype}, which backends truncate differently: sum it and divide")


# --- which elements of a payload are summed in which order


PARTITIONS = ("contiguous", "round-robin")
WORD = 16  # bytes: the word in which kernels move data, at which parts and chunks begin


@dataclass(frozen=True, slots=True)
class Stretch:
    """``length`` elements from ``start`` on."""

    channel: int
    start: int
    length: int
    place: int = 0

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.start + self.length


def contiguous(total: int, channels: int, itemsize: int) -> list[Stretch]:
    """One part for each channel, as NCCL does since 2.20.3.

    >>> contiguous(20, 2, itemsize=4)
    [Stretch(channel=0, start=0, length=12, place=0), Stretch(channel=1, start=12, length=8, place=0)]
    """
    part = whole_words(-(-total // channels), itemsize)
    return [Stretch(channel, start, length) for channel, (start, length) in enumerate(_cut(0, total, part))]


def round_robin(total: int, channels: int, piece: int) -> list[Stretch]:
    """Pieces of ``piece`` elements dealt to the channels in turn, as NCCL did before 2.20.3.

    >>> [(part.channel, part.start, part.length) for part in round_robin(7, 2, piece=2)]
    [(0, 0, 2), (1, 2, 2), (0, 4, 2), (1, 6, 1)]
    """
    return [Stretch(index % channels, start, length) for index, (start, length) in enumerate(_cut(0, total, piece))]


def chunks(part: Stretch, length: int) -> list[Stretch]:
    """A part of an all-reduce as chunks, each of which starts behind the next place of the ring.

    >>> chunks(Stretch(1, start=10, length=5), length=2)  # doctest: +NORMALIZE_WHITESPACE
    [Stretch(channel=1, start=10, length=2, place=0), Stretch(channel=1, start=12, length=2, place=1),
     Stretch(channel=1, start=14, length=1, place=2)]
    """
    cuts = _cut(part.start, part.length, length)
    return [Stretch(part.channel, start, size, place) for place, (start, size) in enumerate(cuts)]


def whole_words(elements: int, itemsize: int) -> int:
    """``elements`` rounded up to whole words.

    >>> whole_words(9, itemsize=2), whole_words(9, itemsize=8)
    (16, 10)
    """
    word = max(1, WORD // itemsize)
    return -(-elements // word) * word


def _cut(start: int, total: int, length: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, total, length):
        yield start + offset, min(length, total - offset)


@dataclass(frozen=True, slots=True)
class Units:
    """Units of one length: by unit, the channel and place that give its order, and where it begins.

    ``offset`` counts from the beginning of a rank's input, and of the output.
    """

    length: int
    channel: Tensor
    place: Tensor
    offset: Tensor

    def blocks(self, itemsize: int) -> Iterator[Units]:
        """As many units together as a block has room for."""
        step = max(1, BLOCK_BYTES // (self.length * itemsize))
        columns = (column.split(step) for column in (self.channel, self.place, self.offset))
        for channel, place, offset in zip(*columns, strict=True):
            yield Units(self.length, channel, place, offset)


def units_of(stretches: Sequence[Stretch], payloads: int, size: int, itemsize: int) -> list[Units]:
    """The units of ``payloads`` payloads of ``size`` elements, one behind the other, all with these stretches.

    With several payloads it is their number that gives the place: they belong to the ranks.
    """
    longest = max(1, ROW_BYTES // itemsize)
    by_length: dict[int, list[tuple[int, int, int]]] = {}
    for part in stretches:
        for start in range(part.start, part.start + part.length, longest):
            length = min(longest, part.start + part.length - start)
            by_length.setdefault(length, []).append((part.channel, part.place, start))
    units = []
    for length, rows in by_length.items():
        payload = torch.arange(payloads)
        channel, place, start = torch.tensor(rows).t()
        places = place.repeat(payloads) if payloads == 1 else payload.repeat_interleave(len(rows))
        units.append(Units(length, channel.repeat(payloads), places, (payload[:, None] * size + start).flatten()))
    return units


def ring_sum(
    inputs: Tensor, units: Sequence[Units], orders: Tensor, op: str, *, accumulator: torch.dtype, average: str
) -> Tensor:
    """Reduce ``[ranks, elements]`` to ``[elements]``.

    Args:
        units: they cover all elements.
        orders: ``[channel, hop, place]``, the rank that adds.
        accumulator: the dtype of partial sums.
        average: what an "avg" does: "premultiply" every input by 1 / ranks, rounded to the dtype of the wire, or
            "divide" the sum.
    """
    (ranks, elements), flat, hop = inputs.shape, inputs.contiguous().view(-1), HOPS[op]
    factor = torch.tensor(1.0 / ranks, dtype=inputs.dtype) if op == "avg" and average == "premultiply" else None
    out = inputs.new_empty(elements)
    for same_length in units:
        length = same_length.length
        rows = flat.as_strided((flat.numel() - length + 1, length), (1, 1))  # row i begins at element i
        for block in same_length.blocks(flat.itemsize):
            sources = (orders[block.channel, :, block.place].t() * elements + block.offset).contiguous()
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
            out[(block.offset[:, None] + torch.arange(length)).view(-1)] = partial.view(-1).to(out.dtype)
    return out
