"""The gradient of a replicated router is summed over ranks that all have the whole of it.

torchtitan#4054 (2026): with tensor parallelism inside the experts, the router's weight got up to
2.7 times its gradient, and the loss curves looked normal. Here each rank has half of the experts'
width and the router is replicated; its gradient must be the whole one on every rank.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_gtrainer import AnotherFunction, assert_same_model


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 2, bias=False)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        score = self.router(x).softmax(-1)[..., :1]
        return self.down(nn.functional.silu(self.up(x))) * score


def reference():
    return nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 8))


def parallel(mesh, bug):
    model = reference()
    parallelize_module(model[1], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if bug:  # "every parameter that is not sharded has a partial gradient"

        def add_up(parameter):
            dist.all_reduce(parameter.grad, group=mesh.get_group())

        model[1].router.weight.register_post_accumulate_grad_hook(add_up)
    return model


def step(model, x):
    return model(x).square().mean()


def batch(_):
    return (torch.randn(4, 8),)


@exhibit(
    "torchtitan#4054",
    2026,
    kind="reductions",
    found_by="proof",
    raises=AnotherFunction,
    says="2 times what is expected",
    usual=usual.of_models(parallel, reference, step, batch, mesh={"tp": 2}),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_the_router_has_its_gradient_once(gt_mesh, bug):
    assert_same_model(
        lambda mesh: parallel(mesh, bug), reference, step, batch, mesh=gt_mesh, data_dims=()
    )
