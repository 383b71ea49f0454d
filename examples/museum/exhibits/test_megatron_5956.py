"""Gradients of experts are not divided by the number of ranks whose tokens they saw.

Megatron-LM#5956 (2026): an expert gets the tokens of all ranks of its group, so its gradient is a
sum over them, where the loss is a mean. A first analysis blamed the order of NCCL's sums and asked
for a larger tolerance; the author then withdrew it, as the test had found a real bug.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch import nn

from pytest_gtrainer import AnotherFunction, assert_same_model


class Exchange(torch.autograd.Function):
    """Send the n-th part of the rows to rank n, and gradients back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        returned = torch.empty_like(gradient)
        dist.all_to_all_single(returned, gradient.contiguous(), group=ctx.group)
        return returned, None


class Experts(nn.Module):
    """Two experts; the first half of the tokens goes to the first one."""

    def __init__(self, held=2):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(held, 8, 8))
        self.group = None

    def forward(self, x):
        if self.group is None:
            first, second = x.chunk(2)
            return torch.cat([first @ self.weight[0], second @ self.weight[1]])
        mine = Exchange.apply(x, self.group) @ self.weight[0]
        return Exchange.apply(mine, self.group)


def reference():
    return nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 8))


def parallel(mesh, bug):
    group = mesh.get_group()
    model = nn.Sequential(nn.Linear(8, 8), Experts(held=1), nn.Linear(8, 8))
    model[1].group = group

    def average(parameter):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= 2

    def divide(parameter):
        parameter.grad /= 1 if bug else 2

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(divide if name == "1.weight" else average)
    return model


def step(model, x):
    return model(x).square().mean()


def batch(_):
    return (torch.randn(4, 8),)


SLICES = {"1.weight": ("ep", 0)}


@exhibit(
    "Megatron-LM#5956",
    2026,
    kind="scale",
    found_by="proof",
    raises=AnotherFunction,
    says="2 times what is expected",
    usual=usual.of_models(
        parallel, reference, step, batch, mesh={"ep": 2}, data_dim="ep", local=SLICES
    ),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"ep": 2})
def test_experts_have_the_gradient_of_the_mean(gt_mesh, bug):
    assert_same_model(
        lambda mesh: parallel(mesh, bug),
        reference,
        step,
        batch,
        mesh=gt_mesh,
        data_dims=("ep",),
        local=SLICES,
    )
