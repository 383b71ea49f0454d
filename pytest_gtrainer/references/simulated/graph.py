"""Training by a rewritten graph on all ranks of a simulated world.

The graph is traced by rank 0, and by the last rank to see that it is the same; what every rank holds at the
start comes from the same code that shards the model on real ranks, run on threads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.graph.layout import BucketLayout
from pytest_gtrainer.long_work import long_work
from pytest_gtrainer.numerics.digest import tell_weights
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.config import Batch, TrainConfig, new_model
from pytest_gtrainer.references.graph import GraphRun, shard_traceably
from pytest_gtrainer.references.simulated.eager import ConfigOfMesh, Gradients, clip_on_all, config_of_mesh, mesh_of
from pytest_gtrainer.references.train import TensorSink, record_gradients, record_random_states, record_state
from pytest_gtrainer.tracing.model import ModelState, local
from pytest_gtrainer.worlds.simulated.interpreter import (
    Interpreter,
    PerRank,
    RankGraph,
    RankRandomStates,
    check_same_on_all,
)
from pytest_gtrainer.worlds.simulated.interpreter.program import one_thread
from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank
from pytest_gtrainer.worlds.simulated.threads.run import LIMIT, run_threads
from pytest_gtrainer.worlds.simulated.threads.team import ProcessState, read_state, state_kept, write_state
from pytest_gtrainer.worlds.simulated.world import net_of, played_by
from pytest_gtrainer.worlds.world import World


class SimulatedGraphRun:
    """A rewritten graph, ready to train all ranks of a simulated world; every ``run`` starts anew.

    Raises:
        DependsOnRank: rank 0 and the last rank trace different graphs; names the first node (S4).
        ValueError: the world is no simulated one.
    """

    def __init__(self, config: TrainConfig | ConfigOfMesh, world: World, **options: Any) -> None:
        """``options`` are those of ``references.graph.rewrite``."""
        net = net_of(world)
        build, mesh = config_of_mesh(config, world.size, world.mesh)
        self._build, self._extents = build, mesh
        self._mesh, self._net = mesh_of(mesh), net
        self.config = build(self._mesh)
        with state_kept():
            self._run = GraphRun(self.config, **options)
            graph = _rank_graph(self._run, self._mesh)
            if world.size > 1:
                with played_by(world.size - 1):
                    own = mesh_of(mesh)
                    last = _rank_graph(GraphRun(build(own), **options), own)
                check_same_on_all(graph, last)
        self._interpreter = Interpreter(graph, net)
        self.group_of = graph.group_of
        self._starts = run_threads(world.size, _start, build, mesh, net=net, timeout=LIMIT)

    def layout(self) -> BucketLayout:
        """Where the rewritten graph puts each parameter."""
        return self._run.layout()

    def rewritten(self, **options: Any) -> SimulatedGraphRun:
        """The same trace and start, rewritten with other options."""
        other = copy.copy(self)
        other._run = self._run.rewritten(**options)
        other._interpreter = Interpreter(_rank_graph(other._run, self._mesh), self._net)
        return other

    def run(self, recorder: TensorSink | None = None, *, steps: int | None = None) -> Record:
        """Train for ``steps``, else ``config.steps``: the record of all ranks, empty if a ``recorder`` takes all."""
        empty = Record(world_size=len(self._starts), meta={"side": "rewritten graph"})
        record: TensorSink = empty if recorder is None else recorder
        ranks = [_Rank(rank, self._run, start) for rank, start in enumerate(self._starts)]
        state = [PerRank(tensors) for tensors in zip(*(rank.tensors for rank in ranks), strict=True)]
        steps = steps or self.config.steps
        with state_kept(), one_thread(), long_work(f"simulating {len(ranks)} ranks by the graph") as at:
            for step in range(steps):
                at(f"step {step + 1} of {steps}")
                self._step(step, ranks, state, record)
        return empty

    def _step(self, step: int, ranks: Sequence[_Rank], state: Sequence[PerRank], record: TensorSink) -> None:
        batches = [pytree.tree_leaves(rank.next_batch(self.config, step, record)) for rank in ranks]
        inputs = [PerRank(values) for values in zip(*batches, strict=True)]
        # every rank draws from its own random numbers
        random = RankRandomStates.of_ranks([rank.process.torch_random for rank in ranks])
        self._interpreter.random = random
        output = self._interpreter.run([*state, *inputs])
        for rank in ranks:
            rank.process = replace(rank.process, torch_random=of_rank(random.states, rank.rank))
            rank.take(record, step, *of_rank(output, rank.rank))
        if self.config.max_norm is not None:
            clip_on_all([rank.gradients for rank in ranks], self._build, self._extents, self.config, self._net)
            for rank in ranks:
                rank.record_gradients(record, step, "clipped")
        for rank in ranks:
            rank.finish_step(record, step)


def _rank_graph(run: GraphRun, mesh: DeviceMesh) -> RankGraph:
    return RankGraph.of(run.traced.gm, mesh, run.config.mesh, *run.config.submeshes.values())


@dataclass(frozen=True, slots=True)
class InitialRank:
    """What a rank holds before the first step: its shards, in the order of the graph's inputs, and random numbers."""

    tensors: list[torch.Tensor]
    process: ProcessState


def _start(rank: int, build: ConfigOfMesh, extents: Mapping[str, int]) -> InitialRank:
    config = build(mesh_of(extents))
    model = shard_traceably(new_model(config), config)
    return InitialRank([local(tensor).detach().clone() for tensor in ModelState.of(model).tensors], read_state())


class _Rank:
    """One rank's shards, their optimiser, and its random numbers."""

    def __init__(self, rank: int, run: GraphRun, start: InitialRank) -> None:
        self.rank, self.process = rank, start.process
        self.tensors = [tensor.clone() for tensor in start.tensors]
        state = ModelState.of(run.model)
        self._models, self._fqns, self._trainable = state.parameters, state.fqns, run.traced.trainable_fqns
        self._parameters = {
            fqn: nn.Parameter(tensor, requires_grad=fqn in self._trainable)
            for fqn, tensor in zip(state.parameters, self.tensors, strict=False)
        }
        self._optimizer = run.config.optimizer([self._parameters[fqn] for fqn in self._trainable])

    @contextmanager
    def _process(self) -> Iterator[None]:
        """Inside, random numbers are drawn from the rank's own."""
        write_state(self.process)
        yield
        self.process = read_state()

    def next_batch(self, config: TrainConfig, step: int, record: TensorSink) -> Batch:
        """The inputs of a step, and before it what ``references.train.train`` records before it."""
        with self._process():
            if config.record_rng:
                record_random_states(record, step, self.rank)
            return config.batch(step, self.rank)

    def take(self, record: TensorSink, step: int, loss: torch.Tensor, *gradients: torch.Tensor | None) -> None:
        """Record loss and gradients, and keep these; as ``references.train.train`` does."""
        record.add(step, self.rank, "loss", "loss", loss)
        self._optimizer.zero_grad()
        for fqn, gradient in zip(self._trainable, gradients, strict=True):
            if gradient is not None:
                parameter = self._parameters[fqn]
                parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        self.record_gradients(record, step, "gradient")

    @property
    def gradients(self) -> Gradients:
        """The parameters that have a gradient, each with that of rank 0's model."""
        pairs = ((self._parameters[fqn], self._models[fqn]) for fqn in self._trainable)
        return [pair for pair in pairs if pair[0].grad is not None]

    def record_gradients(self, record: TensorSink, step: int, phase: str) -> None:
        record_gradients(record, step, self.rank, phase, self._parameters.items())

    def finish_step(self, record: TensorSink, step: int) -> None:
        """Step, and record what that leaves."""
        with self._process():
            self._optimizer.step()
        count = len(self._parameters)
        buffers = zip(self._fqns[count:], self.tensors[count:], strict=True)
        record_state(record, step, self.rank, self._parameters.items(), self._optimizer, buffers)
        tell_weights(step, self.rank, "rewritten graph", self._parameters.items())
