"""A bucket is packed in the order in which its parameters run, not in which they are registered.

torchtitan#3590 (2026): on several nodes the graph lost the bits of eager FSDP2, as NCCL adds an
element in an order that depends on its place in the payload; one node did not show it. Here two
nodes of two ranks are simulated, and the second layer is registered first.
"""

import pytest
import torch
from museum import exhibit
from torch import nn

from pytest_gtrainer import LayoutDifference, TrainConfig, assert_simulated_parity


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.second, self.first = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x):
        return self.second(self.first(x).sin())


def training(mesh):
    return TrainConfig(
        model=Model,
        step=lambda model, x: model(x).square().mean(),
        batch=lambda step, rank: (torch.randn(5, 20, generator=torch.manual_seed(rank)),),
        bucket_plan=[["second", "first"]],
        mesh=mesh,
        steps=2,
    )


@exhibit(
    "torchtitan#3590",
    2026,
    kind="order and payload",
    found_by="layout",
    raises=LayoutDifference,
    says="second.weight sits at byte",
    usual="nobody on two ranks: a sum of two has one order, and every bit is equal",
)
@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_a_bucket_is_packed_as_eager_does(gt_world, bug):
    order = "execution" if bug else "managed"
    assert_simulated_parity(training, gt_world, payload_order=order)
