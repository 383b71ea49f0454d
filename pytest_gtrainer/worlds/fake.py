"""Worlds of one process, on torch's fake process group of any size, and the mesh of any world.

The *fake* world is for structure: its all-gather repeats the local value and its reduce-scatter
ignores its op. The *simulated* world of a test has the structure of a fake one, and a net model for
values. The body of the test runs once, as rank 0; values come through ``train_eager(world=...)``
and ``train_graph(world=...)``.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pytest_gtrainer._torch.fake_groups import FakeStore, every_group_is_fake
from pytest_gtrainer._torch.process_groups import forget_groups, forget_meshes, live_groups
from pytest_gtrainer.environment import variable
from pytest_gtrainer.worlds.simulated.net import Net, NetModel
from pytest_gtrainer.worlds.spec import World, WorldSpec, check_world


@contextmanager
def fake_world(spec: WorldSpec) -> Iterator[World]:
    """Play rank ``spec.rank`` of ``spec.size`` ranks; all groups are gone afterwards.

    Groups of any backend, such as ``new_group(backend="nccl")``, are fake ones.

    Raises:
        RuntimeError: the process has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a process group is already up in this process, so a fake world cannot start: "
            "destroy it first (an earlier test left it?)"
        )

    own = spec.rank, spec.size
    with _default_group("fake", FakeStore(), *own), every_group_is_fake(*own):
        yield World(
            "fake",
            spec.size,
            spec.rank,
            spec.nodes,
            spec.mesh,
            device=spec.device or "cpu",
            backend="fake",
        )


@contextmanager
def world_of_one(backend: str) -> Iterator[None]:
    """Make this process a real world of one rank, with a rank's variables and one thread."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if backend == "nccl":
        # Deterministic cuBLAS needs it before CUDA starts.
        own["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with ExitStack() as stack:
        for name, value in own.items():
            stack.enter_context(variable(name, value))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        stack.enter_context(_default_group(backend, dist.HashStore(), 0, 1))
        yield


@contextmanager
def _default_group(backend: str, store: dist.Store, rank: int, size: int) -> Iterator[None]:
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        ended = live_groups()
        # A test may have destroyed its groups itself.
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        forget_groups(ended)


@contextmanager
def simulated_world(spec: WorldSpec) -> Iterator[World]:
    """Make a world of ``spec.size`` ranks on ``spec.nodes`` nodes, with the default rings."""
    with fake_world(spec) as world:
        net = NetModel.of_world(spec.size, spec.nodes)
        yield replace(world, kind="simulated", backend="simulated", net=net)


def net_of(world: World) -> Net:
    """Return the net of a simulated world.

    Raises:
        ValueError: it is a world of another kind, or the net has another size.
    """
    check_world(world)
    if world.kind != "simulated" or world.net is None:
        raise ValueError(
            f"a world of kind {world.kind!r} has no net model: "
            f'mark the test gt_world("simulated", size={world.size}, nodes=2)'
        )

    net: Net = world.net  # type: ignore[assignment]
    if net.size != world.size:
        raise ValueError(
            f"the net connects {net.size} ranks, the world has {world.size}: make both the same"
        )
    return net


def make_mesh(world: World) -> DeviceMesh:
    """Return a DeviceMesh over all ranks, with the marker's names.

    Raises:
        RuntimeError: the process has no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group in this process: "
            "build the mesh inside the function given to gt_ranks.run"
        )
    extents = tuple(world.mesh.values())
    return init_device_mesh(world.device, extents, mesh_dim_names=tuple(world.mesh))
