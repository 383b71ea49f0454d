"""A graph that is compiled on rank 0 has the vocabulary offset of rank 0 in it.

torchtitan#4730 (2026): each rank holds a part of the vocabulary, and the embedding subtracts where
its part begins. That was read in Python from the rank, so a graph compiled on one rank for all had
the offset zero as a constant: rank 1 computed wrong activations, loss and gradients. The fix asks
for the rank in the graph; here each rank passes its offset in.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from museum import exhibit
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    BitwiseDifference,
    assert_bitwise_equal,
    simulate_eager,
    simulate_graph,
)

PART = 4


def embed(tokens, weight, offset):
    """Look up the tokens of this rank's part; other ranks add the rest."""
    own = tokens - offset
    is_here = (own >= 0) & (own < PART)
    rows = weight[own.clamp(0, PART - 1)] * is_here.unsqueeze(-1)
    return funcol.wait_tensor(funcol.all_reduce(rows, "sum", dist.group.WORLD))


def embed_by_rank(tokens, weight, offset):
    """``offset`` is the same number, as the tensor that a runtime would give."""
    return embed(tokens, weight, PART * dist.get_rank())


def inputs_of(rank):
    torch.manual_seed(rank)
    weight = torch.randn(PART, 2)
    return torch.arange(2 * PART), weight, torch.tensor(PART * rank)


@exhibit(
    "torchtitan#4730",
    2026,
    kind="stale or baked values",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at [0].output_0",
    usual="on rank 0, where it is compiled, the graph is right",
)
@pytest.mark.gt_world("simulated", size=2)
def test_the_graph_of_rank_0_serves_all_ranks(gt_world, bug):
    function = embed_by_rank if bug else embed
    compiled = make_fx(function)(*inputs_of(rank=0))
    on_ranks = simulate_graph(compiled, inputs_of, gt_world)
    assert_bitwise_equal(on_ranks, simulate_eager(embed, inputs_of, gt_world), what="on all ranks")
