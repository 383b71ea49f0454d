"""Two ranks of a group call an all-reduce first, the others an all-to-all of another group.

torchrec#4149 (2026): 62 ranks had issued an all-to-all and waited for the device, 2 ranks waited
for an all-reduce of another group that the 62 had not yet come to, and no rank went on. Here two
of four ranks read a count, which waits for the all-reduce, before they send rows to the others.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit
from torch.distributed.device_mesh import init_device_mesh

from pytest_gtrainer import simulate_eager


def step(rows, late):
    """Exchange rows over "shard", and add the counts of "replicate"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    count, received = torch.tensor([float(len(rows))]), torch.empty_like(rows)

    def count_rows():
        dist.all_reduce(count, group=mesh.get_group("replicate"))

    def exchange():
        dist.all_to_all_single(received, rows, group=mesh.get_group("shard"))

    for work in (count_rows, exchange) if dist.get_rank() in late else (exchange, count_rows):
        work()
    return {"received": received, "count": count}


@exhibit(
    "torchrec#4149",
    2026,
    kind="collectives",
    found_by="wait",
    raises=AssertionError,
    says="waiting in all_to_all of rows of float32[3] (collective 0 of the group of ranks 2, 3",
    usual="nobody: it hangs",
)
@pytest.mark.gt_world("simulated", size=4)
def test_groups_are_used_in_one_order(gt_world, bug):
    late = (1, 2) if bug else ()
    simulate_eager(lambda rows: step(rows, late), lambda rank: (torch.ones(4, 3),), gt_world)
