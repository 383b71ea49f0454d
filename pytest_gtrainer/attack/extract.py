"""Cut a graph: keep some of its nodes, with new inputs in place of what they read besides."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer.graph.nodes import input_fqn

_SPACES = ("placeholder", "get_attr", "output")
Named = dict[str, fx.Node]
"""Results of a graph by the name that its text gives them."""


def computed(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that compute something, in the order of the graph."""
    return [node for node in gm.graph.nodes if node.op not in _SPACES]


def results_of(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that a graph returns, each once, in order."""
    return list(gm.graph.output_node().all_input_nodes)


def extract(
    gm: fx.GraphModule,
    kept: Collection[fx.Node],
    results: Collection[fx.Node] | None = None,
) -> fx.GraphModule:
    """Return a graph of these nodes alone.

    What they read of other nodes becomes an input. A value that is no tensor or number, such as the
    tuple of a split, cannot be one, so its node is kept, too.

    Args:
        gm: stays as it is.
        kept: nodes of ``computed(gm)``.
        results: what the new graph returns; by default each kept value that ``gm`` returns, that
            another node reads, or that nobody reads.

    Returns:
        A graph whose inputs are those of ``gm`` that it still reads, then the new ones.
    """
    wanted = _with_tuples(kept)
    if results is None:
        # All that somebody sees, so that the mistake stays visible wherever it is.
        results = _visible(gm, wanted)
    graph = fx.Graph()
    copies: Named = {}
    read = {each for node in wanted for each in node.all_input_nodes}
    read.update(results)
    names: set[str] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        names.update((input_fqn(node), str(node.target)))
    # Inputs first: those that stay, in their order, then the new ones.
    for node in gm.graph.nodes:
        if node in read and node.op == "placeholder":
            copies[node.name] = graph.node_copy(node)
    for node in gm.graph.nodes:
        if node in read and node not in wanted and node.op not in _SPACES:
            copies[node.name] = _new_input(graph, node, names)
    for node in gm.graph.nodes:
        if node in wanted or (node in read and node.op == "get_attr"):
            copies[node.name] = graph.node_copy(node, lambda each: copies[each.name])
    returned = [copies[node.name] for node in gm.graph.nodes if node in results]
    graph.output(tuple(returned))
    return fx.GraphModule(gm, graph)


def without_dead_code(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove what no result needs, and inputs that nobody reads, in place."""
    gm.graph.eliminate_dead_code()
    for node in gm.graph.find_nodes(op="placeholder"):
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _with_tuples(kept: Collection[fx.Node]) -> set[fx.Node]:
    """Add the nodes whose values can be no inputs, with what these need."""
    wanted, waiting = set(kept), list(kept)
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand.op in _SPACES or operand in wanted or can_be_input(operand):
                continue
            wanted.add(operand)
            waiting.append(operand)
    return wanted


def can_be_input(node: fx.Node) -> bool:
    """Return whether a graph could get the value of this node as an input."""
    return isinstance(node.meta.get("val"), Tensor | torch.SymInt | torch.SymFloat | int | float)


def _visible(gm: fx.GraphModule, wanted: Collection[fx.Node]) -> set[fx.Node]:
    """Return the kept values that somebody else sees, or nobody at all."""
    visible = set()
    returned = set(results_of(gm))
    for node in wanted:
        outside = any(user not in wanted for user in node.users)
        if can_be_input(node) and (node in returned or outside or not node.users):
            visible.add(node)
    return visible


def _new_input(graph: fx.Graph, node: fx.Node, names: set[str]) -> fx.Node:
    """Make an input that stands for the value of a node."""
    name, count = node.name, 1
    while name in names:
        name, count = f"{node.name}_{count}", count + 1
    names.add(name)
    made = graph.placeholder(name)
    made.meta = {"val": node.meta["val"], "gt_input": {"kind": "input", "fqn": name}}
    return made


def inputs_of(gm: fx.GraphModule) -> Sequence[Any]:
    """Return the traced values of a graph's inputs, which passes get as ``example_inputs``."""
    return [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
