"""The eager side of a simulated world, on threads as ranks: ``EagerRun``, the same as on real ranks, and clipping.

A norm of gradients is a sum over shards, and so over ranks, in an order that is the net's. ``clip_grad_norm_``
therefore runs here for the graph's side too: on the shards that the graph left, as DTensors of each thread's mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pytest_gtrainer.graph.layout import BucketLayout
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.train import TensorSink
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.threads.run import LIMIT, run_threads

ConfigOfMesh = Callable[[DeviceMesh], TrainConfig]
Gradients = Sequence[tuple[nn.Parameter, nn.Parameter]]
"""Of one rank: its shards as parameters, with their gradients, each beside the parameter of rank 0's model."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What eager training on all ranks left: the record of the world, and FSDP2's layout on rank 0."""

    record: Record
    layout: BucketLayout


def simulated_eager(
    config: TrainConfig | ConfigOfMesh,
    net: Net,
    *,
    mesh: Mapping[str, int] | None = None,
    steps: int | None = None,
    timeout: float = LIMIT,
    recorders: Sequence[TensorSink] | None = None,
) -> SimulatedRun:
    """Train with ``fully_shard`` on ``net.size`` ranks, whose reductions add in the order of ``net``.

    Args:
        config: builds the configuration from a rank's mesh. A finished configuration will do if its mesh is
            one dimension of all ranks and nothing else in it, its model in particular, holds a mesh.
        mesh: dimension names and extents, outermost first; by default that of ``config``, else ``{"fsdp": size}``.
        steps: instead of the configuration's.
        timeout: as ``run_threads``.
        recorders: one for each rank that takes what would be recorded; the record is then empty.

    Raises:
        ValueError: a finished configuration that needs more than one mesh.
    """
    build, extents = config_of_mesh(config, net.size, mesh)
    results = run_threads(net.size, _train, build, extents, steps, recorders, net=net, timeout=timeout)
    records, layouts = zip(*results, strict=True)
    return SimulatedRun(Record.merged(records), layouts[0])


def _train(
    rank: int,
    config_of_mesh: ConfigOfMesh,
    mesh: Mapping[str, int],
    steps: int | None,
    recorders: Sequence[TensorSink] | None,
) -> tuple[Record, BucketLayout | None]:
    config = config_of_mesh(mesh_of(mesh))
    run = EagerRun(config if steps is None else replace(config, steps=steps))
    record = run.run(recorders[rank] if recorders else None)
    return record, run.layout() if rank == 0 else None


def config_of_mesh(
    config: TrainConfig | ConfigOfMesh, size: int, mesh: Mapping[str, int] | None = None
) -> tuple[ConfigOfMesh, dict[str, int]]:
    """What builds the configuration from a rank's mesh, and that mesh's dimensions.

    Raises:
        ValueError: a finished configuration that needs more than one mesh.
    """
    if not isinstance(config, TrainConfig):
        return config, dict(mesh or {"fsdp": size})
    finished, own = config, config.mesh
    if config.submeshes or own.ndim != 1 or own.size() != size:
        raise ValueError(
            f"a configuration whose parameters are sharded over {own} and {len(config.submeshes)} submeshes cannot be "
            f"moved to {size} other ranks: hand over a function that builds it from a rank's mesh"
        )
    return lambda other: replace(finished, mesh=other), {(own.mesh_dim_names or ("fsdp",))[0]: size}


def mesh_of(extents: Mapping[str, int]) -> DeviceMesh:
    """The calling rank's mesh of these dimensions, outermost first."""
    return init_device_mesh("cpu", tuple(extents.values()), mesh_dim_names=tuple(extents))


def clip_on_all(
    gradients: Sequence[Gradients], build: ConfigOfMesh, extents: Mapping[str, int], config: TrainConfig, net: Net
) -> None:
    """Clip every rank's gradients in place to ``config.max_norm``; ``config`` is what ``build`` made for rank 0."""
    run_threads(net.size, _clip, gradients, build, extents, config, net=net, timeout=LIMIT)


def _clip(
    rank: int, gradients: Sequence[Gradients], build: ConfigOfMesh, extents: Mapping[str, int], config: TrainConfig
) -> None:
    own = build(mesh_of(extents))
    parameters = [_sharded(shard, like, own.mesh) for shard, like in gradients[rank]]
    assert config.max_norm is not None
    nn.utils.clip_grad_norm_(parameters, config.max_norm)


def _sharded(shard: nn.Parameter, like: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """The same memory, parameter and gradient, as a parameter on this thread's mesh."""
    if not isinstance(like, DTensor):
        return shard

    def on_mesh(plain: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(plain, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())

    assert shard.grad is not None
    parameter = nn.Parameter(on_mesh(shard.detach()))
    parameter.grad = on_mesh(shard.grad)
    return parameter
