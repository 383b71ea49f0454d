"""The reference: the model trained eagerly with torch's own ``fully_shard``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_gtrainer._torch.fsdp2 import FSDP2Policy, fully_shard
from pytest_gtrainer.graph.layout import BucketLayout
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.chunked import eager_chunked
from pytest_gtrainer.references.config import TrainConfig, bucket_modules, new_model
from pytest_gtrainer.references.layout import eager_bucket_layout
from pytest_gtrainer.references.train import Recorder, train

if TYPE_CHECKING:
    pass


class EagerRun:
    """A model under ``fully_shard``, wrapped once per bucket of the plan, or under DDP; train it once with ``run``."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.model = new_model(config)
        self._side = "eager DDP" if config.replicate else "eager fully_shard"
        self._trained = _replicated(self.model, config) if config.replicate else shard_eagerly(self.model, config)

    def run(self, recorder: Recorder | None = None) -> Record:
        """Train for ``config.steps`` steps; see ``references.train.train`` for what is recorded."""
        chunk = self.config.chunk
        with nullcontext() if chunk is None else eager_chunked(self.model, chunk):
            return train(self.config, self.model, self._compute_gradients, self._side, recorder)

    def layout(self) -> BucketLayout:
        """Where FSDP2 put each parameter; available after ``run``. Empty under DDP, which shards nothing."""
        return BucketLayout(()) if self.config.replicate else eager_bucket_layout(self.model)

    def _compute_gradients(self, *inputs: Any) -> torch.Tensor:
        loss = self.config.step(self._trained, *inputs)
        loss.backward()
        return loss


def _replicated(model: nn.Module, config: TrainConfig) -> nn.Module:
    # a list of one is for all buckets; bucket_cap_mb itself is not heeded in the first step
    limits: Any = None if config.ddp_bucket_mb is None else [config.ddp_bucket_mb]
    return DistributedDataParallel(model, device_mesh=config.mesh, bucket_cap_mb_list=limits)


def shard_eagerly(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Apply ``fully_shard`` once per bucket, then to the root."""
    policy = FSDP2Policy(
        param_dtype=config.mp_policy.param_dtype,
        reduce_dtype=config.mp_policy.reduce_dtype,
        cast_forward_inputs=False,  # a graph has no module boundary to cast at
    )
    for label, modules in bucket_modules(model, config.bucket_plan):
        mesh = config.submeshes.get(label, config.mesh)
        target: Any = modules[0] if len(modules) == 1 else modules
        fully_shard(target, mesh=mesh, mp_policy=policy)
        if label in config.submeshes:
            # a premultiplied sum, which gloo does not have, would be FSDP2's choice
            modules[0].set_gradient_divide_factor(float(config.mesh.size()))
            modules[0].set_force_sum_reduction_for_comms(True)
    if "" not in config.bucket_plan:
        fully_shard(model, mesh=config.mesh, mp_policy=policy)
    return model
