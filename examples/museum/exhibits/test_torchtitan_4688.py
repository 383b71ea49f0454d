"""The backward recomputes a buffer, but not the write into it that has no result.

torchtitan#4688 (2026): a pass that rematerialises activations followed data, and an in-place
operator without a result has none. The gradient of (x + 1)^2 at 2 was 4 instead of 6; the graph
was valid and the loss right. Here a small pass of that kind recomputes one node for the backward.
"""

import copy

import torch
from museum import exhibit, usual
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import BitwiseDifference, assert_pass_bitwise

aten = torch.ops.aten


def step(x):
    """Return the loss, and its gradient as a backward computes it."""
    buffer = x.clone()
    torch._foreach_add_([buffer], 1.0)  # returns nothing
    loss = buffer.square().sum()
    return loss, buffer * 2


def recompute(gm, bug):
    """Compute the clone again for its reader in the backward."""
    gm = copy.deepcopy(gm)
    (kept,) = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    (gradient,) = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    region = [kept]
    if not bug:
        for user in kept.users:
            if user.target is aten._foreach_add_.Scalar:
                region.append(user)
    again = {}
    with gm.graph.inserting_before(gradient):
        for node in region:
            again[node] = gm.graph.node_copy(node, lambda source: again.get(source, source))
    gradient.replace_input_with(kept, again[kept])
    gm.recompile()
    return gm


BEFORE = make_fx(step)(torch.ones(3))
AFTER = {bug: recompute(BEFORE, bug) for bug in (False, True)}


@exhibit(
    "torchtitan#4688",
    2026,
    kind="aliasing",
    found_by="bits",
    raises=BitwiseDifference,
    says="clone_1 = aten.clone.default in the forward",
    usual=usual.of_functions(lambda bug, x: AFTER[bug](x), step, lambda: (torch.randn(3),)),
)
def test_what_is_recomputed_is_what_was_saved(bug):
    assert_pass_bitwise((BEFORE, AFTER[bug]))
