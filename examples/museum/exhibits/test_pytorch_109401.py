"""Both ranks post a receive before the send that the other one waits for.

pytorch#109401 (2023): ``isend`` and ``irecv`` between two ranks hung with NCCL, which runs what
two ranks exchange in the order in which it was issued, one after the other. With gloo the same
code ends. A simulated world matches messages as gloo does, so the bug stays unseen here.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit

from pytest_gtrainer import simulate_eager


def exchange(x, bug):
    """Give x to the other rank; the fixed version lets rank 0 send first."""
    dist.barrier()
    rank, received = dist.get_rank(), torch.empty_like(x)
    work = [lambda: dist.irecv(received, 1 - rank), lambda: dist.isend(x, 1 - rank)]
    if rank == 0 and not bug:
        work.reverse()
    for each in [start() for start in work]:
        each.wait()
    return {"received": received}


@exhibit(
    "pytorch#109401",
    2023,
    kind="collectives",
    found_by="not found",
    raises=None,
    says="a simulated world has no streams, on which a receive blocks the send behind it",
    usual="nobody with gloo; with NCCL it hangs",
)
@pytest.mark.gt_world("simulated", size=2)
def test_ranks_exchange(gt_world, bug):
    results = simulate_eager(
        lambda x: exchange(x, bug), lambda rank: (torch.full((3,), float(rank)),), gt_world
    )
    assert [result["received"][0].item() for result in results] == [1, 0]
