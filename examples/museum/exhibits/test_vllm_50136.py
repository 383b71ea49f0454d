"""Which all-reduce adds depends on how many requests are in the batch.

vllm#50136 (2026): small tensors took an all-reduce of their own, large ones NCCL's, and a tensor has
a row for every token of the batch. So one request had other bits alone than among others, where
batch invariance was asked for. Here the two kinds are a sum in the order of ranks, and a ring's.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal, simulate_eager

SIZE, MOST = 4, 64


def one_shot(x):
    parts = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(parts, x)
    return parts[0] + parts[1] + parts[2] + parts[3]


def ring(x):
    """Add the n-th part from rank n on."""
    parts = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(parts, x)
    columns = [part.chunk(SIZE, 1) for part in parts]
    added = []
    for first in range(SIZE):
        total = columns[first][first]
        for step in range(1, SIZE):
            total = total + columns[(first + step) % SIZE][first]
        added.append(total)
    return torch.cat(added, 1)


def all_reduce(x, bug):
    return ring(x) if bug and x.numel() > MOST else one_shot(x)


def partial_sums(rank, rows):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, 16, generator=generator)[:rows]


def of_one_request(bug, rows):
    return {"request 0": all_reduce(partial_sums(dist.get_rank(), rows), bug)[:1]}


@exhibit(
    "vllm#50136",
    2026,
    kind="nondeterminism",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at [0].request 0",
    usual=usual.of_results(
        lambda bug: of_one_request(bug, rows=8),
        lambda: of_one_request(False, rows=1),
        ranks=SIZE,
    ),
)
@pytest.mark.gt_world("simulated", size=SIZE)
def test_a_request_has_the_bits_that_it_has_alone(gt_world, bug):
    among_others = simulate_eager(of_one_request, lambda rank: (bug, 8), gt_world)
    alone = simulate_eager(of_one_request, lambda rank: (bug, 1), gt_world)
    assert_bitwise_equal(among_others, alone, what="in a batch of 8 against alone")
