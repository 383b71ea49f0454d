"""Prove two large graphs identical by running only what they do not share.

Two calls of one operator on equal arguments have equal values. So each node gets a number before
anything runs, and equal calls in both graphs get the same number. Results with the same number are
equal. For other results, walk back through both graphs in step, as long as both call the same
operator with the same settings. The first pair of calls that differ is where they part. There a
part of each graph runs, whose inputs are the values that both graphs have in common. These inputs
are abstract, so what is proven of the parts holds in the whole graphs.

This proves "identical" or nothing. The whole graphs have to run if it proves nothing, or if a graph
writes to memory, draws random numbers, or contains modules. Cost: a few microseconds a node.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import OpOverload
from pytest_gtrainer.arithmetic.operators import UNINITIALISED, base_name
from pytest_gtrainer.graph.collectives import launches
from pytest_gtrainer.graph.nodes import is_random, mutates, value_of
from pytest_gtrainer.proofs.proof import Proof

FEWEST_NODES = 2000
"""Smaller graphs run as they are, in a second, and say more of what they take for granted."""

_LARGEST_PART = 0.25  # of all nodes: to run more takes as long as to run the whole graph
_LITERALS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _HasToRun(Exception):
    """The whole graph has to run: a node does something that its arguments do not determine."""


class _Call(NamedTuple):
    """The call of a node, apart from the values that it is given.

    Attributes:
        settings: a number for the operator and all its arguments, with ``fx.Node`` in place of each
            operand.
    """

    settings: int
    operands: list[fx.Node]


@dataclass(slots=True)
class _Numbered:
    """A graph whose nodes have numbers.

    Attributes:
        numbers: equal for equal calls, also of another graph that has the same ``table``.
        abstract: nodes that depend on a floating-point input by way of floating-point values.
    """

    gm: fx.GraphModule
    calls: dict[fx.Node, _Call] = field(default_factory=dict)
    numbers: dict[fx.Node, int] = field(default_factory=dict)
    abstract: set[fx.Node] = field(default_factory=set)

    @property
    def output(self) -> fx.Node:
        return self.gm.graph.output_node()

    @property
    def results(self) -> list[fx.Node]:
        return self.output.all_input_nodes


def prove_by_structure(
    graphs: Sequence[fx.GraphModule], prove_parts: Callable[[Sequence[fx.GraphModule]], Proof]
) -> Proof | None:
    """Return a proof that two graphs are identical, or None: then they have to run.

    Args:
        prove_parts: proves two graphs, which take floating-point tensors, to be identical.
    """
    takes = {len(gm.graph.find_nodes(op="placeholder")) for gm in graphs}
    names = {str(gm.graph.output_node().meta.get("gt_outputs")) for gm in graphs}
    if len(takes) > 1 or len(names) > 1 or min(len(gm.graph.nodes) for gm in graphs) < FEWEST_NODES:
        return None
    table: dict[Any, int] = {}
    try:
        sides = [_number(gm, table) for gm in graphs]
        if not all(_has_abstract_result(side) for side in sides):
            return None
        pairs = list(_pairs_that_part(*sides))
        if not pairs:
            return Proof("identical")
        shared = set(sides[0].numbers.values()) & set(sides[1].numbers.values())
        parts = []
        for place, side in enumerate(sides):
            parts.append(_Part(side, [pair[place] for pair in pairs], shared))
        if any(len(part.nodes) > _LARGEST_PART * len(part.side.numbers) for part in parts):
            return None
        inputs = parts[0].inputs | parts[1].inputs
        proof = prove_parts([part.as_graph(inputs) for part in parts])
    except (_HasToRun, ValueError):  # an input that nobody can make up
        return None
    return proof if proof.kind == "identical" else None


def _number(gm: fx.GraphModule, table: dict[Any, int]) -> _Numbered:
    """Give every node a number: equal calls have one number in ``table``."""
    side = _Numbered(gm)
    inputs = 0
    for node in gm.graph.nodes:
        call = side.calls[node] = _call(node, table)
        key: Any = (call.settings, *[side.numbers[operand] for operand in call.operands])
        if node.op == "placeholder":
            key, inputs = ("input", inputs), inputs + 1
        elif node.op != "output" and not _is_function(node):
            raise _HasToRun
        elif _is_unwritten(node):
            key = object()  # memory that nobody has written equals no other
        side.numbers[node] = table.setdefault(key, len(table))
        reads_abstract = any(operand in side.abstract for operand in call.operands)
        if _is_float(node) and (reads_abstract or node.op == "placeholder"):
            side.abstract.add(node)
        elif reads_abstract and not isinstance(value_of(node), Tensor):
            side.abstract.add(node)  # several results
    return side


def _call(node: fx.Node, table: dict[Any, int]) -> _Call:
    operands: list[fx.Node] = []

    def setting(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            operands.append(argument)
            return fx.Node
        if isinstance(argument, list | tuple):
            return (type(argument), *map(setting, argument))
        if argument is None or isinstance(argument, _LITERALS):
            return (type(argument), repr(argument))  # -0.0 equals 0.0, and 1 equals True
        raise _HasToRun

    arguments = setting(node.args)
    keywords = [(name, setting(node.kwargs[name])) for name in sorted(node.kwargs)]
    settings = (node.op, node.target, arguments, *keywords)
    return _Call(table.setdefault(settings, len(table)), operands)


def _is_function(node: fx.Node) -> bool:
    """Return whether a node computes its value from its arguments, and does nothing else."""
    if node.op != "call_function":
        return False
    if node.target == operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and not (mutates(node) or is_random(node))


def _is_unwritten(node: fx.Node) -> bool:
    """Return whether a node returns memory that nobody has written."""
    return isinstance(node.target, OpOverload) and base_name(node.target) in UNINITIALISED


def _is_float(node: fx.Node) -> bool:
    value = value_of(node)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    count = value.numel()
    if not isinstance(count, int):
        raise _HasToRun  # a symbolic size
    return count > 0


def _has_abstract_result(side: _Numbered) -> bool:
    return any(_is_float(node) and node in side.abstract for node in side.results)


def _pairs_that_part(actual: _Numbered, expected: _Numbered) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the pairs of values that have to be equal, so that all results are."""
    todo = [(actual.output, expected.output)]
    seen = set(todo)
    while todo:
        first, second = todo.pop()
        if actual.numbers[first] == expected.numbers[second]:
            continue
        calls = actual.calls[first], expected.calls[second]
        is_one_call = calls[0].settings == calls[1].settings
        if is_one_call and first.op != "placeholder" and not _is_unwritten(first):
            for pair in zip(calls[0].operands, calls[1].operands, strict=True):
                if pair not in seen:
                    seen.add(pair)
                    todo.append(pair)
        elif first.op == "output":
            raise _HasToRun
        else:
            yield first, second


class _Part:
    """The nodes of one graph that compute ``results`` from values that both graphs have."""

    def __init__(self, side: _Numbered, results: Sequence[fx.Node], shared: set[int]) -> None:
        self.side, self.results = side, results
        self.nodes: set[fx.Node] = set()
        self.inputs: dict[int, Tensor] = {}
        todo = list(results)
        while todo:
            node = todo.pop()
            number = side.numbers[node]
            # What is launched stays with its wait, and constants with what reads them.
            may_be_input = _is_float(node) and node in side.abstract and not launches(node.target)
            if number in shared and may_be_input:
                self.inputs[number] = value_of(node)
            elif node.op == "placeholder" or not isinstance(value_of(node), Tensor | list | tuple):
                raise _HasToRun  # whole numbers, or those that it reads, stay what they are
            elif node not in self.nodes:
                self.nodes.add(node)
                todo += node.all_input_nodes

    def as_graph(self, inputs: dict[int, Tensor]) -> fx.GraphModule:
        """Return the part as a graph of these inputs."""
        graph = fx.Graph()
        made: dict[int, fx.Node] = {}
        for number in sorted(inputs):
            made[number] = graph.placeholder(f"value_{number}")
            made[number].meta["val"] = inputs[number]
        numbers = self.side.numbers
        for node in self.side.gm.graph.nodes:
            if node in self.nodes:
                copied = graph.node_copy(node, lambda each: made[numbers[each]])
                made[numbers[node]] = copied
        graph.output(tuple(made[numbers[node]] for node in self.results))
        return fx.GraphModule(torch.nn.Module(), graph)
