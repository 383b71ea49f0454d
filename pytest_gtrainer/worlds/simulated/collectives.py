"""What collectives do to the tensors of all members of a group, each as one operation on all of them.

Inputs come as a list by rank in the group. Where all members get the same, there is one tensor for all
of them. Sums are the net's; what only moves data needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.net import Net


def all_gather(inputs: Sequence[Tensor]) -> Tensor:
    """Everybody's tensors one after the other, along the first dimension."""
    return torch.cat(list(inputs))


def reduce_scatter(net: Net, inputs: list[Tensor], op: str) -> list[Tensor]:
    """Every member's part, along the first dimension, of the reduced tensors; empties ``inputs``."""
    shape = (inputs[0].shape[0] // len(inputs), *inputs[0].shape[1:])
    return [part.view(shape) for part in net.reduce_scatter(stacked(inputs), op)]


def all_reduce(net: Net, inputs: list[Tensor], op: str) -> Tensor:
    """The reduced tensor; empties ``inputs``."""
    shape = inputs[0].shape
    return net.all_reduce(stacked(inputs), op).view(shape)


def all_to_all(inputs: Sequence[Tensor], sends: Sequence[Sequence[int]]) -> list[Tensor]:
    """Rows to the members they are for: ``sends[i][j]`` rows of member i's tensor go to member j.

    >>> first, second = all_to_all([torch.tensor([1, 2, 3]), torch.tensor([4])], [[1, 2], [0, 1]])
    >>> first.tolist(), second.tolist()
    ([1], [2, 3, 4])
    """
    counts = torch.tensor([list(row) for row in sends])
    arrived = torch.cat(list(inputs)).index_select(0, _by_destination(counts))
    return list(arrived.split(counts.sum(0).tolist()))


def _by_destination(counts: Tensor) -> Tensor:
    """For rows of all senders, sorted by sender and destination: the order by destination and sender.

    >>> _by_destination(torch.tensor([[1, 2], [2, 0]])).tolist()  # sender 0 has a bc, sender 1 has de
    [0, 3, 4, 1, 2]
    """
    ends = counts.flatten().cumsum(0).view_as(counts)
    starts, lengths = (ends - counts).t().flatten(), counts.t().flatten()
    blocks = torch.arange(lengths.numel()).repeat_interleave(lengths)
    within = torch.arange(blocks.numel()) - (lengths.cumsum(0) - lengths)[blocks]
    return starts[blocks] + within


def exchange_dims(inputs: Sequence[Tensor], gather_dim: int, shard_dim: int) -> list[Tensor]:
    """From shards along ``gather_dim`` to shards along ``shard_dim``."""
    whole = torch.cat(list(inputs), gather_dim)
    return [shard.contiguous() for shard in whole.chunk(len(inputs), shard_dim)]


def stacked(inputs: list[Tensor]) -> Tensor:
    """``[members, elements]``; empties ``inputs`` on the way, or there would be two copies of everything."""
    first, count = inputs[0], len(inputs)
    rows = first.reshape(1, -1).expand(count, -1) if all(given is first for given in inputs) else _side_by_side(inputs)
    if rows is None:
        rows = first.new_empty(count, first.numel())
        inputs.reverse()
        for row in rows:
            row.copy_(inputs.pop().reshape(-1))
    inputs.clear()
    return rows


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors as rows without a copy, if they lie next to each other in one buffer."""
    first, size = tensors[0], tensors[0].numel()
    start, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for index, tensor in enumerate(tensors):
        beside = tensor.storage_offset() == start + index * size and tensor.untyped_storage().data_ptr() == storage
        if not beside or not tensor.is_contiguous():
            return None
    return first.as_strided((len(tensors), size), (size, 1))
