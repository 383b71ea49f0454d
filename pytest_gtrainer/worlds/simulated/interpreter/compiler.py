"""From a graph to a program: segments of plain nodes, and steps for all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby

from torch import fx

from pytest_gtrainer._torch.operators import schema
from pytest_gtrainer.graph.nodes import is_collective, written_operands
from pytest_gtrainer.worlds.simulated.interpreter.binding import binder, named_arguments
from pytest_gtrainer.worlds.simulated.interpreter.blocks import Segment
from pytest_gtrainer.worlds.simulated.interpreter.collective_calls import (
    handler_of,
    is_reduction,
    passes_through,
    written_argument,
)
from pytest_gtrainer.worlds.simulated.interpreter.groups import Partition, RankGraph, group_name
from pytest_gtrainer.worlds.simulated.interpreter.lifetimes import Lifetimes
from pytest_gtrainer.worlds.simulated.interpreter.nested import NestedStep, check_nested
from pytest_gtrainer.worlds.simulated.interpreter.operators import (
    attribute,
    check_callable,
    draws,
    graphs_called,
    has_collectives,
)
from pytest_gtrainer.worlds.simulated.interpreter.program import Part, Plain, Program, Single
from pytest_gtrainer.worlds.simulated.interpreter.steps import CollectiveStep, ConstantStep, EffectStep, Step
from pytest_gtrainer.worlds.simulated.interpreter.values import Kinds
from pytest_gtrainer.worlds.simulated.net import Net

Piece = Sequence[fx.Node]


def compiled(graph: RankGraph, net: Net) -> Program:
    """The program of a graph.

    Raises:
        NoModel: the graph has an operator that a simulated world does not model.
    """
    return _Compiler(graph, net).program(graph.gm)


class _Compiler:
    """Makes programs of a graph and of those in it; ``_nets`` are those of the groups of a partition."""

    def __init__(self, graph: RankGraph, net: Net) -> None:
        self._kinds = Kinds(graph.size)
        self._partitions = graph.partitions
        self._nets = {part: [net.for_group(ranks) for ranks in part] for part in set(graph.partitions.values())}

    def program(self, gm: fx.GraphModule) -> Program:
        nodes = [node for node in gm.graph.nodes if _is_computed(node)]
        steps = {node: self._step(node, gm) for node in nodes}
        pieces = _pieces(nodes, steps)
        lifetimes = Lifetimes(gm.graph, pieces)
        parts = [self._part(index, pieces, steps, lifetimes) for index in range(len(pieces))]
        return Program(self._kinds, gm.graph.find_nodes(op="placeholder"), parts, gm.graph.output_node().args[0])

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
        return Plain(Segment(pieces[index], needed, dying, reduced))

    def _step(self, node: fx.Node, gm: fx.GraphModule) -> Step | None:
        """None for a plain node."""
        if node.op == "get_attr":
            return ConstantStep(attribute(gm, str(node.target)))
        check_callable(node, gm)
        if is_collective(node):
            return self._collective(node)
        graphs = list(graphs_called(node, gm))
        if node.op == "call_module" or any(map(has_collectives, graphs)):
            check_nested(node)
            target = graphs[0] if node.op == "call_module" else node.target
            return NestedStep(target, node.all_input_nodes, binder(node), {id(g): self.program(g) for g in graphs})
        written, random = written_operands(node), draws(node, gm)
        if not written and not random:
            return None
        assert callable(node.target)
        return EffectStep(node.target, node.all_input_nodes, binder(node), written, random)

    def _collective(self, node: fx.Node) -> CollectiveStep:
        handler = handler_of(node)  # first: it refuses what is no collective that we know
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
            handler,
            (argument, written) if argument is not None else None,
        )

    def _partition(self, node: fx.Node) -> Partition:
        return self._partitions[group_name(node)]


def _pieces(nodes: Sequence[fx.Node], steps: Mapping[fx.Node, Step | None]) -> list[Piece]:
    """Runs of plain nodes, and every other node by itself."""
    pieces: list[Piece] = []
    for plain, run in groupby(nodes, key=lambda node: steps[node] is None):
        piece = list(run)
        pieces += [piece] if plain else [[node] for node in piece]
    return pieces


def _is_computed(node: fx.Node) -> bool:
    """Inputs and outputs are not, and a wait has the value of what it waits for."""
    return node.op not in ("placeholder", "output") and not passes_through(node)
