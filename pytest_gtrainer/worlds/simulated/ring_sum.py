"""The sum around rings, for all elements of all ranks at once.

Idea: *units* are runs of elements with one order; hop k of many units is one gather of rows and one
addition. Invariant: a unit's partial sum is rounded to the dtype of the accumulator after every hop, exactly
as if rank after rank had added. Cost: as many gathers and additions as ranks, in blocks that stay in the
cache, so that every input byte comes from memory once, whatever the rings. Plain sums of fp32 are faster by
another way, ``bags``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.bags import fits_bags, sum_in_bags
from pytest_gtrainer.worlds.simulated.reductions import HOPS, averaging_factor
from pytest_gtrainer.worlds.simulated.runs import Run

BLOCK_BYTES = 1 << 18
"""Of one hop's rows: large enough to hide the cost of a call, small enough for the cache."""
ROW_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is computed: the op, the dtype of partial sums, and where an average is divided."""

    op: str
    accumulator: torch.dtype
    average: str

    def factor(self, ranks: int, dtype: torch.dtype) -> Tensor | None:
        """What every input is multiplied by first."""
        premultiplies = self.op == "avg" and self.average == "premultiply"
        return averaging_factor(ranks, dtype) if premultiplies else None


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


def units_of(runs: Sequence[Run], payloads: int, size: int, itemsize: int) -> list[Units]:
    """The units of ``payloads`` payloads of ``size`` elements, one behind the other, all with these runs.

    With several payloads it is their number that gives the place: they belong to the ranks.
    """
    longest = max(1, ROW_BYTES // itemsize)
    by_length: dict[int, list[tuple[int, int, int]]] = {}
    for run in runs:
        for start in range(run.start, run.start + run.length, longest):
            length = min(longest, run.start + run.length - start)
            by_length.setdefault(length, []).append((run.channel, run.place, start))
    return [_units(length, torch.tensor(rows), payloads, size) for length, rows in by_length.items()]


def _units(length: int, rows: Tensor, payloads: int, size: int) -> Units:
    payload = torch.arange(payloads)
    channel, place, start = rows.t()
    places = place.repeat(payloads) if payloads == 1 else payload.repeat_interleave(len(rows))
    return Units(length, channel.repeat(payloads), places, (payload[:, None] * size + start).flatten())


def ring_sum(inputs: Tensor, units: Sequence[Units], orders: Tensor, reduction: Reduction) -> Tensor:
    """Reduce ``[ranks, elements]`` to ``[elements]``.

    Args:
        units: they cover all elements.
        orders: ``[channel, hop, place]``, the rank that adds.
    """
    inputs = inputs.contiguous()
    out = inputs.new_empty(inputs.shape[1])
    for same_length in units:
        for block, summed in _summed(inputs, same_length, orders, reduction):
            if reduction.op == "avg" and reduction.factor(len(inputs), inputs.dtype) is None:
                summed.div_(len(inputs))
            out[(block.offset[:, None] + torch.arange(block.length)).view(-1)] = summed.view(-1).to(out.dtype)
    return out


def _summed(inputs: Tensor, units: Units, orders: Tensor, reduction: Reduction) -> Iterator[tuple[Units, Tensor]]:
    """Blocks of the units, and for each ``[units, length]`` in the dtype of partial sums."""
    if fits_bags(inputs, units, reduction):
        yield units, sum_in_bags(inputs, units, orders)
        return
    flat, length = inputs.view(-1), units.length
    rows = flat.as_strided((flat.numel() - length + 1, length), (1, 1))  # row i begins at element i
    for block in units.blocks(flat.itemsize):
        sources = orders[block.channel, :, block.place].t() * inputs.shape[1] + block.offset
        yield block, _sum_block(rows, sources.contiguous(), reduction)


def _sum_block(rows: Tensor, sources: Tensor, reduction: Reduction) -> Tensor:
    """Hop after hop; ``sources[hop, unit]`` are the rows to add."""
    hop, ranks = HOPS[reduction.op], len(sources)
    factor = reduction.factor(ranks, rows.dtype)
    own = rows.index_select(0, sources[0])
    if factor is not None:
        own.mul_(factor)
    partial = own.to(reduction.accumulator, copy=True)
    for source in sources[1:]:
        torch.index_select(rows, 0, source, out=own)
        if factor is not None:
            own.mul_(factor)
        hop(partial, own, out=partial)
    return partial
