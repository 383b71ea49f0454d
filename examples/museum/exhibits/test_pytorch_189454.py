"""A receive is hoisted above the send before it, and every rank receives first.

pytorch#189454 (2026): a pass that overlaps communication took a send for computation, as only
other collectives stopped it, and moved the receive up. The ranks of a ring waited for each other;
a nightly job hung until its limit for two weeks. Here ranks run a list of operations, which such a
pass sorts.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit

from pytest_gtrainer import simulate_eager

COLLECTIVES = ("barrier", "recv")
"""What the pass knows. A send returns no tensor, so it was lowered to something else."""


def hoist(operations, bug):
    """Move each receive up to the next communication."""
    known = COLLECTIVES if bug else (*COLLECTIVES, "send")
    order = list(operations)
    for place in range(1, len(order)):
        at = place
        while order[at] == "recv" and at > 0 and order[at - 1] not in known:
            order[at - 1], order[at] = order[at], order[at - 1]
            at -= 1
    return order


def ring(x, bug):
    """Give x to the next rank. Even ranks send first, odd ones receive first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    run = {
        "barrier": dist.barrier,
        "send": lambda: dist.send(x, (rank + 1) % size),
        "recv": lambda: dist.recv(received, (rank - 1) % size),
        "mul": lambda: x.mul(2.0),
    }
    if rank % 2 == 0:
        operations = ["barrier", "send", "mul", "recv"]
    else:
        operations = ["barrier", "recv", "mul", "send"]
    for name in hoist(operations, bug):
        run[name]()
    return {"received": received}


@exhibit(
    "pytorch#189454",
    2026,
    kind="collectives",
    found_by="wait",
    raises=AssertionError,
    says="rank 0: waiting in recv of float32[3] from rank 3",
    usual="nobody: it hangs",
)
@pytest.mark.gt_world("simulated", size=4)
def test_the_ring_goes_around(gt_world, bug):
    results = simulate_eager(
        lambda x: ring(x, bug), lambda rank: (torch.full((3,), float(rank)),), gt_world
    )
    assert [result["received"][0].item() for result in results] == [3, 0, 1, 2]
