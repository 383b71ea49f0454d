"""Collectives over what the ranks of a group give, each as few operations on the tensors of all of them.

From the *contributions* of all members, by rank in the group, to a list of tensors for each; where all get the same,
one tensor serves all. Sums are the net's. Callers have checked that the members agree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from pytest_gtrainer.graph.same_on_ranks import dtype_text
from pytest_gtrainer.worlds.simulated import CollectiveMismatch
from pytest_gtrainer.worlds.simulated.net import Net

PART_BYTES = 1 << 26  # of all members' inputs that are copied at a time to be reduced


@dataclass(slots=True, kw_only=True)
class Contribution:
    """What one rank of the world gives to a collective, which takes the inputs out, so that their memory can go."""

    rank: int
    inputs: list[
        Tensor
    ]  # one for each of several collectives in one, or for each member where lists are exchanged
    op: str = "sum"
    factor: float | None = None  # multiplies every input of a "premul_sum" first, in its dtype
    root: int = 0  # the member that gives or gets, by its rank in the group
    sends: Sequence[int] = field(
        default_factory=list
    )  # rows, or elements of a list's tensors, to each member
    receives: Sequence[int] = field(default_factory=list)  # and from each
    dims: tuple[int, int] = (0, 0)  # the one that is gathered, and the one that is sharded


Contributions = Sequence[Contribution]
Collective = Callable[[Net, Contributions], list[list[Tensor]]]


def _each(given: Contributions) -> Iterator[list[Tensor]]:
    """Every member's first tensor, then every member's second, ...; of one shape and dtype, and taken out."""
    while given[0].inputs:
        yield [own.inputs.pop(0) for own in given]


def barrier(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Nothing moves."""
    return [[] for _ in given]


def all_gather(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Everybody's tensors one after the other, along the first dimension."""
    return [[torch.cat(inputs) for inputs in _each(given)]] * len(given)


def all_reduce(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Every tensor is reduced by itself, as NCCL does with coalesced ones (gloo joins those to one)."""
    results = []
    for inputs in _each(given):
        shape = inputs[0].shape
        results.append(
            _reduced(stacked(inputs), given[0], net.all_reduce).view(shape)
            if prod(shape)
            else inputs[0]
        )
    return [results] * len(given)


def reduce_scatter(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Every member's part, along the first dimension, of the reduced tensors."""
    results: list[list[Tensor]] = [[] for _ in given]
    for inputs in _each(given):
        rows, *rest = inputs[0].shape
        if rows % len(given):
            raise CollectiveMismatch(f"{rows} rows do not divide over {len(given)} ranks: pad them")
        for result, shard in zip(results, _shards(net, inputs, given[0]), strict=True):
            result.append(shard.view(rows // len(given), *rest))
    return results


def _shards(net: Net, inputs: list[Tensor], how: Contribution) -> Iterator[Tensor]:
    """Some destinations at a time, unless all give one tensor: a copy of all would double the memory."""
    members = len(inputs)
    if not inputs[0].numel():
        yield from inputs
    elif all(tensor is inputs[0] for tensor in inputs) or not net.by_destination:
        yield from _reduced(stacked(inputs), how, net.reduce_scatter)
    else:
        by_destination = [tensor.reshape(members, -1) for tensor in inputs]
        for some in torch.arange(members).split(max(1, PART_BYTES // inputs[0].nbytes)):
            wanted = range(int(some[0]), int(some[-1]) + 1)
            copied = stacked([shards[wanted.start : wanted.stop] for shards in by_destination])
            yield from _reduced(copied, how, partial(net.reduce_scatter, destinations=wanted))


def _reduced(rows: Tensor, how: Contribution, by_net: Callable[[Tensor, str], Tensor]) -> Tensor:
    if how.op != "premul_sum":
        return by_net(rows, how.op)
    return by_net(rows * torch.tensor(how.factor, dtype=torch.float32).to(rows.dtype), how.op)


def broadcast(net: Net, given: Contributions) -> list[list[Tensor]]:
    """What the root has."""
    return [[tensor.clone() for tensor in given[given[0].root].inputs]] * len(given)


def gather(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Every member's tensor to the root."""
    return [
        [own.inputs[0] for own in given] if member == given[0].root else []
        for member in range(len(given))
    ]


def scatter(net: Net, given: Contributions) -> list[list[Tensor]]:
    """A tensor for each member from the root."""
    return [[tensor] for tensor in given[given[0].root].inputs]


def exchange_lists(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Tensor j of member i to member j, of any size."""
    _check_sizes(given, "element")
    return [[own.inputs[member] for own in given] for member in range(len(given))]


def all_to_all(net: Net, given: Contributions) -> list[list[Tensor]]:
    """Rows to the members they are for: ``sends[j]`` rows of a member's tensor go to member j."""
    _check_sizes(given, "row")
    counts = torch.tensor([list(own.sends) for own in given])
    width = prod(given[0].inputs[0].shape[1:])
    rows = torch.cat([own.inputs[0].reshape(own.inputs[0].shape[0], width) for own in given])
    arrived = rows.index_select(0, _by_destination(counts)).split(counts.sum(0).tolist())
    return [
        [part.view(len(part), *own.inputs[0].shape[1:])]
        for part, own in zip(arrived, given, strict=True)
    ]


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


def exchange_dims(net: Net, given: Contributions) -> list[list[Tensor]]:
    """From shards along one dimension to shards along another."""
    gathered, sharded = given[0].dims
    whole = torch.cat([own.inputs[0] for own in given], gathered)
    return [[shard.contiguous()] for shard in whole.chunk(len(given), sharded)]


def _check_sizes(given: Contributions, unit: str) -> None:
    """What each member sends to another is what that one expects."""
    for place, source in enumerate(given):
        for target, size in zip(given, source.sends, strict=True):
            if target.receives[place] != size:
                wrong = f"rank {source.rank} sends {size} {unit}{'s' * (size != 1)} to rank {target.rank}"
                raise CollectiveMismatch(f"{wrong}, which expects {target.receives[place]} from it")


def stacked(inputs: list[Tensor]) -> Tensor:
    """``[members, elements]``; empties ``inputs`` on the way, or there would be two copies of everything."""
    first = inputs[0]
    if all(tensor is first for tensor in inputs):
        rows = first.reshape(1, -1).expand(len(inputs), -1)
    else:
        rows = first.new_empty(len(inputs), first.numel())
        for row in rows:
            row.copy_(inputs.pop(0).reshape(-1))
    inputs.clear()
    return rows


def texts(tensors: Sequence[Tensor]) -> str:
    """Dtypes and sizes.

    >>> texts([torch.zeros(2, 3), torch.zeros(0, dtype=torch.int8)])
    'float32[6], int8[0]'
    """
    return ", ".join(f"{dtype_text(tensor)}[{tensor.numel()}]" for tensor in tensors)
