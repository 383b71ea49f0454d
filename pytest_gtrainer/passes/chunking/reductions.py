"""Gradient reductions of a joint graph: what becomes of a parameter's gradient once it is complete.

Where a parameter is gathered once however often it is read, as by FSDP2, autograd adds its gradient
contributions before the one reduction; chunking then leaves the reduction as it is. Where every
read gathers, every chunk of an eager run reduces for itself; early accumulation adds before it (J1).
"""

from __future__ import annotations

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import is_engine_addition
from pytest_gtrainer._torch.passes import ALL_REDUCE, REDUCE_SCATTER
from pytest_gtrainer.graph.collectives import chain_to_output, only_wait
from pytest_gtrainer.graph.conventions import BACKWARD, GATHERS_ONCE, direction

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


def reduction_steps(graph: fx.Graph, *, up_to_casts: bool = False) -> set[fx.Node]:
    """All nodes of the gradients' reductions: casts and pads before the collective, and what is behind it.

    The steps before it were made by the backward of one gather, and so carry its ``seq_nr``.

    Args:
        up_to_casts: only what a sum of gradients may move in front of: no cast to another dtype or device, and
            no reduction with such a cast behind it (J2).
    """
    steps: set[fx.Node] = set()
    for launch in gradient_reductions(graph):
        behind = _behind(launch)
        if up_to_casts and any(_casts(node) for node in behind):
            continue
        steps.update(behind)
        todo = [launch]
        while todo:
            node = todo.pop()
            steps.add(node)
            before = [source for source in node.all_input_nodes if _is_of_the_same_gather(source, launch)]
            todo += [source for source in before if source not in steps and not (up_to_casts and _casts(source))]
    return steps


def _behind(launch: fx.Node) -> list[fx.Node]:
    """What becomes of the result, up to the output or to autograd's addition of another gradient."""
    found: list[fx.Node] = []
    todo = list(launch.users)
    while todo:
        node = todo.pop()
        if node.op == "call_function" and not is_engine_addition(node):
            found.append(node)
            todo += node.users
    return found


def _casts(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    value, given = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return (value.dtype, value.device) != (given.dtype, given.device)


def _is_of_the_same_gather(node: fx.Node, launch: fx.Node) -> bool:
    number = launch.meta.get("seq_nr")
    same = direction(node) == BACKWARD and number is not None and node.meta.get("seq_nr") == number
    return same and not is_engine_addition(node)
