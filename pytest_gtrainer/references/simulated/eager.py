"""The eager reference of a simulated world: ``EagerRun``, the same as on real ranks, on threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pytest_gtrainer.graph.layout import BucketLayout
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.train import Recorder
from pytest_gtrainer.worlds.simulated.threads.run import LIMIT, run_threads

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.net import Net

ConfigOfMesh = Callable[[DeviceMesh], TrainConfig]


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
    recorders: Sequence[Recorder] | None = None,
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
    recorders: Sequence[Recorder] | None,
) -> tuple[Record, BucketLayout | None]:
    config = config_of_mesh(init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)))
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
    if isinstance(config, TrainConfig):
        finished = config
        return lambda own: replace(finished, mesh=own), _one_mesh(config, size)
    return config, dict(mesh or {"fsdp": size})


def _one_mesh(config: TrainConfig, size: int) -> dict[str, int]:
    mesh = config.mesh
    if config.submeshes or mesh.ndim != 1 or mesh.size() != size:
        raise ValueError(
            f"a configuration whose parameters are sharded over {mesh} and {len(config.submeshes)} submeshes cannot be "
            f"moved to {size} other ranks: hand over a function that builds it from a rank's mesh"
        )
    return {(mesh.mesh_dim_names or ("fsdp",))[0]: size}

