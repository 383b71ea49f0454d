"""Gradients of bf16 parameters, in the dtype that FSDP2 of the installed torch adds and reduces
them in.
"""

import pytest
import torch
from torch import nn

from pytest_gtrainer import (
    MixedPrecisionPolicy,
    TrainConfig,
    assert_bitwise_different,
    assert_parity,
    train_graph,
)
from pytest_gtrainer.tracing.sharding import gradient_dtype

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    """Norms, of which CPU makes RMSNorm's gradient in fp32, and a weight with two gradients, which
    are added.

    Each of 3 ranks has 3 * 9 + 3 * 5 elements of a bucket, beside 3 of each weight of a norm: 51.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.RMSNorm(9), nn.LayerNorm(9, bias=False)
        self.up, self.down = nn.Linear(9, 5, bias=False), nn.Linear(5, 9, bias=False)
        self.often = nn.Parameter(torch.rand(9))
        self.frozen = nn.Parameter(torch.rand(9), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.often.dtype)
        y = self.down(self.up(self.norm(x)).sin()) * self.frozen
        return x * self.often + self.other_norm(y * self.often)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@pytest.fixture
def training(gt_mesh):
    """``training(policy, model=Net)``"""

    def batch(step, rank):
        return (torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank)),)

    def make(policy, model=Net):
        plan = ["layers.0", "layers.1"]
        fields = {
            "step": lambda model, x: model(x),
            "batch": batch,
            "bucket_plan": plan,
            "mesh": gt_mesh,
            "steps": 2,
        }
        return TrainConfig(model=model, mp_policy=policy, **fields)

    return make


@pytest.mark.second_tier("bf16-bf16", "bf16-default", "fp32")
@pytest.mark.gt_world("ranks", size=3)
@pytest.mark.parametrize("reduced", [FP32, BF16, None], ids=["fp32", "bf16", "default"])
@pytest.mark.parametrize("gathered", [BF16, None], ids=["bf16", "fp32"])
def test_norms_and_a_weight_read_often_equal_fully_shard(training, gt_world, gathered, reduced):
    """A12: under torch 2.15 the gradient of RMSNorm's bf16 weight is reduced in fp32 without a
    rounding to bf16.
    """
    policy = MixedPrecisionPolicy(gathered, reduced)
    parity = assert_parity(training(policy), gt_world, invisible="report")
    other = MixedPrecisionPolicy(BF16 if gathered is None else None, reduced)
    assert_bitwise_different(train_graph(training(other)), parity.graph)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=3)
def test_a_model_in_bf16_that_reduces_in_fp32(training, gt_world):
    """Parameters, and their gradients after the reduction, are bf16 throughout."""
    policy = MixedPrecisionPolicy(reduce_dtype=FP32)
    assert_parity(training(policy, model=lambda: Net().bfloat16()), gt_world, invisible="report")


@pytest.mark.parametrize(
    ("gathered", "reduced", "is_replica", "expected"),
    [
        (BF16, FP32, False, None),
        (BF16, FP32, True, FP32),
        (BF16, BF16, False, BF16),
        (FP32, BF16, False, BF16),
        (BF16, torch.float16, False, torch.float16),
        (torch.int32, torch.float64, False, torch.float64),
    ],
)
def test_only_a_wider_reduction_takes_gradients_as_they_come(
    gathered, reduced, is_replica, expected
):
    """A12: as FSDP2 of torch 2.15 does it, equal widths and integers included."""
    assert gradient_dtype(gathered, reduced, is_replica) is expected
