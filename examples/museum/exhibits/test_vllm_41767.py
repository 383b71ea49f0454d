"""A fused operator adds a residual that is not there: memory that nobody wrote.

vllm#41767 (2026): the fused norm always adds a residual, and where a model has none the pass gave
it ``empty_like``. Outputs were wrong whenever that memory was not zero by chance. Here the pass
puts the addition in front of the norm, with zeros in the fixed version.
"""

import copy

import torch
from museum import exhibit
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import AnotherFunction, assert_same_function

aten = torch.ops.aten


def norm(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def fuse(gm, bug):
    """Give the norm the residual that the fused operator asks for."""
    gm = copy.deepcopy(gm)
    (x,) = gm.graph.find_nodes(op="placeholder")
    fill = aten.empty_like.default if bug else aten.zeros_like.default
    readers = list(x.users)
    with gm.graph.inserting_before(readers[0]):
        residual = gm.graph.call_function(fill, (x,))
        total = gm.graph.call_function(aten.add.Tensor, (x, residual))
    for reader in readers:
        reader.replace_input_with(x, total)
    gm.recompile()
    return gm


@exhibit(
    "vllm#41767",
    2026,
    kind="compile",
    found_by="proof",
    raises=AnotherFunction,
    says="begins at node add_tensor (aten.add.Tensor)",
    usual="by chance: fresh memory often holds zeros",
)
def test_the_residual_is_zero(bug):
    before = make_fx(norm)(torch.ones(2, 8))
    assert_same_function(fuse(before, bug), before)
