"""Which test follows on the same ranks: what it shares with the present one stays set up there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


def following(
    items: Sequence[pytest.Item], size_of: Callable[[pytest.Item], int | None]
) -> dict[pytest.Item, pytest.Item]:
    """For each test on ranks the next one, in the order of ``items``, on as many ranks."""
    found: dict[pytest.Item, pytest.Item] = {}
    latest: dict[int, pytest.Item] = {}
    for item in reversed(items):
        size = size_of(item)
        if size is None:
            continue
        if size in latest:
            found[item] = latest[size]
        latest[size] = item
    return found
