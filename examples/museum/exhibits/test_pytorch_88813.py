"""Two results of a compiled function are one tensor, so a write to one changes the other.

pytorch#88813 (2022): Inductor computed a * 2 once for both results of a function and returned the
tensor twice. All values were right when they were compared. Here a small pass merges equal nodes;
the fixed one leaves results alone.
"""

import copy

import torch
from museum import exhibit, usual
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import BitwiseDifference, assert_pass_bitwise


def twice(a):
    return a * 2, a * 2, (a * 2).sin() + (a * 2).cos()


def merge(gm, bug):
    """Compute equal nodes once, but give each result a tensor of its own."""
    gm = copy.deepcopy(gm)
    results = gm.graph.output_node().all_input_nodes
    first = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        same = first.setdefault((node.target, node.args), node)
        if same is not node and (bug or node not in results):
            node.replace_all_uses_with(same)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


BEFORE = make_fx(twice)(torch.ones(4))
AFTER = {bug: merge(BEFORE, bug) for bug in (False, True)}


@exhibit(
    "pytorch#88813",
    2022,
    kind="aliasing",
    found_by="bits",
    raises=BitwiseDifference,
    says="output 1 lies in the memory of output 0: a write to one changes the other",
    usual=usual.of_functions(lambda bug, a: AFTER[bug](a), twice, lambda: (torch.randn(4),)),
)
def test_results_are_tensors_of_their_own(bug):
    assert_pass_bitwise((BEFORE, AFTER[bug]))
