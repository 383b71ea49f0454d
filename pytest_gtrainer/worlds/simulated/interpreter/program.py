"""Programs: a graph compiled once to segments of plain nodes and single steps, and run on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.values import schema
from pytest_gtrainer.graph.nodes import is_collective, written_operands
from pytest_gtrainer.worlds.simulated import DependsOnRank, NoModel
from pytest_gtrainer.worlds.simulated.interpreter.blocks import (
    Lifetimes,
    OperatorBlock,
    Scratch,
    Segment,
    blocks_of,
    inputs_of,
)
from pytest_gtrainer.worlds.simulated.interpreter.groups import Partition, RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.operators import (
    attribute,
    binder,
    check_callable,
    described,
    draws,
    graphs_called,
    group_name,
    has_collectives,
    input_name,
    is_reduction,
    named_arguments,
    passes_through,
    source_of,
    written_argument,
)
from pytest_gtrainer.worlds.simulated.interpreter.steps import (
    COND,
    INVOKE_SUBGRAPH,
    CollectiveStep,
    ConstantStep,
    EffectStep,
    Frame,
    NestedStep,
    Step,
    collective_of,
)
from pytest_gtrainer.worlds.simulated.interpreter.values import (
    Kind,
    Kinds,
    PerRank,
    RankRandomStates,
    at,
    generator_kept,
)
from pytest_gtrainer.worlds.simulated.net import Net

Piece = Sequence[fx.Node]


@dataclass(frozen=True, slots=True)
class Single:
    """A node with a step of its own; nobody needs ``dying`` after it."""

    node: fx.Node
    step: Step
    dying: frozenset[fx.Node]

    def run(self, frame: Frame) -> None:
        try:
            frame.values[self.node] = self.step.run(frame, self.dying)
        except Exception as error:
            error.add_note(f"in {described(self.node)}")
            raise


@dataclass(frozen=True, slots=True)
class Plain:
    """A segment, and its blocks for every combination of kinds that its inputs have had."""

    segment: Segment
    plans: dict[tuple[Kind, ...], list[OperatorBlock]] = field(default_factory=dict)

    @property
    def dying(self) -> frozenset[fx.Node]:
        return self.segment.dying

    def run(self, frame: Frame) -> None:
        inputs = self.segment.inputs
        kinds = tuple(map(frame.kinds.of, frame.of(inputs)))
        if kinds not in self.plans:
            self.plans[kinds] = blocks_of(self.segment, dict(zip(inputs, kinds, strict=True)), frame.kinds)
        for block in self.plans[kinds]:
            block.run(frame.values, frame.scratch, frame.kinds)


Part = Single | Plain


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The parts of a graph, in its order.

    ``placeholders`` are the nodes of its inputs, ``output`` is what it returns, with nodes in it.
    """

    kinds: Kinds
    placeholders: Sequence[fx.Node]
    parts: Sequence[Part]
    output: Any
    scratch: Scratch = field(default_factory=Scratch)

    def run(self, inputs: Sequence[Any], random: RankRandomStates) -> Any:
        """What the graph returns for these inputs, both uniform or per rank, in the structure of its output."""
        names = [input_name(node) for node in self.placeholders]
        self._check_inputs(names, inputs)
        self.scratch.give_back()
        own = [self.kinds.value(list(value)) if type(value) is PerRank else value for value in inputs]  # may be emptied
        values = dict(zip(self.placeholders, own, strict=True))
        frame = Frame(self.kinds, random, self.scratch, values, list(zip(names, inputs, strict=True)))
        for part in self.parts:
            part.run(frame)
            for node in part.dying:
                values.pop(node, None)
        return fx.node.map_arg(self.output, lambda node: values[source_of(node)])

    def _check_inputs(self, names: Sequence[str], inputs: Sequence[Any]) -> None:
        """The graph has baked in the shapes and dtypes that it was traced with.

        Raises:
            ValueError: the number of inputs, or of ranks that have one.
            DependsOnRank: a rank's tensor is another than the traced one.
        """
        size = self.kinds.size
        if len(inputs) != len(names):
            raise ValueError(f"the graph takes {len(names)} inputs, it got {len(inputs)}")
        for node, name, value in zip(self.placeholders, names, inputs, strict=True):
            if type(value) is PerRank and len(value) != size:
                raise ValueError(f"{name} is given for {len(value)} ranks, the world has {size}")
            traced = node.meta.get("val")
            if not isinstance(traced, Tensor) or not all(isinstance(extent, int) for extent in traced.shape):
                continue
            for rank in range(size) if type(value) is PerRank else (0,):
                given = at(value, rank)
                if not isinstance(given, Tensor) or given.shape != traced.shape or given.dtype != traced.dtype:
                    is_tensor = isinstance(given, Tensor)
                    found = f"{given.dtype}{list(given.shape)}" if is_tensor else type(given).__name__
                    raise DependsOnRank(
                        f"{name} of rank {rank} is {found}, the graph was traced with {traced.dtype}"
                        f"{list(traced.shape)}: one graph serves ranks with equal shapes only, so choose sizes that "
                        "the ranks divide"
                    )


class _Compiler:
    """Makes programs of a graph and of those in it; ``_nets`` are those of the groups of a partition."""

    def __init__(self, graph: RankGraph, net: Net) -> None:
        self._kinds = Kinds(graph.size)
        self._partitions = graph.partitions
        self._nets = {part: [net.for_group(ranks) for ranks in part] for part in set(graph.partitions.values())}

    def program(self, gm: fx.GraphModule) -> RankProgram:
        computed = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        nodes = [node for node in computed if not passes_through(node)]  # a wait has the value of what it waits for
        steps = {node: self._step(node, gm) for node in nodes}
        pieces: list[Piece] = []  # runs of plain nodes, and every other node by itself
        for plain, run in groupby(nodes, key=lambda node: steps[node] is None):
            piece = list(run)
            pieces += [piece] if plain else [[node] for node in piece]
        lifetimes = Lifetimes(gm.graph, pieces)
        parts = [self._part(index, pieces, steps, lifetimes) for index in range(len(pieces))]
        return RankProgram(self._kinds, gm.graph.find_nodes(op="placeholder"), parts, gm.graph.output_node().args[0])

    def _part(
        self, index: int, pieces: Sequence[Piece], steps: Mapping[fx.Node, Step | None], lifetimes: Lifetimes
    ) -> Part:
        first, dying = pieces[index][0], lifetimes.dying(index)
        step = steps[first]
        if step is not None:
            return Single(first, step, dying)
        following = pieces[index + 1][0] if index + 1 < len(pieces) else None
        needed = lifetimes.needed(index)
        reduced: dict[fx.Node, Sequence[int]] = {}
        if following is not None and is_reduction(following):
            order = tuple(chain.from_iterable(self._partition(following)))
            reduced = {node: order for node in needed if lifetimes.only_in(index + 1, node)}
        return Plain(Segment(pieces[index], inputs_of(pieces[index]), needed, dying, reduced))

    def _step(self, node: fx.Node, gm: fx.GraphModule) -> Step | None:
        """None for a plain node."""
        if node.op == "get_attr":
            return ConstantStep(attribute(gm, str(node.target)))
        check_callable(node, gm)
        if is_collective(node):
            return self._collective(node)
        graphs = list(graphs_called(node, gm))
        if node.op == "call_module" or any(map(has_collectives, graphs)):
            if node.op != "call_module" and node.target not in (COND, INVOKE_SUBGRAPH):
                raise NoModel(
                    f"{node.target} ({node.name}) calls a graph with a collective, which has a model only in cond, "
                    "invoke_subgraph and called modules: inline it"
                )
            target = graphs[0] if node.op == "call_module" else node.target
            return NestedStep(target, node.all_input_nodes, binder(node), {id(g): self.program(g).run for g in graphs})
        written, random = written_operands(node), draws(node, gm)
        if not written and not random:
            return None
        assert callable(node.target)
        return EffectStep(node.target, node.all_input_nodes, binder(node), written, random)

    def _collective(self, node: fx.Node) -> CollectiveStep:
        collective = collective_of(node)  # first: it refuses what is no collective that we know
        partition, argument = self._partition(node), written_argument(node)
        written: list[fx.Node] = []
        if argument is not None:
            fx.node.map_arg(named_arguments(node)[argument], written.append)
        return CollectiveStep(
            node.all_input_nodes,
            binder(node),
            [argument.name for argument in schema(node.target).arguments],
            partition,
            self._nets[partition],
            collective,
            (argument, written) if argument is not None else None,
        )

    def _partition(self, node: fx.Node) -> Partition:
        return self._partitions[group_name(node)]


class Interpreter:
    """A graph, ready to run on all ranks of a world as often as wanted.

    Args:
        graph: what one rank traced; it must not depend on the rank, see ``check_same_on_all``.
        net: the order of reductions, for as many ranks as the graph was traced for.
        random: random generator states of the ranks, by default all as the process's is now.

    Raises:
        NoModel: the graph has an operator without a model in a simulated world, named in the message.
        ValueError: the net is for another number of ranks.
    """

    def __init__(self, graph: RankGraph, net: Net, *, random: RankRandomStates | None = None) -> None:
        if net.size != graph.size:
            raise ValueError(f"the net connects {net.size} ranks, the graph was traced for {graph.size}")
        self.random = random or RankRandomStates()
        self._graph, self._net = graph, net
        self._program = _Compiler(graph, net).program(graph.gm)

    def run(self, inputs: Sequence[Any]) -> Any:
        """Outputs, in the structure that the graph returns; inputs and outputs are uniform or ``PerRank``.

        Tensors that the graph writes to (buffers) are written to, as in a replay. Runs without autograd, and
        on one thread, as ranks do: some kernels' bits depend on the number, and waking threads for small
        tensors costs more than it gives.

        Raises:
            CollectiveMismatch: ranks come to a collective with different sizes or splits.
            DependsOnRank: an input has not the traced shape on every rank, or belongs to all ranks and is
                written to by each.
        """
        facts.tell("replay_on_all", graph=self._graph, net=self._net, inputs=inputs, random=self.random)
        with torch.no_grad(), generator_kept(), one_thread():
            return self._program.run(inputs, self.random)


@contextmanager
def one_thread() -> Iterator[None]:
    """As ranks compute: on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
