"""Gradient reductions of a joint graph: what becomes of a parameter's gradient once it is complete.

Where a parameter is gathered once however often it is read, as by FSDP2, autograd adds its gradient
contributions before the one reduction; chunking then leaves the reduction as it is. Where every
read gathers, every chunk of an eager run reduces for itself.
"""

from __future__ import annotations

from torch import fx

from pytest_gtrainer.conventions import BACKWARD, GATHERS_ONCE, direction
from pytest_gtrainer.passes._torch import ALL_REDUCE, REDUCE_SCATTER
from pytest_gtrainer.passes.chunking._torch import is_engine_addition
from pytest_gtrainer.passes.collectives import chain_to_output, only_wait

_REDUCTIONS = (REDUCE_SCATTER, ALL_REDUCE)


def gathers_once(graph: fx.Graph) -> bool:
    """Whether a parameter is gathered once however often it is read."""
    return bool(graph.output_node().meta.get(GATHERS_ONCE))


def gradient_reductions(graph: fx.Graph) -> set[fx.Node]:
    """The collectives of gradients: their result reaches the output by unary steps, or by another of them."""
    output = graph.output_node()
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target in _REDUCTIONS and direction(node) == BACKWARD:
            wait = only_wait(node)
            if wait is not None and (chain_to_output(wait, output) is not None or set(wait.users) & found):
                found.add(node)
    return found


def reduction_steps(graph: fx.Graph) -> set[fx.Node]:
    """All nodes of the gradients' reductions: casts and pads before the collective, and what is behind it.

    The steps before it were made by the backward of one gather, and so carry its ``seq_nr``.
    """
    steps: set[fx.Node] = set()
    for launch in gradient_reductions(graph):
        todo = [launch]
        while todo:
            node = todo.pop()
            if node not in steps:
                steps.add(node)
                todo += [source for source in node.all_input_nodes if _is_of_the_same_gather(source, launch)]
    for node in graph.nodes:
        if node.op == "call_function" and not steps.isdisjoint(node.all_input_nodes):
            steps.add(node)
    return steps


def _is_of_the_same_gather(node: fx.Node, launch: fx.Node) -> bool:
    number = launch.meta.get("seq_nr")
    same = direction(node) == BACKWARD and number is not None and node.meta.get("seq_nr") == number
    return same and not is_engine_addition(node)
