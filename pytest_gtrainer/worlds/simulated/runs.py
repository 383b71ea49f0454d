"""Runs: which elements of a payload are summed in which order.

A *payload* is what one rank gets from a reduce-scatter, or the whole tensor of an all-reduce. A *run* of
it goes around one ring, and starts there behind one *place*: in a reduce-scatter behind the rank whose
payload it is, in an all-reduce behind a place of the ring that the run names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PARTITIONS = ("contiguous", "round-robin")
WORD = 16  # bytes: the word in which kernels move data, at which parts and chunks begin


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` elements from ``start`` on."""

    channel: int
    start: int
    length: int
    place: int = 0

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.start + self.length


def contiguous(total: int, channels: int, itemsize: int) -> list[Run]:
    """One part for each channel, as NCCL does since 2.20.3.

    >>> contiguous(20, 2, itemsize=4)
    [Run(channel=0, start=0, length=12, place=0), Run(channel=1, start=12, length=8, place=0)]
    """
    part = whole_words(-(-total // channels), itemsize)
    return [Run(channel, start, length) for channel, (start, length) in enumerate(_cut(0, total, part))]


def round_robin(total: int, channels: int, piece: int) -> list[Run]:
    """Pieces of ``piece`` elements dealt to the channels in turn, as NCCL did before 2.20.3.

    >>> [(run.channel, run.start, run.length) for run in round_robin(7, 2, piece=2)]
    [(0, 0, 2), (1, 2, 2), (0, 4, 2), (1, 6, 1)]
    """
    return [Run(index % channels, start, length) for index, (start, length) in enumerate(_cut(0, total, piece))]


def chunks(run: Run, length: int) -> list[Run]:
    """A part of an all-reduce as chunks, each of which starts behind the next place of the ring.

    >>> chunks(Run(1, start=10, length=5), length=2)  # doctest: +NORMALIZE_WHITESPACE
    [Run(channel=1, start=10, length=2, place=0), Run(channel=1, start=12, length=2, place=1),
     Run(channel=1, start=14, length=1, place=2)]
    """
    cuts = _cut(run.start, run.length, length)
    return [Run(run.channel, start, size, place) for place, (start, size) in enumerate(cuts)]


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
