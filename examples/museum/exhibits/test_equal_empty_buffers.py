"""A pass that computes equal nodes once makes one buffer of two that are written to later.

Found by this project (2026) in its own rules: a pass that merged two ``empty_like`` was held to be
right, as both calls are equal and nothing in the inputs shows it. pytorch#170160 is a milder case
in torch's pass. Here gate and value of a layer are written into one scratch buffer.
"""

import copy

import torch
from museum import exhibit, usual
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import BitwiseDifference, assert_pass_bitwise

FRESH = (torch.ops.aten.empty_like.default, torch.ops.aten.empty.memory_format)


def layer(x):
    gate, value = torch.empty_like(x), torch.empty_like(x)
    gate.copy_(x.sin())
    value.copy_(x.sin() * x)
    return gate + value


def merge(gm, bug):
    """Compute equal nodes once; memory that nobody has written yet is no value."""
    gm = copy.deepcopy(gm)
    first = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or (node.target in FRESH and not bug):
            continue
        same = first.setdefault((node.target, node.args), node)
        if same is not node:
            node.replace_all_uses_with(same)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


BEFORE = make_fx(layer)(torch.ones(4, 8))
AFTER = {bug: merge(BEFORE, bug) for bug in (False, True)}


@exhibit(
    "found here: CSE",
    2026,
    kind="aliasing",
    found_by="bits",
    raises=BitwiseDifference,
    says="first node whose value differs: empty_like",
    usual=usual.of_functions(lambda bug, x: AFTER[bug](x), layer, lambda: (torch.randn(4, 8),)),
)
def test_buffers_stay_apart(bug):
    assert_pass_bitwise((BEFORE, AFTER[bug]))
