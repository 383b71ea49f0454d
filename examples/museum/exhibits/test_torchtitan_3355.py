"""A pass is left out of the pipeline, as a look at the graph came before the pass that helps it.

torchtitan#3355 (2026): whether a graph can be captured was asked when the pipeline was planned,
before its attention was compiled into an operator that can. So the capture was skipped without a
word. Here logcumsumexp stands for attention.
"""

import torch
from museum import exhibit
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import apply_graph_passes

aten = torch.ops.aten


def compile_regions(gm):
    """Replace what cannot be captured."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.logcumsumexp.default):
        with gm.graph.inserting_before(node):
            total = gm.graph.call_function(aten.exp.default, node.args[:1])
            total = gm.graph.call_function(aten.cumsum.default, (total, *node.args[1:]))
            node.replace_all_uses_with(gm.graph.call_function(aten.log.default, (total,)))
        gm.graph.erase_node(node)
    return gm


def capture(gm):
    """Copy inputs into static buffers, as a captured graph reads them."""
    for node in gm.graph.find_nodes(op="placeholder"):
        readers = list(node.users)
        with gm.graph.inserting_before(readers[0]):
            static = gm.graph.call_function(aten.clone.default, (node,))
        for reader in readers:
            reader.replace_input_with(node, static)
    return gm


def can_be_captured(gm):
    return not gm.graph.find_nodes(op="call_function", target=aten.logcumsumexp.default)


def plan(gm, bug):
    """List the passes; the fixed plan lets the capture look at the graph that it gets."""
    passes = [compile_regions]
    if not bug or can_be_captured(gm):
        passes.append(capture)
    return passes


@exhibit(
    "torchtitan#3355",
    2026,
    kind="compile",
    found_by="record",
    raises=ValueError,
    says="there is no pass 'capture' to require",
    usual="nobody: all values are equal",
)
def test_the_graph_is_captured(bug):
    gm = make_fx(lambda x: x.logcumsumexp(0) * 2)(torch.ones(4, 3))
    apply_graph_passes(gm, None, plan(gm, bug), require_changes=["capture"])
