"""The two sides of a comparison in any world that moves data: on this rank, or on all ranks of a simulated world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer.graph.bucket_plan import PayloadOrder
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.passes.graph_pass import BoundPass
from pytest_gtrainer.references.config import TrainConfig, finished
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.spec import World


def train_eager(config: TrainConfig | Callable[[DeviceMesh], TrainConfig], *, world: World | None = None) -> Record:
    """Train eagerly with ``fully_shard``, or DDP: loss, gradients, weights, ... per step, on this rank.

    In a simulated ``world`` on all its ranks, as threads; ``config`` is then best a function that builds the
    configuration from a rank's mesh.
    """
    if world is not None and world.kind == "simulated":
        from pytest_gtrainer.references.simulated import simulated_eager
        from pytest_gtrainer.worlds.fake import net_of

        return simulated_eager(config, net_of(world), mesh=world.mesh).record
    return EagerRun(finished(config, world)).run()


def train_graph(
    config: TrainConfig | Callable[[DeviceMesh], TrainConfig],
    *,
    world: World | None = None,
    passes: Sequence[BoundPass] | None = None,
    payload_order: PayloadOrder = "managed",
    reduce_scatter_first: bool = True,
    reshard_after_forward: bool = False,
) -> Record:
    """Train by the rewritten graph: loss, gradients, weights, ... per step, on this rank.

    In a simulated ``world`` on all its ranks; ``config`` is then best a function that builds the
    configuration from a rank's mesh. The options are those of ``rewrite``. To compare the record with
    ``train_eager``'s take ``assert_parity``, which refuses a comparison that could not have failed.
    """
    options: dict[str, Any] = {
        "passes": passes,
        "payload_order": payload_order,
        "reduce_scatter_first": reduce_scatter_first,
        "reshard_after_forward": reshard_after_forward,
    }
    if world is not None and world.kind == "simulated":
        from pytest_gtrainer.references.simulated import SimulatedGraphRun

        return SimulatedGraphRun(config, world, **options).run()
    return GraphRun(finished(config, world), **options).run()
