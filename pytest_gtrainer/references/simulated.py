"""Train on all ranks of a simulated world, eagerly and by the rewritten graph.

The eager side is ``EagerRun``, with a thread for each rank. The graph is traced on rank 0 and
replayed in the interpreter; a trace on the last rank shows whether it serves all ranks. What a rank
holds at the start comes from the code of real ranks, run on threads. So does clipping, which sums
over ranks in the order of the net.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pytest_gtrainer._torch.fake_groups import fake_group_beside
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.facts import long_work
from pytest_gtrainer.graph.layout import BucketLayout
from pytest_gtrainer.numerics.digest import print_weight_digest
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.config import (
    Batch,
    TrainConfig,
    built,
    check_builds,
    new_model,
    new_optimizer,
    record_gradients,
    record_random_states,
    record_state,
    start_of,
)
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun, shard_traceably
from pytest_gtrainer.tracing.model import ModelState, local, rewrap
from pytest_gtrainer.worlds.fake import net_of
from pytest_gtrainer.worlds.simulated import DependsOnRank
from pytest_gtrainer.worlds.simulated.interpreter import (
    Interpreter,
    PerRank,
    RankGraph,
    RankLiterals,
    RankRandomStates,
    check_same_on_all,
)
from pytest_gtrainer.worlds.simulated.interpreter.program import one_thread
from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.threads.group import MakeContext
from pytest_gtrainer.worlds.simulated.threads.run import run_threads
from pytest_gtrainer.worlds.simulated.threads.team import ProcessState, state_kept
from pytest_gtrainer.worlds.spec import World

ConfigOfMesh = Callable[[DeviceMesh], TrainConfig]


def config_of_mesh(
    config: TrainConfig | ConfigOfMesh, size: int, mesh: Mapping[str, int] | None = None
) -> tuple[ConfigOfMesh, dict[str, int]]:
    """Return what builds the configuration from a rank's mesh, and the dimensions of that mesh.

    Raises:
        ValueError: the mesh has another number of ranks than the world, or a finished configuration
            has a mesh that cannot be moved to these ranks.
    """
    if mesh and math.prod(mesh.values()) != size:
        dimensions = " x ".join(f"{name}={extent}" for name, extent in mesh.items())
        raise ValueError(
            f"the mesh {dimensions} has {math.prod(mesh.values())} ranks, the simulated world "
            f"{size}: make them equal"
        )

    check_builds(config)
    if not isinstance(config, TrainConfig):
        return partial(built, config), dict(mesh or {"fsdp": size})
    finished, own = config, config.mesh
    if config.submeshes or own.ndim != 1 or own.size() != size:
        raise ValueError(
            f"a configuration whose parameters are sharded over {own} and {len(config.submeshes)} "
            f"submeshes cannot be moved to {size} other ranks: hand over a function that builds it "
            "from a rank's mesh"
        )

    return lambda other: replace(finished, mesh=other), {(own.mesh_dim_names or ("fsdp",))[0]: size}


def mesh_of(extents: Mapping[str, int]) -> DeviceMesh:
    """Build the calling rank's mesh of these dimensions, outermost first."""
    return init_device_mesh("cpu", tuple(extents.values()), mesh_dim_names=tuple(extents))


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The results of eager training: the record of all ranks, and FSDP2's layout on rank 0."""

    record: Record
    layout: BucketLayout


def simulated_eager(
    config: TrainConfig | ConfigOfMesh,
    net: Net,
    *,
    mesh: Mapping[str, int] | None = None,
    steps: int | None = None,
    recorders: Sequence[Record] | None = None,
    under: MakeContext = nullcontext,
) -> SimulatedRun:
    """Train with ``fully_shard`` on ``net.size`` ranks, whose reductions add in the order of
    ``net``.

    Args:
        config: builds the configuration from a rank's mesh; or a finished one, with a 1-D mesh.
        recorders: one for each rank, which take what it would record; the record is then empty.
        under: as for ``run_threads``.
    """
    build, extents = config_of_mesh(config, net.size, mesh)

    def train_rank(rank: int) -> tuple[Record, BucketLayout | None]:
        own = build(mesh_of(extents))
        if steps is not None:
            own = replace(own, steps=steps)
        run = EagerRun(own)
        record = run.run(recorders[rank] if recorders else None)
        if rank > 0:
            return record, None  # FSDP2 has one layout on all ranks
        return record, run.layout()

    runs = run_threads(net.size, train_rank, net=net, under=under)
    records, layouts = zip(*runs, strict=True)
    return SimulatedRun(Record.merged(records), layouts[0])


def refuse_uneven(model: nn.Module) -> None:
    """Raise DependsOnRank if shards of a parameter differ in size: only some ranks would pad."""
    for fqn, tensor in model.named_parameters():
        if not isinstance(tensor, DTensor):
            continue
        ranks_along = [1] * tensor.ndim
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if hasattr(placement, "dim"):  # strided shards are no ``Shard``, and have it too
                ranks_along[placement.dim] *= size
        for dim, (extent, ranks) in enumerate(zip(tensor.shape, ranks_along, strict=True)):
            if extent % ranks:
                raise DependsOnRank(
                    f"parameter {fqn} has {extent} elements in dimension {dim}, and {ranks} ranks "
                    "share them: a simulated world needs shards of one size, so choose sizes that "
                    "the ranks divide, or real ranks"
                )


class SimulatedGraphRun:
    """A rewritten graph that serves all ranks, ready to train them; every ``run`` starts anew."""

    def __init__(self, config: TrainConfig | ConfigOfMesh, world: World, **options: Any) -> None:
        """``options`` are those of ``references.graph.rewrite``."""
        self._net = net_of(world)
        self._build, self._extents = config_of_mesh(config, world.size, world.mesh)
        self._mesh = mesh_of(self._extents)
        self.config = self._build(self._mesh)
        is_beside = len(self._extents) > self.config.mesh.ndim and not self.config.submeshes
        if is_beside and self.config.max_norm is not None:
            raise ValueError(
                "max_norm beside tensor parallelism is not replayed in a simulated world, where a "
                "norm is taken over TrainConfig.mesh alone: take real ranks, or max_norm=None"
            )

        # Building models draws random numbers; the caller's states stay as they are.
        with state_kept():
            refuse_uneven(shard_traceably(new_model(self.config), self.config))
            self._run = GraphRun(self.config, **options)
            self._literals = self._find_literals(options) if world.size > 1 else RankLiterals()

        graph = self._rank_graph(self._literals.lift(self._run.traced.gm))
        self._interpreter = Interpreter(graph, self._net)
        self.group_of = graph.group_of
        self._under: MakeContext = nullcontext
        self._starts = run_threads(world.size, self._start, net=self._net)

    def _find_literals(self, options: Mapping[str, Any]) -> RankLiterals:
        """Trace on other ranks, and return the numbers in which their graphs differ from rank 0's.

        Raises:
            DependsOnRank: the graphs differ in more than numbers.
        """
        gm = self._run.traced.gm
        first = self._rank_graph(gm)
        last = self._trace_on(self._net.size - 1, options)
        try:
            check_same_on_all(first, last)
            return RankLiterals()
        except DependsOnRank:
            pass  # perhaps in numbers alone, as the first row of a rank's part of the vocabulary

        shape = tuple(self._extents.values())
        traced: dict[int, list[RankGraph]] = {}
        for dim, extent in enumerate(shape):
            if extent == 1:
                continue
            step = math.prod(shape[dim + 1 :])  # the distance of two neighbours along ``dim``
            end = self._trace_on(step * (extent - 1), options)
            # A trace is slow: the ranks between the ends trace only where the ends differ.
            if RankLiterals.of({dim: [gm, end.gm]}).values:
                between = [self._trace_on(step * place, options) for place in range(1, extent - 1)]
                traced[dim] = [*between, end]

        along = {}
        for dim, others in traced.items():
            along[dim] = [gm, *(other.gm for other in others)]
        literals = RankLiterals.of(along)
        for other in [last, *chain.from_iterable(traced.values())]:
            coordinate = self._coordinate(other.rank)
            check_same_on_all(first, literals.with_numbers_of_first(gm, other, coordinate))
        return literals

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank in the mesh of all ranks."""
        places = torch.unravel_index(torch.tensor(rank), tuple(self._extents.values()))
        return tuple(map(int, places))

    def _trace_on(self, rank: int, options: Mapping[str, Any]) -> RankGraph:
        """Return the rewritten graph that another rank traces."""
        with fake_group_beside(rank, self._net.size):
            mesh = mesh_of(self._extents)
            run = GraphRun(self._build(mesh), **options)
            submeshes = run.config.submeshes.values()
            return RankGraph.of(run.traced.gm, mesh, run.config.mesh, *submeshes)

    def _rank_graph(self, gm: fx.GraphModule) -> RankGraph:
        return RankGraph.of(gm, self._mesh, self.config.mesh, *self.config.submeshes.values())

    def _start(self, rank: int) -> tuple[int, list[torch.Tensor], ProcessState]:
        """Return a rank's data coordinate, its shards as inputs of the graph, and its random
        states.
        """
        config = self._build(mesh_of(self._extents))
        model = shard_traceably(new_model(config), config)
        shards = [local(tensor).detach().clone() for tensor in ModelState.of(model).tensors]
        return config.coordinate, shards, ProcessState.now()

    def layout(self) -> BucketLayout:
        """Return where the rewritten graph puts each parameter."""
        return self._run.layout()

    def wasted(self) -> str:
        """Return what ``GraphRun.wasted`` does."""
        return self._run.wasted()

    def written(self) -> str:
        """Return what ``GraphRun.written`` does."""
        return self._run.written()

    def rewritten(self, **options: Any) -> "SimulatedGraphRun":
        """Return a run with the same trace and start, rewritten with other options."""
        other = copy.copy(self)
        other._run = self._run.rewritten(**options)
        graph = self._rank_graph(self._literals.lift(other._run.traced.gm))
        other._interpreter = Interpreter(graph, self._net)
        return other

    def started_under(
        self, under: MakeContext, net: Net, change: Callable[[TrainConfig], TrainConfig]
    ) -> "SimulatedGraphRun":
        """Return the same graph with another net, and with models that ``change`` makes.

        Args:
            under: as for ``run_threads``, which carries out what the graph does not.
        """
        other, build = copy.copy(self), self._build
        other._net, other._under, other.config = net, under, change(self.config)
        other._build = lambda mesh: change(build(mesh))
        graph = self._rank_graph(self._literals.lift(self._run.traced.gm))
        other._interpreter = Interpreter(graph, net)
        other._starts = run_threads(net.size, other._start, net=net, under=under)
        return other

    def run(self, recorder: Record | None = None, *, steps: int | None = None) -> Record:
        """Train for ``steps``, by default ``config.steps``, and return the record of all ranks.

        The record is empty if a ``recorder`` takes the tensors.
        """
        empty = Record(world_size=len(self._starts), meta={"side": "rewritten graph"})
        record = empty if recorder is None else recorder

        ranks = [_Rank(rank, self._run, start, record) for rank, start in enumerate(self._starts)]
        for rank in ranks:
            empty.meta |= start_of(rank.rank, rank.parameters.items())
        state = _per_rank(rank.tensors for rank in ranks)
        literals = _per_rank(self._literals.of_rank(self._coordinate(rank.rank)) for rank in ranks)

        steps = steps or self.config.steps
        progress = long_work(f"simulating {len(ranks)} ranks by the graph")
        with state_kept(), one_thread(), progress as show_progress:
            for step in range(steps):
                show_progress(f"step {step + 1} of {steps}")
                for rank in ranks:
                    rank.start_step(self.config, step)
                for number, name in self.config.batches(step):
                    self._add_gradients(ranks, state, literals, number, step, name)
                for rank in ranks:
                    named = rank.parameters.items()
                    record_gradients(record, step, rank.rank, "gradient", named)
                # The norm is a sum over ranks, in the order of the net: real ranks' code adds it.
                if self.config.max_norm is not None:
                    run_threads(len(ranks), self._clip, ranks, net=self._net, under=self._under)
                    for rank in ranks:
                        named = rank.parameters.items()
                        record_gradients(record, step, rank.rank, "clipped", named)
                for rank in ranks:
                    rank.finish_step(step)
            if self.config.record_rng:
                for rank in ranks:
                    rank.record_random_states(steps - 1, " at the end")

        return empty

    def _add_gradients(
        self,
        ranks: "Sequence[_Rank]",
        state: list[PerRank],
        literals: list[PerRank],
        number: int,
        step: int,
        name: str,
    ) -> None:
        """Run the graph on a batch of each rank, and add to the gradients of each."""
        batches = [pytree.tree_leaves(rank.next_batch(self.config, number)) for rank in ranks]
        # Dropout of each rank draws from the rank's own generator.
        random = RankRandomStates.of_ranks([rank.process.generators.cpu for rank in ranks])
        self._interpreter.random = random
        output = self._interpreter.run([*state, *_per_rank(batches), *literals])
        for rank in ranks:
            cpu = of_rank(random.states, rank.rank)
            generators = replace(rank.process.generators, cpu=cpu)
            rank.process = replace(rank.process, generators=generators)
            rank.add_gradients(step, name, *of_rank(output, rank.rank))

    def _clip(self, rank: int, ranks: "Sequence[_Rank]") -> None:
        """Clip one rank's gradients in place, seen as DTensors over the mesh of its thread."""
        mesh = self._build(mesh_of(self._extents)).mesh
        models, shards = ModelState.of(self._run.model).parameters, []
        for fqn, own in ranks[rank].parameters.items():
            if own.grad is not None:
                shards.append(nn.Parameter(rewrap(own.detach(), models[fqn], mesh)))
                shards[-1].grad = rewrap(own.grad, models[fqn], mesh)
        assert self.config.max_norm is not None
        nn.utils.clip_grad_norm_(shards, self.config.max_norm)


def _per_rank(of_ranks: Iterable[Sequence[Any]]) -> list[PerRank]:
    """Turn a list of values for each rank into a list of ``PerRank``, one for each value."""
    return [PerRank(values) for values in zip(*of_ranks, strict=True)]


class _Rank:
    """One rank's shards, their optimiser, and its random numbers; it records as
    ``references.config.train`` does.
    """

    def __init__(
        self,
        rank: int,
        run: GraphRun,
        start: tuple[int, list[torch.Tensor], ProcessState],
        record: Record,
    ) -> None:
        self._coordinate, tensors, self.process = start
        self.rank, self._record = rank, record
        self.tensors = [tensor.clone() for tensor in tensors]
        self._trainable = run.traced.trainable_fqns
        named = dict(zip(run.traced.state_fqns, self.tensors, strict=True))
        self._buffers = {fqn: named[fqn] for fqn in run.traced.buffer_fqns}
        self.parameters = {}
        for fqn in run.traced.parameter_fqns:
            self.parameters[fqn] = nn.Parameter(named[fqn], requires_grad=fqn in self._trainable)
        trained = [self.parameters[fqn] for fqn in self._trainable]
        self._optimizer = new_optimizer(run.config, trained)

    @contextmanager
    def _own_process_state(self) -> Iterator[None]:
        """Draw random numbers from the rank's own generators inside the block."""
        self.process.put_back()
        yield
        self.process = ProcessState.now()

    def start_step(self, config: TrainConfig, step: int) -> None:
        """Forget the gradients of the step before; record random states if this is asked for."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if config.record_rng:
            self.record_random_states(step)

    def record_random_states(self, step: int, when: str = "") -> None:
        """Record the states of the rank's own generators."""
        with self._own_process_state():
            record_random_states(self._record, step, self.rank, when)

    def next_batch(self, config: TrainConfig, number: int) -> Batch:
        """Return the batch of this number, over all steps."""
        with self._own_process_state():
            return config.inputs(number, self._coordinate)

    def add_gradients(
        self, step: int, name: str, loss: torch.Tensor, *gradients: torch.Tensor | None
    ) -> None:
        """Record the loss, and add the gradients to ``.grad`` of the trained parameters."""
        self._record.add(step, self.rank, "loss", name, loss)
        for fqn, gradient in zip(self._trainable, gradients, strict=True):
            if gradient is None:
                continue
            parameter = self.parameters[fqn]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            else:
                parameter.grad += gradient

    def finish_step(self, step: int) -> None:
        """Step the optimiser, and record weights, its state and buffers."""
        with self._own_process_state():
            self._optimizer.step()
        parameters = self.parameters.items()
        record_state(
            self._record, step, self.rank, parameters, self._optimizer, self._buffers.items()
        )
        print_weight_digest(step, self.rank, "rewritten graph", parameters)
