"""The fake world: torch's fake process group, any size, one process, no data moved.

Use it for structure (graphs, plans, order). All-gather repeats the local value and
reduce-scatter ignores its op, so values produced by its collectives mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pytest_gtrainer._torch.fake_groups import FakeStore
from pytest_gtrainer._torch.mesh_caches import forget_meshes
from pytest_gtrainer.worlds.spec import WorldSpec
from pytest_gtrainer.worlds.world import World


@contextmanager
def fake_world(spec: WorldSpec) -> Iterator[World]:
    """Play rank ``spec.rank`` of ``spec.size`` ranks; all groups are gone afterwards.

    Raises:
        RuntimeError: a default process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a process group is already up in this process, so a fake world cannot start: "
            "destroy it first (an earlier test left it?)"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=spec.rank, world_size=spec.size)
    try:
        yield World("fake", spec.size, spec.rank, spec.nodes, spec.mesh, device=spec.device or "cpu", backend="fake")
    finally:
        dist.destroy_process_group()
        forget_meshes()
