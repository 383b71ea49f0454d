"""The subject: the same training step as one graph, traced, rewritten and replayed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass
from pytest_gtrainer.passes.joint import joint_transformer_block_bucketing_reordering_pass
from pytest_gtrainer.passes.layout import BucketLayout, bucket_layout
from pytest_gtrainer.passes.payload_order import PayloadOrder
from pytest_gtrainer.references.config import TrainConfig, bucket_modules, new_model
from pytest_gtrainer.references.same_collectives import assert_same_collectives
from pytest_gtrainer.references.train import train
from pytest_gtrainer.tracing.sharding import data_parallel
from pytest_gtrainer.tracing.step import TracedStep, trace_step


class GraphRun:
    """A model traced on this rank and rewritten by our passes; train it once with ``run``.

    The graph is traced on every rank: shard sizes, group names and pads differ between ranks (D15).
    """

    def __init__(self, config: TrainConfig, *, payload_order: PayloadOrder = "managed") -> None:
        self.config = config
        self.model = shard_traceably(new_model(config), config)
        self.traced = rewrite(trace_config(config, self.model), config, payload_order=payload_order)

    def run(self) -> Record:
        """Train for ``config.steps`` steps; see ``references.train.train`` for what is recorded.

        Raises:
            RanksDisagree: the ranks' graphs issue different collectives; nothing has run then.
        """
        assert_same_collectives(self.traced.gm)
        return train(self.config, self.model, self._compute_gradients, side="rewritten graph")

    def layout(self) -> BucketLayout:
        """Where the rewritten graph puts each parameter."""
        return bucket_layout(self.traced.gm)

    def _compute_gradients(self, *inputs: Any) -> torch.Tensor:
        return self.traced.replay(self.model, *inputs)


def shard_traceably(model: nn.Module, config: TrainConfig) -> nn.Module:
    """``data_parallel`` over the meshes that the eager side uses."""
    for label, modules in bucket_modules(model, config.bucket_plan):
        if label in config.submeshes:
            factor = float(config.mesh.size())
            mesh = config.submeshes[label]
            data_parallel(modules[0], mesh, mp_policy=config.mp_policy, gradient_divide_factor=factor)
    return data_parallel(model, config.mesh, mp_policy=config.mp_policy)


def trace_config(config: TrainConfig, model: nn.Module) -> TracedStep:
    """Trace the step on the shapes of the first batch."""
    return trace_step(model, config.step, config.batch(0, dist.get_rank()))


def rewrite(traced: TracedStep, config: TrainConfig, *, payload_order: PayloadOrder = "managed") -> TracedStep:
    """The step with its collectives bucketed and reordered."""
    gm = canonicalize_graph_pass(traced.gm, traced.example_inputs)
    gm = joint_transformer_block_bucketing_reordering_pass(
        gm, traced.example_inputs, bucket_plan=config.bucket_plan, payload_order=payload_order
    )
    return traced.with_graph(gm)


def train_graph(config: TrainConfig, *, payload_order: PayloadOrder = "managed") -> Record:
    """Train by the rewritten graph: loss, gradients, weights, ... per step, on this rank."""
    return GraphRun(config, payload_order=payload_order).run()
