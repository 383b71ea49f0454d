"""gloo on CPU, on real ranks: its results and its refusals."""

import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from pytest_gtrainer.ranks.answers import CALLS_SIGNAL, STACK_SIGNAL

pytestmark = [
    pytest.mark.gt_world("ranks", size=3),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers_reductions_and_exchanges(gt_world, dtype):
    """W3: all-gather, even and uneven all-to-all, reduce-scatter and all-reduce by SUM and AVG."""
    rank = gt_world.rank
    gathered, mine = torch.empty(3, dtype=dtype), torch.tensor([float(rank)], dtype=dtype)
    dist.all_gather_into_tensor(gathered, mine)
    assert gathered.tolist() == [0, 1, 2]
    exchanged = torch.empty(3, dtype=dtype)
    dist.all_to_all_single(exchanged, torch.arange(3, dtype=dtype) + 10 * rank)
    assert exchanged.tolist() == [rank, 10 + rank, 20 + rank]
    uneven = torch.empty(
        3 * (rank + 1), dtype=dtype
    )  # one element for rank 0, two for rank 1, three for rank 2
    dist.all_to_all_single(
        uneven, torch.arange(6, dtype=dtype) + 10 * rank, [rank + 1] * 3, [1, 2, 3]
    )
    first = (0, 1, 3)[rank]
    assert uneven.tolist() == [
        10 * other + first + i for other in range(3) for i in range(rank + 1)
    ]
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 3)):
        value, shard = torch.full((3,), 3.0 * rank, dtype=dtype), torch.empty(1, dtype=dtype)
        dist.all_reduce(value, op=op)
        assert value.tolist() == [9 / divisor] * 3
        dist.reduce_scatter_tensor(shard, torch.tensor([0.0, 3, 6], dtype=dtype) + 3 * rank, op=op)
        assert shard.tolist() == [9 * (rank + 1) / divisor]


@pytest.mark.parametrize("beside", [False, True])
def test_a_monitored_barrier_is_one_collective_of_all_ranks(gt_world, beside):
    """gloo counts the messages in it, which the first rank exchanges with each other one."""
    pair = dist.new_group([1, 2])
    dist.monitored_barrier()
    if beside:
        dist.monitored_barrier()
        if gt_world.rank:
            dist.monitored_barrier(pair)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 3
    dist.destroy_process_group(pair)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functional_collectives(gt_world, dtype):
    """W3."""
    everyone, mine = dist.group.WORLD, torch.tensor([float(gt_world.rank)], dtype=dtype)
    assert functional.all_reduce(mine, "sum", everyone).tolist() == [3]
    assert functional.all_gather_tensor(mine, 0, everyone).tolist() == [0, 1, 2]
    assert (
        functional.reduce_scatter_tensor(torch.arange(3, dtype=dtype), "avg", 0, everyone).tolist()
        == mine.tolist()
    )
    assert functional.all_to_all_single(mine.repeat(3), None, None, everyone).tolist() == [0, 1, 2]


def test_fp8_and_scaled_sums_are_refused():
    """W3: also where the test expects it, so that nothing makes the ranks heal the group."""
    sent = torch.ones(3).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        dist.all_to_all_single(torch.empty_like(sent), sent)
    with pytest.raises(RuntimeError, match=r"Cannot use ReduceOp\.PREMUL_SUM with Gloo"):
        dist.all_reduce(torch.ones(1), op=dist._make_nccl_premul_sum(2.0))


def test_a_group_after_a_refused_collective():
    """W3: the next test finds it fit."""
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 3


def test_no_signal_that_asks_for_stacks_interrupts_a_test():
    """A handler that walks the stack of a running thread, its own too, kills the rank one in some
    thousand times.
    """
    assert {STACK_SIGNAL, CALLS_SIGNAL} <= signal.pthread_sigmask(signal.SIG_BLOCK, [])
