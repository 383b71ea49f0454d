"""The gradients of a chunked loss are reduced over the ranks once a chunk, and then added.

torchtitan#3637 (2026): eager adds the chunks of the head's gradient on each rank and reduces the
sum; the graph reduced every chunk. The first bits differed at once, the loss at step 7, and the
cause was one tensor of 377. Here the head's gradient of two chunks is reduced in both ways.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import AnotherFunction, assert_same_function


def gradients(rank):
    torch.manual_seed(rank)
    return torch.randn(6, 8), torch.randn(6, 8)


def reduced(gradient):
    return collectives.wait_tensor(collectives.all_reduce(gradient, "sum", dist.group.WORLD))


def eager(first, second):
    """Add the chunks, then the ranks."""
    return reduced(first + second)


def graph(first, second, bug):
    if bug:
        return reduced(first) + reduced(second)  # the ranks, then the chunks
    return eager(first, second)


def on_two_ranks(bug):
    inputs = gradients(dist.get_rank())
    return usual.Sides({"head": graph(*inputs, bug)}, {"head": eager(*inputs)})


@exhibit(
    "torchtitan#3637",
    2026,
    kind="order and payload",
    found_by="proof",
    raises=AnotherFunction,
    says="reordered: the same function",
    usual=usual.Practice(on_two_ranks, 2),
)
@pytest.mark.gt_world("simulated", size=4)
def test_the_head_is_reduced_once(gt_world, bug):
    actual = make_fx(lambda *parts: graph(*parts, bug), tracing_mode="fake")(*gradients(0))
    expected = make_fx(eager, tracing_mode="fake")(*gradients(0))
    assert_same_function(actual, expected, inputs=gradients, world=gt_world, at_least="identical")
