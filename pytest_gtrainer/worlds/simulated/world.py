"""The simulated world of a test: structure from a fake group of its size, values through a net model.

The body of the test runs once, as rank 0. Code that asks for values of a collective there gets nonsense, as
in a fake world; values come through ``train_eager(world=...)`` and ``train_graph(world=...)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from pytest_gtrainer._torch.fake_groups import fake_group_beside
from pytest_gtrainer._torch.mesh_caches import forget_meshes
from pytest_gtrainer.worlds.fake import fake_world
from pytest_gtrainer.worlds.simulated.net import Net, NetModel
from pytest_gtrainer.worlds.spec import WorldSpec
from pytest_gtrainer.worlds.world import World


@contextmanager
def simulated_world(spec: WorldSpec) -> Iterator[World]:
    """A world of ``spec.size`` ranks on ``spec.nodes`` nodes, with the default rings between them."""
    with fake_world(spec) as world:
        yield replace(world, kind="simulated", backend="simulated", net=NetModel.of_world(spec.size, spec.nodes))


def net_of(world: World) -> Net:
    """The net of a simulated world.

    Raises:
        ValueError: it is another world.
    """
    if world.kind != "simulated" or world.net is None:
        raise ValueError(
            f"a world of kind {world.kind!r} has no net model: mark the test "
            f'gt_world("simulated", size={world.size}, nodes=2)'
        )
    net: Net = world.net  # type: ignore[assignment]
    if net.size != world.size:
        raise ValueError(f"the net connects {net.size} ranks, the world has {world.size}: make both the same")
    return net


@contextmanager
def played_by(rank: int) -> Iterator[None]:
    """The same fake world as another rank sees it: to trace there what that rank would trace.

    Meshes must be made anew inside. The groups of the world outside are there again afterwards.
    """
    size = dist.get_world_size()
    forget_meshes()  # equal meshes share caches, and with them names of groups
    try:
        with fake_group_beside(rank, size):
            yield
    finally:
        forget_meshes()
