"""Rings: in which order the ranks of each channel send to each other.

They differ between systems, so they are data: the rail rings below, a file, or lines of a log. A file
has the form of NCCL's own log lines, one for each channel, and comments behind ``#``:

    # two nodes of four
    Channel 00/02 : 0 1 2 3 4 5 6 7
    Channel 01/02 : 0 3 2 5 4 7 6 1

An *order* is a tensor of the ranks that add, hop after hop, from every place of a ring on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

Ring = tuple[int, ...]
Rings = tuple[Ring, ...]

# "Channel 03/0 : 0[1000] -> 1[2000] via P2P" tells of a connection, and does not match
_LINE = re.compile(r"^(?P<who>.*?)Channel (?P<channel>\d+)/(?P<channels>\d+) *:(?P<ranks>(?:[ \t]+\d+)+)[ \t]*$")


def rail_rings(nodes: int, ranks_per_node: int, channels: int) -> Rings:
    """Rings of nodes whose GPUs have a network card (a rail) each.

    Channel c enters every node at local rank c mod ``ranks_per_node`` and descends cyclically; nodes in order.

    >>> rail_rings(2, 4, 2)
    ((0, 3, 2, 1, 4, 7, 6, 5), (1, 0, 3, 2, 5, 4, 7, 6))
    """
    return tuple(
        tuple(
            node * ranks_per_node + (channel - hop) % ranks_per_node
            for node in range(nodes)
            for hop in range(ranks_per_node)
        )
        for channel in range(channels)
    )


def restrict(ring: Ring, members: Sequence[int]) -> Ring:
    """The ring as a subgroup has it: members only, in ring order, by their rank in the group.

    >>> restrict((0, 3, 2, 1), (1, 3))
    (1, 0)
    """
    place = {rank: index for index, rank in enumerate(members)}
    return tuple(place[rank] for rank in ring if rank in place)


def after_rank(ring: Ring) -> Tensor:
    """``[hop, rank]``: the sum for a rank starts behind it and ends with it.

    >>> after_rank((0, 2, 1)).tolist()
    [[2, 0, 1], [1, 2, 0], [0, 1, 2]]
    """
    places = sorted(range(len(ring)), key=ring.__getitem__)
    return after_place(ring)[:, places]


def after_place(ring: Ring) -> Tensor:
    """``[hop, place]``: a sum starts behind the place of the ring and ends with it.

    >>> after_place((0, 2, 1)).tolist()
    [[2, 1, 0], [1, 0, 2], [0, 2, 1]]
    """
    size = len(ring)
    places = torch.arange(size)
    return torch.tensor(ring)[(places + 1 + places[:, None]) % size]


def as_listed(ring: Ring) -> Tensor:
    """``[hop, place]``: every sum starts with the first rank of the ring.

    >>> as_listed((0, 2, 1)).tolist()
    [[0, 0, 0], [2, 2, 2], [1, 1, 1]]
    """
    return torch.tensor(ring)[:, None].expand(-1, len(ring))


def check_rings(rings: Sequence[Ring], size: int) -> None:
    """Every ring must visit every rank of the world once.

    Raises:
        ValueError: naming the channel and the rank.
    """
    everyone = set(range(size))
    for channel, ring in enumerate(rings):
        visited, short = set(ring), " ".join(map(str, ring[:16])) + (" ..." if len(ring) > 16 else "")
        if repeated := sorted(rank for rank in visited if ring.count(rank) > 1):
            wrong = f"visits rank {repeated[0]} more than once, {short}"
        elif unknown := sorted(visited - everyone):
            wrong = f"visits rank {unknown[0]}, but ranks are 0..{size - 1}"
        elif missing := sorted(everyone - visited):
            wrong = f"leaves out rank {missing[0]} of {size}, {short}"
        else:
            continue
        raise ValueError(f"the ring of channel {channel} {wrong}: list every rank of the world once")


def read_rings(path: str | Path) -> Rings:
    """The rings in a file of channel lines, or in a log of NCCL.

    Raises:
        ValueError: as ``rings_from_log``, with the path.
    """
    try:
        return rings_from_log(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def rings_from_log(text: str) -> Rings:
    """The rings of the largest communicator in a log that NCCL wrote with ``NCCL_DEBUG=INFO``.

    >>> rings_from_log('''
    ... host:26:67 [0] NCCL INFO Channel 00/02 :    0   1   2   3
    ... host:26:67 [0] NCCL INFO Channel 01/02 :    0   3   2   1
    ... host:26:67 [0] NCCL INFO Channel 00/0 : 0[1000] -> 1[2000] via P2P/IPC
    ... ''')
    ((0, 1, 2, 3), (0, 3, 2, 1))

    Raises:
        ValueError: no channels, a channel of the communicator is missing, or there are several
            communicators of that size with different rings.
    """
    found = list(_communicators(text))
    if not found:
        raise ValueError(
            "no line like 'Channel 00/08 : 0 7 6 5': log with NCCL_DEBUG=INFO, and keep the lines of rank 0 whole"
        )
    size = max(len(ring) for rings in found for ring in rings)
    largest = set(map(tuple, (rings for rings in found if len(rings[0]) == size)))
    if len(largest) > 1:
        raise ValueError(f"{len(largest)} communicators of {size} ranks with different rings: keep the lines of one")
    (rings,) = largest
    check_rings(rings, size)
    return rings


def _communicators(text: str) -> Iterator[list[Ring]]:
    """The rings of each communicator: lines of one process that count channels from 0 up."""
    open_: dict[tuple[str, int], dict[int, Ring]] = {}
    for line in text.splitlines():
        match = _LINE.match(line.split("#")[0])
        if not match:
            continue
        key, channel = (match["who"], int(match["channels"])), int(match["channel"])
        if channel in open_.get(key, {}):
            yield _complete(open_.pop(key), key[1])
        open_.setdefault(key, {})[channel] = tuple(map(int, match["ranks"].split()))
    for (_, channels), rings in open_.items():
        yield _complete(rings, channels)


def _complete(rings: dict[int, Ring], channels: int) -> list[Ring]:
    missing = [channel for channel in range(channels) if channel not in rings]
    if missing or len(rings) > channels:
        raise ValueError(f"the log has {len(rings)} of {channels} channels; channel {min(missing, default=0)} is amiss")
    return [rings[channel] for channel in range(channels)]
