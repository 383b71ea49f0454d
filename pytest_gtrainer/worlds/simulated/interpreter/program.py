"""Programs: a graph compiled once to segments of plain nodes and single steps, and run on all ranks.

A *segment* is a run of plain operators between two steps, replayed rank by rank as one generated function: what a rank
needs only inside is gone before the next allocates. Its nodes are sorted into *blocks* by kind: what all ranks share
runs once, what a group shares once a group.

Invariant: nothing in a block draws random numbers, writes to its operands or communicates: the order of ranks is free.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer.graph.nodes import graphs_called, is_collective, written_operands
from pytest_gtrainer.graph.same_on_ranks import Partition, described, input_name, nodes_within
from pytest_gtrainer.worlds.simulated import DependsOnRank, NoModel
from pytest_gtrainer.worlds.simulated.interpreter import graph as rank_graph
from pytest_gtrainer.worlds.simulated.interpreter import steps
from pytest_gtrainer.worlds.simulated.interpreter.steps import Frame, Step
from pytest_gtrainer.worlds.simulated.interpreter.values import (
    Kind,
    Kinds,
    PerRank,
    RankRandomStates,
    at,
)
from pytest_gtrainer.worlds.simulated.net import Net


@dataclass(frozen=True, slots=True)
class OperatorBlock:
    """Nodes of one kind, as one function from the values of ``inputs`` to those of ``outputs``."""

    kind: Kind
    graph: fx.GraphModule
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    dying: frozenset[fx.Node]

    def run(self, frame: Frame) -> None:
        given = [frame.values[node] for node in self.inputs]
        dying = [frame.values[node] for node in self.dying if type(frame.values[node]) is PerRank]
        results: list[list[Any]] = [[None] * frame.kinds.size for _ in self.outputs]
        for ranks in self.kind.classes:
            own = self._call([at(value, ranks[0]) for value in given], ranks[0])
            for result, of_ranks in zip(own, results, strict=True):
                for rank in ranks:
                    of_ranks[rank] = result
            for value in dying:
                for rank in ranks:
                    value[rank] = None
        for node, result in zip(self.outputs, results, strict=True):
            frame.values[node] = (
                result[0] if self.kind is frame.kinds.uniform else PerRank(result, self.kind)
            )

    def _call(self, own: list[Any], rank: int) -> Sequence[Any]:
        try:
            return self.graph.forward(*own)
        except Exception as error:
            single = fx.Interpreter(
                self.graph, garbage_collect_values=False
            )  # nothing here has effects
            with suppress(Exception):
                single.run(*own)
            *_, failed = list(self.graph.graph.nodes)[: len(single.env) + 1]
            error.add_note(f"in {described(failed)}, for rank {rank}")
            raise


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes before these that they use, each once."""
    own = set(nodes)
    used = (rank_graph.source_of(given) for node in nodes for given in node.all_input_nodes)
    return list(dict.fromkeys(given for given in used if given not in own))


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of plain nodes in a graph."""

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]  # nodes before it that it uses
    needed: frozenset[fx.Node]  # nodes of it that are used behind it
    plans: dict[tuple[Kind, ...], list[OperatorBlock]] = field(
        default_factory=dict
    )  # by the kinds of its inputs

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> None:
        kinds = tuple(map(frame.kinds.of, frame.of(self.inputs)))
        if kinds not in self.plans:
            self.plans[kinds] = self._blocks(
                dict(zip(self.inputs, kinds, strict=True)), frame.kinds, dying
            )
        for block in self.plans[kinds]:
            block.run(frame)

    def _blocks(
        self, kind_of: dict[fx.Node, Kind], kinds: Kinds, dying: frozenset[fx.Node]
    ) -> list[OperatorBlock]:
        """Coarser kinds first: they use nothing of finer ones. Made from the last to the first."""
        by_kind: dict[Kind, list[fx.Node]] = {}
        for node in self.nodes:
            kind_of[node] = kinds.common(
                kind_of[rank_graph.source_of(given)] for given in node.all_input_nodes
            )
            by_kind.setdefault(kind_of[node], []).append(node)
        blocks: list[OperatorBlock] = []
        used_later: set[fx.Node] = set()
        for kind, nodes in sorted(
            by_kind.items(), key=lambda part: len(part[0].classes), reverse=True
        ):
            inputs = inputs_of(nodes)
            outputs = [node for node in nodes if node in self.needed or node in used_later]
            graph = fx.Graph()
            copies = {node: graph.placeholder(node.name) for node in inputs}
            for node in nodes:
                copies[node] = graph.node_copy(
                    node,
                    lambda given, copies=copies: copies[rank_graph.source_of(given)],
                )
            graph.output(tuple(copies[node] for node in outputs))
            module = fx.GraphModule(torch.nn.Module(), graph)
            ending = frozenset(node for node in inputs if node in dying and node not in used_later)
            blocks.append(OperatorBlock(kind, module, inputs, outputs, ending))
            used_later.update(inputs)
        return blocks[::-1]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The parts of a graph, in its order, each with the nodes whose values nobody needs after it."""

    kinds: Kinds
    placeholders: Sequence[fx.Node]
    constants: Mapping[fx.Node, Any]
    parts: Sequence[tuple[Step | Segment, frozenset[fx.Node]]]
    output: Any

    def run(self, inputs: Sequence[Any], random: RankRandomStates) -> Any:
        """What the graph returns for these inputs, both uniform or per rank, in the structure of its output."""
        names = [input_name(node) for node in self.placeholders]
        self._check_inputs(names, inputs)
        own = [
            self.kinds.value(list(value)) if type(value) is PerRank else value for value in inputs
        ]  # may be emptied
        values = {**self.constants, **dict(zip(self.placeholders, own, strict=True))}
        frame = Frame(self.kinds, random, values, list(zip(names, inputs, strict=True)))
        for part, dying in self.parts:
            part.run(frame, dying)
            for node in dying:
                values.pop(node, None)
        return fx.node.map_arg(self.output, lambda node: values[rank_graph.source_of(node)])

    def _check_inputs(self, names: Sequence[str], inputs: Sequence[Any]) -> None:
        """Refuse inputs of other shapes or dtypes than those that the graph was traced with, which it has baked in."""
        size = self.kinds.size
        if len(inputs) != len(names):
            raise ValueError(f"the graph takes {len(names)} inputs, it got {len(inputs)}")
        for node, name, value in zip(self.placeholders, names, inputs, strict=True):
            if type(value) is PerRank and len(value) != size:
                raise ValueError(f"{name} is given for {len(value)} ranks, the world has {size}")
            traced = node.meta.get("val")
            if not isinstance(traced, Tensor) or not all(
                isinstance(extent, int) for extent in traced.shape
            ):
                continue
            for rank in range(size) if type(value) is PerRank else (0,):
                given = at(value, rank)
                if (
                    not isinstance(given, Tensor)
                    or given.shape != traced.shape
                    or given.dtype != traced.dtype
                ):
                    found = (
                        f"{given.dtype}{list(given.shape)}"
                        if isinstance(given, Tensor)
                        else type(given).__name__
                    )
                    raise DependsOnRank(
                        f"{name} of rank {rank} is {found}, the graph was traced with {traced.dtype}"
                        f"{list(traced.shape)}: one graph serves ranks with equal shapes only, so choose sizes that "
                        "the ranks divide"
                    )


class Interpreter:
    """A graph for all ranks of a world, see ``check_same_on_all``; NoModel names an operator that it lacks."""

    def __init__(
        self, graph: rank_graph.RankGraph, net: Net, *, random: RankRandomStates | None = None
    ) -> None:
        if net.size != graph.size:
            raise ValueError(
                f"the net connects {net.size} ranks, the graph was traced for {graph.size}"
            )
        self.random = random or RankRandomStates()
        self._graph, self._net = graph, net
        self._kinds = Kinds(graph.size)
        self._nets = {
            part: [net.for_group(ranks) for ranks in part]
            for part in set(graph.partitions.values())
        }
        self._program = self._compile(graph.gm)

    def run(self, inputs: Sequence[Any]) -> Any:
        """Outputs as the graph returns them, uniform or ``PerRank`` as inputs are. Buffers are written to.
        CollectiveMismatch if ranks differ in sizes or splits, DependsOnRank if an input is not what was traced."""
        # on one thread, as ranks: some kernels' bits depend on the number
        facts.notify(
            "replay_on_all", graph=self._graph, net=self._net, inputs=inputs, random=self.random
        )
        with torch.no_grad(), torch.random.fork_rng(devices=[]), one_thread():
            return self._program.run(inputs, self.random)

    def _compile(self, gm: fx.GraphModule) -> RankProgram:
        output, placeholders = gm.graph.output_node(), gm.graph.find_nodes(op="placeholder")
        constants = {
            node: attrgetter(str(node.target))(gm) for node in gm.graph.find_nodes(op="get_attr")
        }
        computed = [
            node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")
        ]
        nodes = [
            node for node in computed if not rank_graph.passes_through(node)
        ]  # a wait has the awaited value
        special = {node: self._step(node, gm) for node in nodes}
        pieces: list[list[fx.Node]] = []  # runs of plain nodes, and every other node by itself
        for plain, run in groupby(nodes, key=lambda node: special[node] is None):
            piece = list(run)
            pieces += [piece] if plain else [[node] for node in piece]
        # the pieces that use each value; the output counts as one more
        users: dict[fx.Node, set[int]] = {
            node: set() for node in [*placeholders, *constants, *nodes]
        }
        for index, piece in enumerate([*pieces, [output]]):
            for given in chain.from_iterable(node.all_input_nodes for node in piece):
                users[rank_graph.source_of(given)].add(index)
        parts: list[tuple[Step | Segment, frozenset[fx.Node]]] = []
        for index, piece in enumerate(pieces):
            inputs = inputs_of(piece)
            dying = frozenset(
                node for node in [*inputs, *piece] if max(users[node], default=index) <= index
            )
            parts.append(
                (special[piece[0]] or Segment(piece, inputs, frozenset(piece) - dying), dying)
            )
        return RankProgram(self._kinds, placeholders, constants, parts, output.args[0])

    def _step(self, node: fx.Node, gm: fx.GraphModule) -> Step | None:
        """None for a plain node."""
        rank_graph.check_callable(node, gm)
        if is_collective(node):
            carried_out = steps.collective_of(node)  # first: it refuses what we do not know
            partition = self._partition(node)
            return steps.CollectiveStep(node, partition, self._nets[partition], carried_out)
        graphs = graphs_called(gm, node)
        inside = chain.from_iterable(map(nodes_within, graphs))
        if node.op == "call_module" or any(map(is_collective, inside)):
            if node.op != "call_module" and node.target not in (steps.COND, steps.INVOKE_SUBGRAPH):
                wrong = f"{node.target} ({node.name}) calls a graph with a collective"
                raise NoModel(
                    f"{wrong}, which has a model only in cond, invoke_subgraph and called modules: inline it"
                )
            return steps.NestedStep(node, {id(graph): self._compile(graph).run for graph in graphs})
        written, random = written_operands(node), rank_graph.draws(node, gm)
        return steps.EffectStep(node, written, random) if written or random else None

    def _partition(self, node: fx.Node) -> Partition:
        return self._graph.partitions[rank_graph.group_name(node)]


@contextmanager
def one_thread() -> Iterator[None]:
    """As ranks compute: on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
