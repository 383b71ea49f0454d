"""A pass takes the backward's gather of a parameter for a repetition of the forward's.

Found by this project (2026) in two of torch's bucketing passes: what is gathered again in the
backward, so that it may be freed after the forward, was merged into the forward's gather.
pytorch/xla discussed the same of its compiler (#6379, 2024). Every value is right, and nothing is
ever freed.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import assert_peak_memory

LAYERS, WIDTH, RANKS = 6, 64, 8
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def step(x, *shards):
    """Run the layers, and the gradient of x back through them; each gathers its weight."""

    def gather(shard):
        return collectives.all_gather_single(shard, 0, dist.group.WORLD)

    for shard in shards:
        x = x @ gather(shard)
    gradient = x * 2
    for shard in reversed(shards):
        gradient = gradient @ gather(shard).T
    return gradient


def deduplicate(gm, bug):
    """Merge gathers of one shard within a direction; this graph's forward ends at the product."""
    first = {}
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.mul.Tensor and not bug:
            first.clear()  # here the backward begins
        if node.target is GATHER:
            same = first.setdefault(node.args, node)
            if same is not node:
                (wait,), (kept, *_) = node.users, same.users
                wait.replace_all_uses_with(kept)
                gm.graph.erase_node(wait)
                gm.graph.erase_node(node)
    gm.recompile()
    return gm


@exhibit(
    "torch, bucketing",
    2026,
    kind="memory",
    found_by="memory",
    raises=AssertionError,
    says="all_gather_into_tensor",
    usual="nobody: all values are equal",
)
@pytest.mark.gt_world("fake", size=RANKS)
def test_two_layers_are_gathered_at_a_time(gt_world, bug):
    shards = [torch.ones(WIDTH // RANKS, WIDTH) for _ in range(LAYERS)]
    rows = torch.ones(4, WIDTH)
    gm = make_fx(step, tracing_mode="fake")(rows, *shards)
    whole = WIDTH * WIDTH * 4
    held = LAYERS * shards[0].nbytes + 4 * rows.nbytes
    assert_peak_memory(deduplicate(gm, bug), at_most=2 * whole + held)
