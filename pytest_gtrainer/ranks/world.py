"""The ``ranks`` world as a test sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pytest_gtrainer import devices
from pytest_gtrainer.worlds.spec import World, WorldSpec


@contextmanager
def ranks_world(spec: WorldSpec, config: pytest.Config) -> Iterator[World]:
    """In a rank, the world on its warm default group; in the parent, the world without a rank.

    Groups that the test makes are cleared away by the rank when the test is over.
    """
    worker = getattr(config, "workerinput", {})
    rank = worker.get("gt_rank")
    if rank is None:
        found = devices.resolve(config)
        device, backend = found.kind, found.backend
    else:
        device, backend = worker["gt_device"], worker["gt_backend"]
    yield World("ranks", spec.size, rank, spec.nodes, spec.mesh, device, backend)
