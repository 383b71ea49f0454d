"""Two gathers of a parameter become one, though an optimiser updates it between them.

Found by this project (2026) in torchtitan's pass that drops repeated gathers, and latent there, as
no step of today writes between two of them. Rebuilt from its rule, equal operands and group: here
a graph holds two steps, and the second reads the weights of the first.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import AnotherFunction, assert_same_function

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
UPDATE = torch.ops.aten._foreach_mul_.Scalar


def two_steps(weight, x):
    x = x @ collectives.all_gather_single(weight, 0, dist.group.WORLD)
    torch._foreach_mul_([weight], 0.5)
    return x @ collectives.all_gather_single(weight, 0, dist.group.WORLD) + x


def deduplicate(gm, bug):
    """Gather a parameter once until it is written to."""
    gm = copy.deepcopy(gm)
    first = {}
    for node in list(gm.graph.nodes):
        if node.target is UPDATE and not bug:
            first.clear()
        if node.target is GATHER:
            same = first.setdefault(node.args, node)
            if same is not node:
                node.replace_all_uses_with(same)
                gm.graph.erase_node(node)
    gm.recompile()
    return gm


def traced():
    return make_fx(two_steps, tracing_mode="fake")(torch.ones(2, 4), torch.ones(3, 4))


def numbers(rank):
    torch.manual_seed(rank)
    return torch.randn(2, 4), torch.randn(3, 4)


def on_two_ranks(bug):
    actual = deduplicate(traced(), bug)(*numbers(dist.get_rank()))
    return usual.Sides({"result": actual}, {"result": traced()(*numbers(dist.get_rank()))})


@exhibit(
    "torchtitan, repeated gathers",
    2026,
    kind="aliasing",
    found_by="proof",
    raises=AnotherFunction,
    says="first output_0, rank 0",
    usual=usual.Practice(on_two_ranks, 2),
)
@pytest.mark.gt_world("simulated", size=2)
def test_an_updated_parameter_is_gathered_again(gt_world, bug):
    before = traced()
    assert_same_function(deduplicate(before, bug), before, inputs=numbers, world=gt_world)
