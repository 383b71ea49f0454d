"""Collectives among the ranks of a group, each as few operations on the tensors of all of them.

A collective takes the *contributions* of all members, by rank in the group, and returns a list of
tensors for each member. Where all get the same, one tensor serves all. The net adds. Callers have
checked that the members agree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from pytest_gtrainer.facts import counted
from pytest_gtrainer.graph.same_on_ranks import dtype_text
from pytest_gtrainer.worlds.simulated import CollectiveMismatch
from pytest_gtrainer.worlds.simulated.net import Net

# Bytes of the inputs of all members that are copied at a time to be reduced.
PART_BYTES = 1 << 26


@dataclass(slots=True, kw_only=True)
class Contribution:
    """The part of one rank of the world in a collective.

    Attributes:
        inputs: one tensor for each of several collectives in one, or for each member where lists
            are exchanged. The collective takes them out, so that their memory can go.
        factor: multiplies every input of a "premul_sum" first, in its dtype.
        root: the member that gives or gets, by its rank in the group.
        sends, receives: rows, or elements of a list's tensors, to and from each member.
        dims: the dimension that is gathered, and the one that is sharded.
    """

    rank: int
    inputs: list[Tensor]
    op: str = "sum"
    factor: float | None = None
    root: int = 0
    sends: Sequence[int] = field(default_factory=list)
    receives: Sequence[int] = field(default_factory=list)
    dims: tuple[int, int] = (0, 0)


Contributions = Sequence[Contribution]
Collective = Callable[[Net, Contributions], list[list[Tensor]]]


def _each(given: Contributions) -> Iterator[list[Tensor]]:
    """Take out and yield the first tensors of all members, then their second ones, and so on.

    The tensors of one list have one shape and dtype.
    """
    while given[0].inputs:
        yield [own.inputs.pop(0) for own in given]


def barrier(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Move nothing."""
    return [[] for _ in given]


def all_gather(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Concatenate the tensors of all members along the first dimension."""
    return [[torch.cat(inputs) for inputs in _each(given)]] * len(given)


def all_reduce(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Reduce every tensor by itself, as NCCL does with coalesced tensors; gloo joins them first."""
    results = []
    for inputs in _each(given):
        shape = inputs[0].shape
        if shape.numel():
            results.append(_reduce(stack(inputs), given[0], net.all_reduce).view(shape))
        else:
            results.append(inputs[0])
    return [results] * len(given)


def reduce_scatter(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Give every member its part, along the first dimension, of the reduced tensors."""
    results: list[list[Tensor]] = [[] for _ in given]
    for inputs in _each(given):
        rows, *rest = inputs[0].shape
        if rows % len(given):
            raise CollectiveMismatch(f"{rows} rows do not divide over {len(given)} ranks: pad them")
        for result, shard in zip(results, _shards(net, inputs, given[0]), strict=True):
            result.append(shard.view(rows // len(given), *rest))
    return results


def _shards(net: Net, inputs: list[Tensor], how: Contribution) -> Iterator[Tensor]:
    """Yield the shard of each member of a tensor that is reduced."""
    members = len(inputs)
    if not inputs[0].numel():
        yield from inputs
    elif _are_one(inputs) or not net.by_destination:
        yield from _reduce(stack(inputs), how, net.reduce_scatter)
    else:
        # Some destinations at a time: a copy of all inputs would double the memory.
        by_destination = [tensor.reshape(members, -1) for tensor in inputs]
        step = max(1, PART_BYTES // inputs[0].nbytes)
        for start in range(0, members, step):
            wanted = range(start, min(start + step, members))
            rows = stack([shards[wanted.start : wanted.stop] for shards in by_destination])
            yield from _reduce(rows, how, partial(net.reduce_scatter, destinations=wanted))


def _reduce(rows: Tensor, how: Contribution, by_net: Callable[[Tensor, str], Tensor]) -> Tensor:
    if how.op == "premul_sum":
        # The factor is rounded to the dtype that is sent.
        rows = rows * torch.tensor(how.factor, dtype=torch.float32).to(rows.dtype)
    return by_net(rows, how.op)


def broadcast(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Give every member a copy of the root's tensors."""
    # A copy, as the result must not share memory with the root's input.
    return [list(map(torch.clone, given[given[0].root].inputs))] * len(given)


def gather(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Give the root the tensors of all members."""
    results: list[list[Tensor]] = [[] for _ in given]
    results[given[0].root] = next(_each(given))
    return results


def scatter(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Give each member its tensor of the root's."""
    return [[tensor] for tensor in given[given[0].root].inputs]


def exchange_lists(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Give tensor j of member i to member j; tensors may have any size."""
    _check_sizes(given, "element")
    return [[own.inputs[member] for own in given] for member in range(len(given))]


def all_to_all(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Give ``sends[j]`` rows of each member's tensor to member j."""
    _check_sizes(given, "row")
    counts = torch.tensor([list(own.sends) for own in given])
    inputs = next(_each(given))
    # Members need to agree in the width of a row only, not in its shape.
    width = prod(inputs[0].shape[1:])
    rows = torch.cat([tensor.reshape(len(tensor), width) for tensor in inputs])
    arrived = rows.index_select(0, _by_destination(counts)).split(counts.sum(0).tolist())
    pairs = zip(arrived, inputs, strict=True)
    return [[part.view(len(part), *tensor.shape[1:])] for part, tensor in pairs]


def _by_destination(counts: Tensor) -> Tensor:
    """Return the order of rows by destination and sender, of rows sorted by sender and destination.

    Args:
        counts: ``[sender, destination]``, the number of rows.

    Sender 0 has the rows a and bc, sender 1 has de:

    >>> _by_destination(torch.tensor([[1, 2], [2, 0]])).tolist()
    [0, 3, 4, 1, 2]
    """
    ends = counts.flatten().cumsum(0).view_as(counts)
    starts, lengths = (ends - counts).t().flatten(), counts.t().flatten()
    blocks = torch.arange(lengths.numel()).repeat_interleave(lengths)
    within = torch.arange(blocks.numel()) - (lengths.cumsum(0) - lengths)[blocks]
    return starts[blocks] + within


def exchange_dims(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Turn shards along one dimension into shards along another."""
    gathered, sharded = given[0].dims
    whole = torch.cat(next(_each(given)), gathered)
    return [[shard.contiguous()] for shard in whole.chunk(len(given), sharded)]


def _check_sizes(given: Contributions, unit: str) -> None:
    """Check that each member expects what another sends to it."""
    for member, source in enumerate(given):
        for target, size in zip(given, source.sends, strict=True):
            if target.receives[member] != size:
                raise CollectiveMismatch(
                    f"rank {source.rank} sends {counted(size, unit)} to rank {target.rank}, "
                    f"which expects {target.receives[member]} from it"
                )


def _are_one(inputs: list[Tensor]) -> bool:
    return len(set(map(id, inputs))) == 1


def stack(inputs: list[Tensor]) -> Tensor:
    """Return ``[members, elements]``, and empty ``inputs``."""
    first = inputs[0]
    if _are_one(inputs):
        rows = first.reshape(1, -1).expand(len(inputs), -1)
    else:
        rows = first.new_empty(len(inputs), first.numel())
        for row in rows:
            # Each input is freed as soon as it is copied: all at once would take twice the memory.
            row.copy_(inputs.pop(0).reshape(-1))
    inputs.clear()
    return rows


def texts(tensors: Sequence[Tensor]) -> str:
    """Write dtypes and sizes for a message.

    >>> texts([torch.zeros(2, 3), torch.zeros(0, dtype=torch.int8)])
    'float32[6], int8[0]'
    """
    return ", ".join(f"{dtype_text(tensor)}[{tensor.numel()}]" for tensor in tensors)
