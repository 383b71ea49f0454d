"""Training by a rewritten graph on all ranks of a simulated world.

The graph is traced by rank 0, and by the last rank to see that it is the same; what every rank holds at the
start comes from the same code that shards the model on real ranks, run on threads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.numerics.weight_digests import tell_weights
from pytest_gtrainer.passes.layout import BucketLayout
from pytest_gtrainer.references.config import TrainConfig, new_model
from pytest_gtrainer.references.graph import GraphRun, shard_traceably
from pytest_gtrainer.references.train import Recorder
from pytest_gtrainer.tracing.state import ModelState, local
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph, check_same_on_all
from pytest_gtrainer.worlds.simulated.interpreter.run import one_thread
from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank
from pytest_gtrainer.worlds.simulated.threads.run import LIMIT, run_threads
from pytest_gtrainer.worlds.simulated.threads.training import ConfigOfMesh, config_of_mesh
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
        self._mesh, self._net = _mesh(mesh), net
        self.config = _simulable(build(self._mesh))
        self._run = GraphRun(self.config, **options)
        graph = _rank_graph(self._run, self._mesh)
        if world.size > 1:
            check_same_on_all(graph, _traced_by_last(build, mesh, world.size, options))
        self._interpreter = Interpreter(graph, net)
        self.group_of = graph.group_of
        self._states = run_threads(world.size, _initial_state, build, mesh, net=net, timeout=LIMIT)

    def layout(self) -> BucketLayout:
        """Where the rewritten graph puts each parameter."""
        return self._run.layout()

    def rewritten(self, **options: Any) -> SimulatedGraphRun:
        """The same trace and start, rewritten with other options."""
        other = copy.copy(self)
        other._run = self._run.rewritten(**options)
        other._interpreter = Interpreter(_rank_graph(other._run, self._mesh), self._net)
        return other

    def run(self, recorder: Recorder | None = None, *, steps: int | None = None) -> Record:
        """Train for ``steps``, else ``config.steps``: the record of all ranks, empty if a ``recorder`` takes all."""
        empty = Record(world_size=len(self._states), meta={"side": "rewritten graph"})
        record: Recorder = empty if recorder is None else recorder
        ranks = [_Rank(rank, self._run, [own.clone() for own in state]) for rank, state in enumerate(self._states)]
        state = [PerRank(tensors) for tensors in zip(*(rank.tensors for rank in ranks), strict=True)]
        with one_thread():
            for step in range(steps or self.config.steps):
                self._step(step, ranks, state, record)
        return empty

    def _step(self, step: int, ranks: Sequence[_Rank], state: Sequence[PerRank], record: Recorder) -> None:
        batches = [pytree.tree_leaves(self.config.batch(step, rank.rank)) for rank in ranks]
        inputs = [PerRank(values) for values in zip(*batches, strict=True)]
        output = self._interpreter.run([*state, *inputs])
        for rank in ranks:
            rank.finish_step(record, step, *of_rank(output, rank.rank))


def _simulable(config: TrainConfig) -> TrainConfig:
    """The configuration, unless it asks for what only a rank of its own can do."""
    asked = [name for name, value in (("max_norm", config.max_norm), ("record_rng", config.record_rng)) if value]
    if asked:
        raise ValueError(f"a graph in a simulated world does not support TrainConfig.{asked[0]}: use real ranks")
    return config


def _mesh(extents: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(extents.values()), mesh_dim_names=tuple(extents))


def _rank_graph(run: GraphRun, mesh: DeviceMesh) -> RankGraph:
    return RankGraph.of(run.traced.gm, mesh, run.config.mesh, *run.config.submeshes.values())


def _traced_by_last(
    build: ConfigOfMesh, extents: Mapping[str, int], size: int, options: Mapping[str, Any]
) -> RankGraph:
    with played_by(size - 1):
        mesh = _mesh(extents)
        return _rank_graph(GraphRun(build(mesh), **options), mesh)


def _initial_state(rank: int, build: ConfigOfMesh, extents: Mapping[str, int]) -> list[torch.Tensor]:
    """What a rank holds before the first step: its shards, in the order of the graph's inputs."""
    config = build(_mesh(extents))
    model = shard_traceably(new_model(config), config)
    return [local(tensor).detach().clone() for tensor in ModelState.of(model).tensors]


class _Rank:
    """One rank's shards and their optimiser."""

    def __init__(self, rank: int, run: GraphRun, tensors: Sequence[torch.Tensor]) -> None:
        self.rank, self.tensors = rank, list(tensors)
        state = ModelState.of(run.model)
        self._fqns, self._trainable = state.fqns, run.traced.trainable_fqns
        self._parameters = {
            fqn: nn.Parameter(tensor, requires_grad=fqn in self._trainable)
            for fqn, tensor in zip(state.parameters, self.tensors, strict=False)
        }
        self._optimizer = run.config.optimizer([self._parameters[fqn] for fqn in self._trainable])

    def finish_step(self, record: Recorder, step: int, loss: torch.Tensor, *gradients: torch.Tensor | None) -> None:
        """Record loss and gradients, step, record the rest; as ``references.train.train`` does."""
        record.add(step, self.rank, "loss", "loss", loss)
        self._optimizer.zero_grad()
        for fqn, gradient in zip(self._trainable, gradients, strict=True):
            if gradient is not None:
                parameter = self._parameters[fqn]
                parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
                record.add(step, self.rank, "gradient", fqn, parameter.grad)
        self._optimizer.step()
        self._record_state(record, step)
        tell_weights(step, self.rank, "rewritten graph", self._parameters.items())

    def _record_state(self, record: Recorder, step: int) -> None:
        for fqn, parameter in self._parameters.items():
            record.add(step, self.rank, "weight", fqn, parameter)
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    record.add(step, self.rank, "optimizer", f"{fqn}.{key}", value)
        for fqn, tensor in zip(self._fqns[len(self._parameters) :], self.tensors[len(self._parameters) :], strict=True):
            record.add(step, self.rank, "buffer", fqn, tensor)
