"""Worlds: process groups for tests.

Also writes ranks for messages, without torch: the parent process of ranks need not import it.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TypeVar

MARKER = "gt_world"
KINDS = ("fake", "simulated", "ranks")
Value = TypeVar("Value")


class SpecError(Exception):
    """The marker asks for something that cannot be; the message is one sentence for its author."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks for a message.

    >>> ranks_text([3]), ranks_text([5, 0, 1, 2])
    ('rank 3', 'ranks 0-2, 5')
    """
    ordered = sorted(ranks)
    texts = []
    # In a run of consecutive ranks, rank minus place is constant.
    for _, numbered in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [str(rank) for _, rank in numbered]
        texts.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run))
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(texts)


def ranks_by(pairs: Iterable[tuple[int, Value]]) -> dict[Value, list[int]]:
    """Group ranks by value, in the order in which they come."""
    found: dict[Value, list[int]] = {}
    for rank, value in pairs:
        found.setdefault(value, []).append(rank)
    return found


def by_value(values: Mapping[int, object]) -> str:
    """Write values with the ranks that have them, each value once.

    >>> by_value({0: "a", 1: "b", 2: "a"})
    'a (ranks 0, 2), b (rank 1)'
    """
    groups = ranks_by(sorted(values.items())).items()
    return ", ".join(f"{value} ({ranks_text(ranks)})" for value, ranks in groups)
