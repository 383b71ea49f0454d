"""Gradients become ready in another order on one rank, and the sums mix two parameters.

pytorch#64629 (2021): FSDP assumed that gradients are ready in one order on all ranks; where they
are not, the issue says, results are inaccurate or ranks hang. Rebuilt from the issue: two experts
of one shape, whose hooks start the all-reduce, and rank 1 calls them in the other order.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch import nn

from pytest_gtrainer import AnotherFunction, assert_same_model


class Experts(nn.Module):
    """Two experts; ``first`` says which one is called first."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first = "left"

    def forward(self, x):
        if self.first == "left":
            left, right = self.left(x), self.right(x)
        else:
            right, left = self.right(x), self.left(x)
        return left.tanh() - right.sigmoid()


def parallel(mesh, bug):
    model = Experts()
    if bug and mesh.get_local_rank() == 1:
        model.first = "right"

    def add_up(parameter):
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=mesh.get_group())
        parameter.grad /= mesh.size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(add_up)
    return model


def step(model, x):
    return model(x).square().mean()


def batch(coordinate):
    return (torch.randn(4, 8),)


@exhibit(
    "pytorch#64629",
    2021,
    kind="collectives",
    found_by="proof",
    raises=AnotherFunction,
    says="first gradient of left.weight, rank 0",
    usual=usual.of_models(parallel, Experts, step, batch, mesh={"dp": 2}, data_dim="dp"),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_each_gradient_is_the_sum_of_its_own(gt_mesh, bug):
    assert_same_model(lambda mesh: parallel(mesh, bug), Experts, step, batch, mesh=gt_mesh)
