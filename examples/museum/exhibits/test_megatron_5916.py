"""The norm of all gradients leaves out the experts of every rank but the first.

Megatron-LM#5916 (2026): a parameter that tensor parallelism does not cut is counted by the first
tensor rank only, as the others have the same one. Experts are not cut either, but with expert
parallelism over the same ranks each rank has other ones, so some were counted by nobody, and
gradients were clipped less than asked for. Numbers are small and whole here.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal, simulate_eager

GRADIENTS = {
    "norm.weight": torch.tensor([3.0, 1.0]),
    "experts.0.weight": torch.tensor([2.0, 5.0]),
    "experts.1.weight": torch.tensor([4.0, 1.0]),
}


def is_expert(name):
    return name.startswith("experts")


def norm_on_ranks(bug):
    rank = dist.get_rank()
    own = [name for name in GRADIENTS if not is_expert(name) or f".{rank}." in name]
    squares = torch.zeros(())
    for name in own:
        if rank == 0 or (is_expert(name) and not bug):
            squares += GRADIENTS[name].square().sum()
    dist.all_reduce(squares)
    return {"norm": squares.sqrt()}


def norm_on_one_rank():
    return {"norm": sum(each.square().sum() for each in GRADIENTS.values()).sqrt()}


@exhibit(
    "Megatron-LM#5916",
    2026,
    kind="reductions",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at [0].norm",
    usual=usual.of_results(norm_on_ranks, norm_on_one_rank, ranks=2),
)
@pytest.mark.gt_world("simulated", size=2)
def test_the_norm_is_that_of_one_rank(gt_world, bug):
    on_two_ranks = simulate_eager(norm_on_ranks, lambda rank: (bug,), gt_world)
    assert_bitwise_equal(on_two_ranks, [norm_on_one_rank()] * 2, what="two ranks against one")
