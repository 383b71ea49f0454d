"""Under hybrid sharding the graph adds replicas first and shards then; eager FSDP2 the other way.

Found by this project (2026) in graphs of data_parallel, which has DTensor's order: the whole
gradient is all-reduced over replicas and then reduce-scattered. It moves more bytes and has other
bits than eager ``fully_shard`` on a 2-D mesh, which reduce-scatters first.
"""

import pytest
import torch
from museum import exhibit
from torch import nn

from pytest_gtrainer import LayoutDifference, TrainConfig, assert_simulated_parity


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def training(mesh):
    return TrainConfig(
        model=model,
        step=lambda model, x: model(x).square().mean(),
        batch=lambda step, rank: (torch.randn(5, 16, generator=torch.manual_seed(rank)),),
        bucket_plan=["0", "2"],
        mesh=mesh,
        steps=1,
    )


@exhibit(
    "DTensor, hybrid sharding",
    2026,
    kind="order and payload",
    found_by="layout",
    raises=LayoutDifference,
    says="bucket '0': no all_reduce of 0.weight, 0.bias",
    usual="nobody on two ranks, which have one dimension: there is nothing to swap",
)
@pytest.mark.gt_world("simulated", size=8, nodes=4, mesh={"replicate": 2, "shard": 4})
def test_shards_are_added_before_replicas(gt_world, bug):
    assert_simulated_parity(training, gt_world, reduce_scatter_first=not bug)
