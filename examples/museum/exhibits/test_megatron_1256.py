"""Tensor ranks drop the same places, because two contexts are joined by ``and``.

Megatron-LM#1256 (2024): a block ran in ``with rng_context and fp8_context``, where a comma was
meant. ``and`` gives the second one, so the context with a seed for each tensor rank was never
entered: under sequence parallelism all parts of a sequence were dropped by one mask. It stood for
over a year, as models without dropout do not show it.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from museum import exhibit
from torch import nn

from pytest_gtrainer import ControlFailed, assert_bitwise_different, simulate_eager


@contextmanager
def seed_of_rank():
    with torch.random.fork_rng():
        torch.manual_seed(1000 + dist.get_rank())
        yield


def block(bug):
    """Drop out this rank's half of the sequence, of ones."""
    torch.manual_seed(0)
    rng_context, fp8_context = seed_of_rank(), nullcontext()
    if bug:
        with rng_context and fp8_context:
            kept = nn.functional.dropout(torch.ones(32))
    else:
        with rng_context, fp8_context:
            kept = nn.functional.dropout(torch.ones(32))
    dist.all_reduce(torch.ones(1))  # a block ends with a collective
    return {"dropout": kept}


@exhibit(
    "Megatron-LM#1256",
    2024,
    kind="nondeterminism",
    found_by="bits",
    raises=ControlFailed,
    says="equal",
    usual="nobody: one mask drops as many as another, and no value is wrong",
)
@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_parts_of_a_sequence_are_dropped_apart(gt_world, bug):
    first, second = simulate_eager(block, lambda rank: (bug,), gt_world)
    assert_bitwise_different(first, second, what="masks of two parts of a sequence")
