"""The largest part of a sequence that is in order: what has not moved."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def rising(numbers: Sequence[int]) -> list[int]:
    """Places of a longest rising subsequence of different numbers; n log n (patience sorting).

    >>> rising([0, 1, 5, 2, 3, 4])
    [0, 1, 3, 4, 5]
    """
    ends: list[int] = []  # ends[k]: the smallest number with which k+1 rising ones end
    holders: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        length = bisect.bisect_left(ends, number)
        before.append(holders[length - 1] if length else -1)
        ends[length : length + 1], holders[length : length + 1] = [number], [place]
    places = []
    place = holders[-1] if holders else -1
    while place >= 0:
        places.append(place)
        place = before[place]
    return places[::-1]
