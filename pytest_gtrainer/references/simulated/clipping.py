"""Clipping of gradients on all ranks of a simulated world, by the code that clips them on a rank of its own.

A norm is a sum over shards, and so over ranks, in an order that is the net's. ``clip_grad_norm_`` therefore runs on
threads, where eager training runs too: on the shards that the graph left, as DTensors of each thread's mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.references.simulated.eager import ConfigOfMesh
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.threads.run import LIMIT, run_threads

Gradients = Sequence[tuple[nn.Parameter, nn.Parameter]]
"""Of one rank: its shards as parameters, with their gradients, each beside the parameter of rank 0's model."""


def clip_on_all(
    gradients: Sequence[Gradients], build: ConfigOfMesh, extents: Mapping[str, int], config: TrainConfig, net: Net
) -> None:
    """Clip every rank's gradients in place to ``config.max_norm``; ``config`` is what ``build`` made for rank 0."""
    run_threads(net.size, _clip, gradients, build, extents, config, net=net, timeout=LIMIT)


def _clip(
    rank: int, gradients: Sequence[Gradients], build: ConfigOfMesh, extents: Mapping[str, int], config: TrainConfig
) -> None:
    own = build(init_device_mesh("cpu", tuple(extents.values()), mesh_dim_names=tuple(extents)))
    parameters = [_sharded(shard, like, own.mesh) for shard, like in gradients[rank]]
    assert config.max_norm is not None
    nn.utils.clip_grad_norm_(parameters, config.max_norm)


def _sharded(shard: nn.Parameter, like: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """The same memory, parameter and gradient, as a parameter on this thread's mesh."""
    assert shard.grad is not None
    if not isinstance(like, DTensor):
        return shard
    parameter = nn.Parameter(_on(mesh, shard.detach(), like))
    parameter.grad = _on(mesh, shard.grad, like)
    return parameter


def _on(mesh: DeviceMesh, plain: torch.Tensor, like: DTensor) -> torch.Tensor:
    return DTensor.from_local(plain, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
