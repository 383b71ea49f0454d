"""The gradients of experts are reduced in a payload of w3, w2, w1; eager FSDP2 packs w1, w2, w3.

torchtitan (2026), found by this project and not reported under a number: its key sorts by module
and then by the place in the graph, and the parameters of one module get their gradients last
first. All bits are equal on one node; of 28 tensors two differed on two. Rebuilt from that key.
"""

import pytest
import torch
from museum import exhibit
from torch import nn

from pytest_gtrainer import (
    BitwiseDifference,
    TrainConfig,
    assert_bitwise_equal,
    train_eager,
    train_graph,
)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in ("w1", "w2", "w3"):
            setattr(self, name, nn.Parameter(torch.randn(16, 16)))

    def forward(self, x):
        return ((x @ self.w1).sigmoid() * (x @ self.w3)) @ self.w2


def training(mesh):
    return TrainConfig(
        model=lambda: nn.Sequential(Experts()),
        step=lambda model, x: model(x).square().mean(),
        batch=lambda step, rank: (torch.randn(6, 16, generator=torch.manual_seed(rank)),),
        bucket_plan=["0"],
        mesh=mesh,
        steps=1,
    )


@exhibit(
    "torchtitan, experts",
    2026,
    kind="order and payload",
    found_by="bits",
    raises=BitwiseDifference,
    says="gradient of 0.w",
    usual="nobody on two ranks: a sum of two has one order, and every bit is equal",
)
@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_gradients_have_the_bits_of_eager(gt_world, bug):
    order = ["0.w3", "0.w2", "0.w1"] if bug else "managed"
    actual = train_graph(training, world=gt_world, payload_order=order)
    assert_bitwise_equal(actual, train_eager(training, world=gt_world))
