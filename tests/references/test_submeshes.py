"""Modules that are sharded over fewer ranks than data is parallel over, as routed experts are."""

import pytest
import torch
from torch import nn

from pytest_gtrainer import (
    TrainConfig,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_simulated_parity,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@pytest.mark.gt_world("simulated", size=4, nodes=2, mesh={"efsdp": 2, "ep": 2})
def test_gradients_of_a_submesh_are_divided_by_the_ranks_of_the_whole(gt_world):
    """B3: every rank has the same rows, so the sum of two ranks, divided by four, is half of one's
    own gradient.
    """

    def config(mesh):
        return TrainConfig(
            model=Net,
            step=lambda model, x: model(x),
            batch=lambda step, rank: (torch.ones(3, 4),),
            bucket_plan=["layers.0", "layers.1"],
            mesh=mesh._flatten("fsdp"),
            submeshes={"layers.1": mesh["efsdp"]},
            steps=1,
        )

    eager = assert_simulated_parity(config, gt_world, invisible="report").eager
    alone = Net()
    alone(torch.ones(3, 4)).backward()
    of_dense, of_experts = (
        torch.cat([eager[0, rank, "gradient", f"layers.{layer}.weight"] for rank in ranks])
        for layer, ranks in ((0, range(4)), (1, (0, 2)))
    )
    assert_bitwise_equal(of_dense, alone.layers[0].weight.grad, what="over all ranks")
    assert_bitwise_equal(of_experts, alone.layers[1].weight.grad / 2, what="over two of four ranks")
    assert_bitwise_different(of_experts, alone.layers[1].weight.grad)
