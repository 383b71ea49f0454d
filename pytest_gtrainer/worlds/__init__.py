"""Worlds: process groups for tests; and ranks in messages, without torch, which the parent of ranks need not have."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TypeVar

Value = TypeVar("Value")


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as a reader says them.

    >>> ranks_text([3]), ranks_text([5, 0, 1, 2])
    ('rank 3', 'ranks 0-2, 5')
    """
    ordered = sorted(ranks)
    runs = groupby(enumerate(ordered), key=lambda numbered: numbered[1] - numbered[0])
    lists = [[rank for _, rank in run] for _, run in runs]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in lists]
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(texts)


def ranks_by(said: Iterable[tuple[int, Value]]) -> dict[Value, list[int]]:
    """The ranks that say each thing, in the order in which they say it."""
    found: dict[Value, list[int]] = {}
    for rank, value in said:
        found.setdefault(value, []).append(rank)
    return found


def by_value(values: Mapping[int, object]) -> str:
    """Values with the ranks that have them, each value once.

    >>> by_value({0: "a", 1: "b", 2: "a"})
    'a (ranks 0, 2), b (rank 1)'
    """
    return ", ".join(
        f"{value} ({ranks_text(ranks)})"
        for value, ranks in ranks_by(sorted(values.items())).items()
    )
