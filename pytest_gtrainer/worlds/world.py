"""The world a test runs in, as the ``gt_world`` fixture hands it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """Where a test runs.

    Attributes:
        kind: "fake", "simulated", "ranks", or one that a hook gives.
        size: number of ranks.
        rank: the rank of this process; None in a test that stays in the parent (``gt_ranks``).
        nodes: number of nodes the ranks are said to lie on.
        mesh: dimension names and extents, outermost first; ``gt_mesh`` is its DeviceMesh.
        device: "cpu" or "cuda"; tensors of the test belong there.
        backend: process group backend, "fake", "gloo" or "nccl".
        net: net model of a simulated world, else None.
    """

    kind: str
    size: int
    rank: int | None
    nodes: int
    mesh: Mapping[str, int]
    device: str
    backend: str
    net: object | None = None
