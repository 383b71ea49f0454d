"""Gradients are kept in a set, so that ranks reduce their buckets in different orders.

Megatron-LM#2218 (2025): the order of a set depends on addresses, so now and then two ranks reduced
buckets of different sizes together, and the job hung. Here rank 1 takes them from its set in
another order, and the sizes differ.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit

from pytest_gtrainer import simulate_eager


def step(up, down, bug):
    """Return the mean gradients of two buckets."""
    ready = {"up": up, "down": down}
    order = list(ready)
    if bug and dist.get_rank() == 1:
        order.reverse()  # as a set of other addresses would
    for name in order:
        dist.all_reduce(ready[name], op=dist.ReduceOp.AVG)
    return ready


def gradients(rank):
    torch.manual_seed(rank)
    return torch.randn(6), torch.randn(4)


@exhibit(
    "Megatron-LM#2218",
    2025,
    kind="collectives",
    found_by="wait",
    raises=AssertionError,
    says="ranks 0, 2, 3: all_reduce (avg) of float32[6]; rank 1: all_reduce (avg) of float32[4]",
    usual="nobody: it hangs",
)
@pytest.mark.gt_world("simulated", size=4)
def test_ranks_reduce_in_one_order(gt_world, bug):
    simulate_eager(lambda up, down: step(up, down, bug), gradients, gt_world)
