"""Train by one graph: the step is traced, rewritten and replayed.

Before a graph runs on ranks, their collectives are compared. Graphs of ranks may differ, since only
some ranks pad uneven shards. But ranks that are in different collectives wait for each other: gloo
aborts, NCCL hangs.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn

from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer.facts import counted, spell_some
from pytest_gtrainer.graph.bucket_plan import PayloadOrder
from pytest_gtrainer.graph.collectives import group_of, launches, unread_launches
from pytest_gtrainer.graph.layout import BucketLayout, bucket_layout
from pytest_gtrainer.graph.nodes import writes
from pytest_gtrainer.graph.partitions import partition_fault
from pytest_gtrainer.graph.same_on_ranks import collective_lines
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.passes.graph_pass import BoundPass, Pass
from pytest_gtrainer.passes.pipeline import apply_graph_passes, construct_default_graph_passes
from pytest_gtrainer.references.config import TrainConfig, bucket_modules, new_model, train
from pytest_gtrainer.references.hand_over import trace_once
from pytest_gtrainer.references.replicas import RanksDisagree, first_differing_line, texts_of_ranks
from pytest_gtrainer.tracing.groups import hand_on_inputs
from pytest_gtrainer.tracing.sharding import data_parallel
from pytest_gtrainer.tracing.stage import TracedStage
from pytest_gtrainer.tracing.step import TracedStep, trace_step
from pytest_gtrainer.worlds.gathering import gather_objects

# A second group for each mesh buys overlap, which nobody measures here, and costs a set-up on every
# rank.
_NOT_NEEDED = ("reassign_collective_pgs_pass",)


class GraphRun:
    """A model whose step this rank has traced and rewritten; train it once with ``run``.

    Every rank traces, since ranks differ in sizes, names of groups and pads.
    """

    def __init__(self, config: TrainConfig, **options: Any) -> None:
        """``options`` are those of ``rewrite``."""
        self.config = config
        self.model = shard_traceably(new_model(config), config)
        self._as_traced, self._options = trace_config(config, self.model), options
        self.traced = rewrite(self._as_traced, config, **options)

    def run(self) -> Record:
        """Train as ``references.config.train`` does.

        Raises:
            RanksDisagree: before anything runs, if the collectives of ranks differ.
        """
        assert_same_collectives(self.traced.gm)
        return train(self.config, self.model, self._replay, side="rewritten graph")

    def _replay(self, *inputs: Any) -> torch.Tensor:
        with self.config.context():  # a replay refuses another autocast than that of its trace
            return self.traced.replay(self.model, *inputs)

    def rewritten(self, **options: Any) -> "GraphRun":
        """Return a run of the same model and trace, rewritten with other options.

        Only one of the two runs can train.
        """
        other = copy.copy(self)
        other._options = {**self._options, **options}
        other.traced = rewrite(self._as_traced, self.config, **other._options)
        return other

    def layout(self) -> BucketLayout:
        """Return where the rewritten graph puts each parameter."""
        return bucket_layout(self.traced.gm)

    def wasted(self) -> str:
        """Return a sentence on launches of the passes whose results nobody reads; "" for none."""
        traced, rewritten = map(unread_launches, (self._as_traced.gm, self.traced.gm))
        more = len(rewritten) - len(traced)
        if more <= 0:
            return ""
        return (
            f"{rewritten[-1].name} is launched, and nobody reads its result: "
            f"{counted(more, 'collective')} more than eager has"
        )

    def written(self) -> str:
        """Return a sentence on inputs that passes let the graph write to; "" for none."""
        own, traced = map(_written_inputs, (self.traced, self._as_traced))
        places = sorted(set(own) - set(traced))
        if not places:
            return ""
        return (
            f"after the passes the graph writes to input {spell_some(places)} of the step, which "
            "belongs to the caller: eager code leaves it as it is"
        )


def _written_inputs(traced: TracedStep) -> list[int]:
    """Return the places of the step's inputs that a graph writes to."""
    written = writes(traced.gm.graph)
    placeholders = traced.gm.graph.find_nodes(op="placeholder")
    inputs = placeholders[len(traced.state_fqns) :]
    return [place for place, node in enumerate(inputs) if node in written]


def shard_traceably(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Apply ``data_parallel`` over the meshes that the eager side uses, with its arithmetic."""
    ranks = float(config.mesh.size())
    if not config.replicate:
        hand_on_inputs(model, parameter_groups(model, config))
    for label, modules in bucket_modules(model, config.bucket_plan):
        if label in config.submeshes:
            mesh = config.submeshes[label]
            data_parallel(
                modules[0], mesh, mp_policy=config.mp_policy, gradient_divide_factor=ranks
            )

    if config.replicate:  # DDP multiplies by 1/N and sums, where gloo's average sums and divides
        return data_parallel(model, config.mesh, mode="replicate", gradient_divide_factor=ranks)
    mode = "hybrid_shard" if config.hybrid else "fully_shard"
    return data_parallel(model, config.mesh, mode=mode, mp_policy=config.mp_policy)


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[list[nn.Module]]:
    """Return the modules of each group that ``fully_shard`` would make, inner groups first.

    Modules whose parameters are all in groups further in make none.
    """
    groups = [modules for _, modules in bucket_modules(model, config.bucket_plan)]
    if not any(model in modules for modules in groups):
        groups.append([model])
    managed: set[nn.Parameter] = set()
    found = []
    for modules in groups:
        parameters: set[nn.Parameter] = set()
        for module in modules:
            parameters.update(module.parameters())
        if parameters - managed:
            found.append(modules)
        managed |= parameters

    return found


def trace_config(config: TrainConfig, model: nn.Module) -> TracedStep:
    """Trace the step on the shapes of the first batch; random states stay as they are."""
    with random_states_kept(), config.context():
        inputs = config.inputs(0)
        trace = partial(trace_step, model, config.step, inputs, chunk=config.chunk)
        if config.trace_once:
            return trace_once(trace, model, inputs, config.mesh)
        return trace()


Traced = TypeVar("Traced", TracedStep, TracedStage)


def rewrite(
    traced: Traced,
    config: TrainConfig,
    *,
    passes: Sequence[BoundPass | Pass] | None = None,
    payload_order: PayloadOrder = "managed",
    reduce_scatter_first: bool = True,
    reshard_after_forward: bool = False,
) -> Traced:
    """Bucket and reorder the collectives of a step, or stage, in a copy of its graph.

    Args:
        passes: replaces the default pipeline and its options.
        payload_order: as for ``joint_transformer_block_bucketing_reordering_pass``.
        reduce_scatter_first, reshard_after_forward: do as FSDP2 does.
    """
    disabled: Sequence[str] = ()
    if passes is None:
        disabled = _NOT_NEEDED
        passes = construct_default_graph_passes(
            bucket_plan=config.bucket_plan,
            chunk=config.chunk,
            payload_order=payload_order,
            reduce_scatter_first=config.hybrid and reduce_scatter_first,
            reshard_after_forward=reshard_after_forward,
            canonical_rules=("detach", "view"),
        )

    gm = apply_graph_passes(
        traced.gm, traced.example_inputs, passes, disable=disabled, twin=traced.twin
    )
    return traced.with_graph(gm)


def assert_same_collectives(gm: fx.GraphModule) -> None:
    """Check that all ranks issue the same collectives, on matching groups. Every rank must call it.

    Raises:
        RanksDisagree: on every rank, with the first collective that differs, or whose groups are no
            partition of the ranks.
    """
    texts = texts_of_ranks("\n".join(line.text for line in collective_lines(gm)))
    found = first_differing_line(texts, range(len(texts)))
    if found is not None:
        raise RanksDisagree(
            f"collective {found.place} differs: rank {found.rank} issues {found.line.text}, "
            f"rank {found.other} issues {found.other_line.text}"
        )

    # Two groups of the same size read alike in the lines, so their ranks are compared as well.
    own = []
    for node in gm.graph.nodes:
        if launches(node.target):
            group = group_of(node)
            own.append(None if group is None else group_ranks(group))

    for index, named in enumerate(zip(*gather_objects(own), strict=True)):
        groups = {rank: ranks for rank, ranks in enumerate(named) if ranks is not None}
        fault = partition_fault(groups)
        if fault:
            raise RanksDisagree(
                f"the process groups of collective {index}, {texts[0].splitlines()[index]}, "
                f"differ: {fault}"
            )
