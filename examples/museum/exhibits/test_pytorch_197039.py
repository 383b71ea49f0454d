"""The backward recomputes a value from a parameter that has been updated in between.

pytorch#197039 (2026): the partitioner recomputed reads of tensors that the forward mutates, and the
backward saw the new contents: wrong gradients without a word. The same holds for torch's pass that
recomputes by tags, which this project's rules for a pass found. The fixed pass saves such a read.
"""

import copy

import torch
from museum import exhibit, usual
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import AnotherFunction, assert_same_function

aten = torch.ops.aten


def step(weight, x):
    """Return the loss and the gradient of x; the weight is updated before the backward reads."""
    slope, factor = weight.cos(), x.exp()
    loss = (slope.sin() * factor).sum()
    weight.mul_(0.5)
    return loss, slope * factor


def recompute(gm, bug):
    """Compute what the backward multiplies again, from the inputs of the step."""
    gm = copy.deepcopy(gm)
    *_, gradient = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    for saved in list(gradient.args):
        (source,) = saved.all_input_nodes
        is_written = any(user.target is aten.mul_.Tensor for user in source.users)
        if bug or not is_written:
            with gm.graph.inserting_before(gradient):
                again = gm.graph.node_copy(saved)
            gradient.replace_input_with(saved, again)
    gm.recompile()
    return gm


def inputs():
    return torch.randn(3), torch.randn(3)


BEFORE = make_fx(step)(*inputs())
AFTER = {bug: recompute(BEFORE, bug) for bug in (False, True)}


@exhibit(
    "pytorch#197039",
    2026,
    kind="aliasing",
    found_by="proof",
    raises=AnotherFunction,
    says="begins at node cos_1 (aten.cos.default)",
    usual=usual.of_functions(lambda bug, *args: AFTER[bug](*args), step, inputs),
)
def test_a_read_before_an_update_is_not_repeated(bug):
    assert_same_function(AFTER[bug], BEFORE, inputs=inputs())
