"""The device mesh of a world."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.world import World


def make_mesh(world: World) -> DeviceMesh:
    """A DeviceMesh over all ranks of ``world``, with the dimension names of its marker.

    Raises:
        RuntimeError: no process group is up (a test that stays in the parent has none).
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group in this process: build the mesh inside the function given to gt_ranks.run")
    return init_device_mesh(world.device, tuple(world.mesh.values()), mesh_dim_names=tuple(world.mesh))
