"""The norm of all gradients counts replicated parameters once for every tensor rank.

NeMo-RL#3788 (2026): squares of gradients were summed over tensor ranks, which is right for shards
only. Norms, routers and biases are replicated and were counted as often as there are ranks, so the
logged norm was too large and gradients were clipped more than asked for. The numbers here are
small and whole, so that no order of additions rounds, and bits can be compared with one rank.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal, simulate_eager


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


def whole_model():
    model = nn.Sequential(Scale(), nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    for parameter in model.parameters():
        numbers = torch.arange(parameter.numel()) % 5 - 1
        parameter.data.copy_(numbers.view_as(parameter))
    return model


def clip(model, group, bug):
    """Scale the gradients to a norm of 1; return the norm that they had."""
    sharded, replicated = torch.zeros(()), torch.zeros(())
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements[0].is_shard():
            sharded += gradient.to_local().square().sum()
        else:
            replicated += gradient.square().sum()
    if group is not None:
        dist.all_reduce(sharded, group=group)
        if bug:
            dist.all_reduce(replicated, group=group)
    norm = (sharded + replicated).sqrt()
    for parameter in model.parameters():
        parameter.grad /= norm
    return norm


def train(model, x, group=None, bug=False):
    model(x).sum().backward()
    result = {"norm of all gradients": clip(model, group, bug)}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        result[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return result


X = torch.arange(8.0).reshape(2, 4) - 3


def on_one_rank():
    return train(whole_model(), X)


def on_rank(bug):
    mesh = init_device_mesh("cpu", (2,))
    plan = {"1": ColwiseParallel(), "2": RowwiseParallel()}
    return train(parallelize_module(whole_model(), mesh, plan), X, mesh.get_group(), bug)


@exhibit(
    "NeMo-RL#3788",
    2026,
    kind="reductions",
    found_by="bits",
    raises=BitwiseDifference,
    says="norm of all gradients",
    usual=usual.of_results(on_rank, on_one_rank, ranks=2),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_the_norm_is_that_of_one_rank(gt_world, bug):
    on_two_ranks = simulate_eager(on_rank, lambda rank: (bug,), gt_world)
    assert_bitwise_equal(on_two_ranks, [on_one_rank()] * 2, what="two ranks against one")
