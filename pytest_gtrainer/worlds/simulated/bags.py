"""A ring sum of fp32 numbers in one pass over memory, by torch's ``embedding_bag``.

Idea: a bag of rows is summed row after row into an accumulator of zeros, which is what a ring does, without
the partial sums that hop after hop would write and read again. Relied on, and compared with the
specification by tests: rows of a bag are added in the order of its indices, in fp32, one rounding each.
Only a sum of nothing but negative zeros differs, as 0 + -0 is 0; that is put right afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.ring_sum import Reduction, Units


def fits_bags(inputs: Tensor, units: Units, reduction: Reduction) -> bool:
    """Whether the units are whole rows of a table that ``inputs``, ``[ranks, elements]``, can be seen as."""
    plain = reduction.op in ("sum", "avg") and reduction.factor(len(inputs), inputs.dtype) is None
    if not plain or inputs.dtype != torch.float32:  # which no net adds in another dtype
        return False
    return inputs.shape[1] % units.length == 0 and not bool((units.offset % units.length).any())


def sum_in_bags(inputs: Tensor, units: Units, orders: Tensor) -> Tensor:
    """``[units, length]``; ``orders[channel, hop, place]`` are the ranks that add."""
    rows = inputs.view(-1, units.length)
    bags = (orders[units.channel, :, units.place] * inputs.shape[1] + units.offset[:, None]) // units.length
    return _with_negative_zeros(F.embedding_bag(bags, rows, mode="sum"), rows, bags)


def _with_negative_zeros(summed: Tensor, rows: Tensor, bags: Tensor) -> Tensor:
    """A sum is -0 if, and only if, every term is."""
    negative = summed.eq(0)
    for hop in bags.t():
        if not negative.any():
            return summed
        own = rows[hop]
        negative &= own.eq(0) & own.signbit()
    return summed.masked_fill_(negative, -0.0)
