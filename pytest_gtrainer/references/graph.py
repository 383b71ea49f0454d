"""The subject: the same training step as one graph, traced, rewritten and replayed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_gtrainer.graph.bucket_plan import PayloadOrder
from pytest_gtrainer.graph.layout import BucketLayout, bucket_layout
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.numerics.seeds import random_states_kept
from pytest_gtrainer.passes.graph_pass import BoundPass
from pytest_gtrainer.passes.pipeline import apply_graph_passes, construct_default_graph_passes
from pytest_gtrainer.references.checkpointing import check_random_states
from pytest_gtrainer.references.config import TrainConfig, bucket_modules, new_model
from pytest_gtrainer.references.same_collectives import assert_same_collectives
from pytest_gtrainer.references.train import train
from pytest_gtrainer.tracing.sharding import data_parallel
from pytest_gtrainer.tracing.step import TracedStep, trace_step

# a second group a mesh buys overlap, which nobody measures here, and costs its set-up on every rank
_NOT_NEEDED = ("reassign_collective_pgs_pass",)

if TYPE_CHECKING:
    pass


class GraphRun:
    """A model traced on this rank and rewritten by our passes; train it once with ``run``.

    The graph is traced on every rank: shard sizes, group names and pads differ between ranks (D15).
    """

    def __init__(self, config: TrainConfig, **options: Any) -> None:
        """``options`` are those of ``rewrite``."""
        self.config = config
        self.model = shard_traceably(new_model(config), config)
        self._as_traced, self._options = trace_config(config, self.model), options
        self.traced = rewrite(self._as_traced, config, **options)

    def run(self) -> Record:
        """Train for ``config.steps`` steps; see ``references.train.train`` for what is recorded.

        Raises:
            RanksDisagree: the ranks' graphs issue different collectives; nothing has run then.
        """
        assert_same_collectives(self.traced.gm)
        return train(self.config, self.model, self._compute_gradients, side="rewritten graph")

    def rewritten(self, **options: Any) -> GraphRun:
        """The same model and trace, rewritten with other options; of the two runs only one can train."""
        other = copy.copy(self)
        other._options = {**self._options, **options}
        other.traced = rewrite(self._as_traced, self.config, **other._options)
        return other

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
    mode = "replicate" if config.replicate else "hybrid_shard" if config.hybrid else "fully_shard"
    return data_parallel(model, config.mesh, mode=mode, mp_policy=config.mp_policy)


def trace_config(config: TrainConfig, model: nn.Module) -> TracedStep:
    """Trace the step on the shapes of the first batch; random numbers go on from where they were.

    Raises:
        CannotRestore: a recomputed region draws random numbers that are to be those of the forward.
    """
    with random_states_kept():
        traced = trace_step(model, config.step, config.batch(0, dist.get_rank()), chunk=config.chunk)
    check_random_states(traced.gm, config.activation_checkpoint)
    return traced


def rewrite(
    traced: TracedStep,
    config: TrainConfig,
    *,
    passes: Sequence[BoundPass] | None = None,
    payload_order: PayloadOrder = "managed",
    reduce_scatter_first: bool = True,
    reshard_after_forward: bool = False,
) -> TracedStep:
    """The step with its collectives bucketed and reordered; nothing else moves, so that it reads as it was traced.

    The traced graph is left as it was.

    Args:
        passes: a pipeline of your own instead; the other options are then nobody's.
        payload_order: see ``joint_transformer_block_bucketing_reordering_pass``.
        reduce_scatter_first: under hybrid sharding, reduce gradients as FSDP2 does (D16); off to show the difference.
        reshard_after_forward: gather parameters again in the backward, as FSDP2 does; the bits are the same.
    """
    if passes is not None:
        return traced.with_graph(apply_graph_passes(traced.gm, traced.example_inputs, passes, twin=traced.twin))
    default = construct_default_graph_passes(
        bucket_plan=config.bucket_plan,
        chunk=config.chunk,
        payload_order=payload_order,
        reduce_scatter_first=config.hybrid and reduce_scatter_first,
        reshard_after_forward=reshard_after_forward,
        canonical_rules=("detach", "view"),
    )
    gm = apply_graph_passes(traced.gm, traced.example_inputs, default, disable=_NOT_NEEDED, twin=traced.twin)
    return traced.with_graph(gm)
