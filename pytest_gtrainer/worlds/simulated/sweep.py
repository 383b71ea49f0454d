"""Sweeps: one test under many nets, and what a table tells of each net."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from pytest_gtrainer.worlds.simulated.net import CHANNELS, Net, NetModel

FIELDS = ("ranks", "nodes", "channels", "partition", "accumulate")
"""What tells the nets of a sweep apart; the columns of its table."""


def sweep_nets(
    size: int,
    *,
    nodes: Sequence[int] = (1, 2),
    channels: Sequence[int] = (1, CHANNELS),
    partition: Sequence[str] = ("contiguous",),
    accumulate: Sequence[str] = ("wire",),
    **fields: Any,
) -> list[Any]:
    """Nets of ``size`` ranks for ``pytest.mark.parametrize``: every combination, each with its id.

    >>> [parameter.id for parameter in sweep_nets(16, nodes=[2], channels=[1, 4])]
    ['nodes2-channels1-contiguous-wire', 'nodes2-channels4-contiguous-wire']

    Args:
        fields: of all nets; see ``NetModel``.

    Raises:
        ValueError: as ``NetModel.of_world``.
    """
    return [
        pytest.param(
            NetModel.of_world(size, count, channels=each, partition=parts, accumulate=sums, **fields),
            id=f"nodes{count}-channels{each}-{parts}-{sums}",
        )
        for count, each, parts, sums in product(nodes, channels, partition, accumulate)
    ]


def row_of(net: Net) -> dict[str, Any]:
    """The net in a table's words; "-" for what a net of another kind does not have.

    >>> row_of(NetModel(2, 8))
    {'ranks': 16, 'nodes': 2, 'channels': 4, 'partition': 'contiguous', 'accumulate': 'wire'}
    """
    row = {name: getattr(net, name, "-") for name in FIELDS}
    if isinstance(net, NetModel):
        row["channels"] = net.channels or len(net.rings or ()) or CHANNELS
    return {**row, "ranks": net.size}
