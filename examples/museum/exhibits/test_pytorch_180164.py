"""The gradient of what a slice_scatter keeps is zero, as a mask was folded into a constant.

pytorch#180164 (2026): the backward writes zeros into a part of the tangent, which is broadcast over
that dimension; the generated kernel took the test "is it in the part" for constant. The forward was
right. Rebuilt from the issue as a pass that folds such a write.
"""

import copy

import torch
from museum import exhibit, usual
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import AnotherFunction, assert_same_function

aten = torch.ops.aten


def with_gradients(x, y, tangent):
    """Return the result, and the gradients of x and y."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    result = torch.slice_scatter(x, y, dim=1, start=0, end=2).sum(1)
    return (result.detach(), *torch.autograd.grad(result, (x, y), tangent))


def fold(gm, bug):
    """Replace a write of zeros into the whole of a broadcast dimension by zeros."""
    gm = copy.deepcopy(gm)
    for write in gm.graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        into, values, dimension, start, end = write.args
        if into.target is not aten.expand.default or values.target is not aten.zeros.default:
            continue
        is_whole = start == 0 and end >= into.args[1][dimension]
        if bug or is_whole:
            with gm.graph.inserting_before(write):
                write.replace_all_uses_with(
                    gm.graph.call_function(aten.new_zeros.default, (into, into.args[1]))
                )
    gm.recompile()
    return gm


def inputs():
    return torch.randn(2, 5), torch.randn(2, 2), torch.randn(2)


BEFORE = make_fx(with_gradients)(*inputs())
AFTER = {bug: fold(BEFORE, bug) for bug in (False, True)}


@exhibit(
    "pytorch#180164",
    2026,
    kind="compile",
    found_by="proof",
    raises=AnotherFunction,
    says="first output 1: the actual one depends on no abstract input",
    usual=usual.of_functions(lambda bug, *args: AFTER[bug](*args), with_gradients, inputs),
)
def test_gradients_behind_the_fold(bug):
    assert_same_function(AFTER[bug], BEFORE)
