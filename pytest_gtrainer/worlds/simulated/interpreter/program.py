"""Compile a graph once to segments of plain nodes and single steps, and run it on all ranks.

A *segment* is a run of plain operators between two steps. It is replayed rank by rank as one
generated function, so what a rank needs only inside is freed before the next rank allocates. Its
nodes are sorted into *blocks* by sharing: a block that all ranks share runs once, one that a group
shares once a group.

Invariant: no node of a block draws random numbers, writes to its operands or communicates, so the
order of ranks is free.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.graph_modules import lazy_module
from pytest_gtrainer.graph.nodes import graphs_called, is_collective, written_operands
from pytest_gtrainer.graph.same_on_ranks import describe_input, describe_node, nodes_within
from pytest_gtrainer.worlds.simulated import DependsOnRank, NoModel
from pytest_gtrainer.worlds.simulated.interpreter import steps
from pytest_gtrainer.worlds.simulated.interpreter.graph import (
    RankGraph,
    check_callable,
    draws,
    group_name,
    is_identity,
    value_node,
)
from pytest_gtrainer.worlds.simulated.interpreter.steps import Frame, Step
from pytest_gtrainer.worlds.simulated.interpreter.values import (
    PerRank,
    RankRandomStates,
    Sharing,
    Sharings,
    at,
)
from pytest_gtrainer.worlds.simulated.net import Net


@dataclass(frozen=True, slots=True)
class OperatorBlock:
    """Nodes of one sharing, as one function from the values of ``inputs`` to those of ``outputs``.

    To generate code takes longer than to interpret the block once, so that is optional.
    """

    sharing: Sharing
    graph: fx.GraphModule
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    dying: frozenset[fx.Node]
    generates_code: bool

    def run(self, frame: Frame) -> None:
        given = [frame.values[node] for node in self.inputs]
        dying = []
        for node in self.dying:
            if type(frame.values[node]) is PerRank:
                dying.append(frame.values[node])

        results: list[list[Any]] = [[None] * frame.sharings.size for _ in self.outputs]
        for ranks in self.sharing.classes:
            own = self._call([at(value, ranks[0]) for value in given], ranks[0])
            for rank in ranks:
                for of_ranks, result in zip(results, own, strict=True):
                    of_ranks[rank] = result
                # Freed here, so that the allocator can give the memory to the next rank's results.
                for value in dying:
                    value[rank] = None

        for node, of_ranks in zip(self.outputs, results, strict=True):
            if self.sharing is frame.sharings.uniform:
                frame.values[node] = of_ranks[0]
            else:
                frame.values[node] = PerRank(of_ranks, self.sharing)

    def _call(self, own: list[Any], rank: int) -> Sequence[Any]:
        try:
            if self.generates_code and not facts.is_watched("node"):
                return self.graph.forward(*own)
            interpreter = NodeByNode(self.graph, rank)
            interpreter.extra_traceback = False  # it would change the error, which has a note here
            results: Sequence[Any] = interpreter.run(*own)
            return results
        except Exception as error:
            # Generated code does not say which node raised. Nothing here has effects, so it can run
            # again, node by node, up to the one that fails.
            single = fx.Interpreter(self.graph, garbage_collect_values=False)
            with suppress(Exception):
                single.run(*own)
            failed = list(self.graph.graph.nodes)[: len(single.env) + 1][-1]
            error.add_note(f"in {describe_node(failed)}, for rank {rank}")
            raise


class NodeByNode(fx.Interpreter):
    """Runs a block and notifies "node" before each node; proofs name the node they are at."""

    def __init__(self, graph: fx.GraphModule, rank: int | None) -> None:
        super().__init__(graph)
        self.rank = rank

    def run_node(self, n: fx.Node) -> Any:
        facts.notify("node", node=n, rank=self.rank)
        return super().run_node(n)


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the other nodes whose values these use, each once."""
    used: dict[fx.Node, None] = {}
    for node in nodes:
        used.update(dict.fromkeys(map(value_node, node.all_input_nodes)))
    for node in nodes:
        used.pop(node, None)
    return list(used)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of plain nodes in a graph.

    Attributes:
        inputs: nodes before it that it uses.
        needed: nodes of it that are used after it.
        generates_code: False if it runs too seldom to generate code for it.
        plans: its blocks, by the sharings of its inputs.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    needed: frozenset[fx.Node]
    generates_code: bool = True
    plans: dict[tuple[Sharing, ...], list[OperatorBlock]] = field(default_factory=dict)

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> None:
        sharings = tuple(map(frame.sharings.of, frame.of(self.inputs)))
        if sharings not in self.plans:
            sharing_of = dict(zip(self.inputs, sharings, strict=True))
            self.plans[sharings] = self._make_blocks(sharing_of, frame.sharings, dying)
        for block in self.plans[sharings]:
            block.run(frame)

    def _make_blocks(
        self, sharing_of: dict[fx.Node, Sharing], sharings: Sharings, dying: frozenset[fx.Node]
    ) -> list[OperatorBlock]:
        """Return a block for each sharing, coarser ones first: they use nothing of finer ones."""
        by_sharing: dict[Sharing, list[fx.Node]] = {}
        for node in self.nodes:
            operands = map(value_node, node.all_input_nodes)
            sharing_of[node] = sharings.common(map(sharing_of.__getitem__, operands))
            by_sharing.setdefault(sharing_of[node], []).append(node)

        # From the last block to the first: the outputs of one are what later ones use.
        blocks: list[OperatorBlock] = []
        used_later, ending = set(self.needed), set(dying)
        copies: dict[fx.Node, fx.Node] = {}
        for sharing in sorted(by_sharing, key=lambda sharing: len(sharing.classes), reverse=True):
            nodes = by_sharing[sharing]
            inputs = inputs_of(nodes)
            outputs = [node for node in nodes if node in used_later]

            graph = fx.Graph()
            for node in inputs:
                copies[node] = graph.placeholder(node.name)
            for node in nodes:
                copies[node] = graph.node_copy(node, lambda given: copies[value_node(given)])
            graph.output(tuple(copies[node] for node in outputs))

            module = lazy_module({}, graph, {}, None)
            last_used = frozenset(ending.intersection(inputs))
            block = OperatorBlock(sharing, module, inputs, outputs, last_used, self.generates_code)
            blocks.append(block)
            used_later.update(inputs)
            ending -= last_used

        return blocks[::-1]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The parts of a graph, in its order, each with the nodes whose values die after it."""

    sharings: Sharings
    placeholders: Sequence[fx.Node]
    constants: Mapping[fx.Node, Any]
    parts: Sequence[tuple[Step | Segment, frozenset[fx.Node]]]
    output: Any

    def run(self, inputs: Sequence[Any], random: RankRandomStates) -> Any:
        """Return the output for these inputs, in its structure; both are uniform or per rank."""
        names = list(map(describe_input, self.placeholders))
        self._check_inputs(names, inputs)
        values = dict(self.constants)
        for node, value in zip(self.placeholders, inputs, strict=True):
            # Blocks empty the lists of values that die; the caller's list has to stay as it is.
            if type(value) is PerRank:
                value = self.sharings.value(list(value))
            values[node] = value

        frame = Frame(self.sharings, random, values, list(zip(names, inputs, strict=True)))
        for part, dying in self.parts:
            if isinstance(part, Step):
                facts.notify("node", node=part.node, rank=None)
            part.run(frame, dying)
            for node in dying:
                values.pop(node, None)

        return fx.node.map_arg(self.output, lambda node: values[value_node(node)])

    def _check_inputs(self, names: Sequence[str], inputs: Sequence[Any]) -> None:
        """Refuse other shapes and dtypes than the traced ones, which the graph bakes in."""
        size = self.sharings.size
        if len(inputs) != len(names):
            raise ValueError(f"the graph takes {len(names)} inputs, it got {len(inputs)}")
        for node, name, value in zip(self.placeholders, names, inputs, strict=True):
            of_ranks = [value]
            if type(value) is PerRank:
                of_ranks = value
                if len(value) != size:
                    raise ValueError(
                        f"{name} is given for {len(value)} ranks, the world has {size}"
                    )
            traced = node.meta.get("val")
            if not isinstance(traced, Tensor) or not all(type(n) is int for n in traced.shape):
                continue
            for rank, own in enumerate(of_ranks):
                found = type(own).__name__
                if isinstance(own, Tensor):
                    if own.shape == traced.shape and own.dtype == traced.dtype:
                        continue
                    found = f"{own.dtype}{list(own.shape)}"
                raise DependsOnRank(
                    f"{name} of rank {rank} is {found}, the graph was traced with {traced.dtype}"
                    f"{list(traced.shape)}: one graph serves ranks with equal shapes only, "
                    "so choose sizes that the ranks divide"
                )


class Interpreter:
    """A graph for all ranks of a world, see ``check_same_on_all``.

    Raises:
        NoModel: the graph has an operator that a simulated world does not model.
        ValueError: the net is of another size.
    """

    def __init__(
        self,
        graph: RankGraph,
        net: Net,
        *,
        random: RankRandomStates | None = None,
        collective_step: Callable[..., steps.CollectiveStep] = steps.CollectiveStep,
        generates_code: bool = True,
    ) -> None:
        """Prepare a graph.

        Args:
            collective_step: makes the step of a collective, as the class itself does.
            generates_code: False for a graph that runs once, with values that all ranks share.
        """
        if net.size != graph.size:
            raise ValueError(
                f"the net connects {net.size} ranks, the graph was traced for {graph.size}"
            )

        self.random = random or RankRandomStates()
        self._collective_step, self._generates_code = collective_step, generates_code
        self._graph, self._net, self._sharings = graph, net, Sharings(graph.size)
        self._nets: dict[Any, list[Net]] = {}
        for partition in graph.partitions.values():
            self._nets[partition] = list(map(net.for_group, partition))
        self._program = self._compile(graph.gm)

    def run(self, inputs: Sequence[Any]) -> Any:
        """Return the outputs of the graph, uniform or ``PerRank`` as inputs are.

        Buffers are written to.

        Raises:
            CollectiveMismatch: ranks differ in sizes or splits.
            DependsOnRank: an input is not what was traced.
        """
        facts.notify(
            "replay_on_all", graph=self._graph, net=self._net, inputs=inputs, random=self.random
        )
        facts.emit("simulated", ranks=self._graph.size)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), one_thread():
            return self._program.run(inputs, self.random)

    def _compile(self, gm: fx.GraphModule) -> RankProgram:
        """Cut a graph into segments of plain nodes and single steps, with the last uses."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        output = gm.graph.output_node()
        constants = {}
        special: dict[fx.Node, Step | None] = {}
        pieces: list[list[fx.Node]] = []  # runs of plain nodes, and every other node by itself
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                constants[node] = attrgetter(str(node.target))(gm)
            # Collectives are complete when they return here, so a wait has nothing to do: it has
            # the value of the node that it waits for.
            if node.op in ("placeholder", "get_attr", "output") or is_identity(node):
                continue
            special[node] = self._make_step(node, gm)
            if special[node] or not pieces or special[pieces[-1][0]]:
                pieces.append([])
            pieces[-1].append(node)

        # The output counts as one more piece: its operands are kept to the end.
        last_use: dict[fx.Node, int] = {}
        for index, piece in enumerate([*pieces, [output]]):
            last_use.update(dict.fromkeys(inputs_of(piece), index))
        parts: list[tuple[Step | Segment, frozenset[fx.Node]]] = []
        for index, piece in enumerate(pieces):
            inputs = inputs_of(piece)
            known = frozenset([*inputs, *piece])
            # A result that nobody uses has no last use, and dies at once.
            dying = frozenset(node for node in known if last_use.get(node, index) <= index)
            needed = frozenset(piece) - dying
            part = special[piece[0]] or Segment(piece, inputs, needed, self._generates_code)
            parts.append((part, dying))

        return RankProgram(self._sharings, placeholders, constants, parts, output.args[0])

    def _make_step(self, node: fx.Node, gm: fx.GraphModule) -> Step | None:
        """Return the step of a node, None for a plain one."""
        check_callable(node, gm)
        if is_collective(node):
            # First, as it refuses operators that it does not know.
            collective = steps.collective_of(node)
            partition = self._graph.partitions[group_name(node)]
            return self._collective_step(node, partition, self._nets[partition], collective)

        graphs = graphs_called(gm, node)
        inside = chain.from_iterable(map(nodes_within, graphs))
        if node.op == "call_module" or any(map(is_collective, inside)):
            if node.op != "call_module" and node.target not in (steps.COND, steps.INVOKE_SUBGRAPH):
                raise NoModel(
                    f"{node.target} ({node.name}) calls a graph with a collective, which has a "
                    "model only in cond, invoke_subgraph and called modules: inline it"
                )
            return steps.NestedStep(node, {id(graph): self._compile(graph).run for graph in graphs})

        written, random = written_operands(node), draws(node, gm)
        if written or random:
            return steps.EffectStep(node, written, random)
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, as ranks do: CPU kernels split a sum by the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
