"""Only one rank knows the sum of the losses, so ranks disagree whether to save, and one waits.

pytorch#77562 (2022): training died at the end of an epoch, in five of five runs: the loss was
reduced to rank 0, each rank compared its own value with the best one, and some went to save while
others trained on. Here the sum is gathered at rank 0, as a simulated world has no ``reduce``.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit

from pytest_gtrainer import simulate_eager


def end_of_epoch(loss, bug, best=7.0):
    """Save if the loss of all ranks is the best one so far."""
    if bug:
        parts = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
        dist.gather(loss, parts if dist.get_rank() == 0 else None, dst=0)
        if dist.get_rank() == 0:
            loss = torch.stack(parts).sum(0)
    else:
        dist.all_reduce(loss)
    saves = loss.item() < best
    if saves:  # all ranks give their shards
        shards = torch.empty(2 * dist.get_world_size())
        dist.all_gather_single(shards, torch.ones(2))
    dist.all_reduce(torch.ones(3))  # the next step
    return {"saves": float(saves)}


@exhibit(
    "pytorch#77562",
    2022,
    kind="collectives",
    found_by="wait",
    raises=AssertionError,
    says="rank 0: all_reduce (sum) of float32[3]; ranks 1-3: all_gather of float32[2]",
    usual="nobody: it hangs, or fails in another collective",
)
@pytest.mark.gt_world("simulated", size=4)
def test_ranks_agree_whether_to_save(gt_world, bug):
    simulate_eager(
        lambda loss: end_of_epoch(loss, bug), lambda rank: (torch.tensor([2.5]),), gt_world
    )
