"""Each rank clips by the norm of its own shards.

AReaL#312 (2025): with FSDP the norm of gradients was computed over the local shards and never
added up over ranks, so ranks scaled their shards of one parameter by different factors, and
clipping depended on the number of ranks. Numbers are small and whole here, so that no order of
additions rounds, and bits can be compared with one rank.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal, simulate_eager


def whole_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    for parameter in model.parameters():
        numbers = torch.arange(parameter.numel()) % 5 - 1
        parameter.data.copy_(numbers.view_as(parameter))
    return model


def clip(gradients, group=None):
    squares = sum(gradient.square().sum() for gradient in gradients)
    if group is not None:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    for gradient in gradients:
        gradient /= norm


X = torch.arange(8.0).reshape(2, 4) - 3


def on_one_rank():
    model = whole_model()
    model(X).sum().backward()
    clip([parameter.grad for parameter in model.parameters()])
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def on_rank(bug):
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(whole_model(), mesh=mesh)
    model(X).sum().backward()
    shards = [parameter.grad.to_local() for parameter in model.parameters()]
    clip(shards, group=None if bug else mesh.get_group())
    return {name: each.grad.full_tensor() for name, each in model.named_parameters()}


@exhibit(
    "AReaL#312",
    2025,
    kind="reductions",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at [0].0.weight",
    usual=usual.of_results(on_rank, on_one_rank, ranks=2),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_all_ranks_clip_by_one_norm(gt_world, bug):
    on_two_ranks = simulate_eager(on_rank, lambda rank: (bug,), gt_world)
    assert_bitwise_equal(on_two_ranks, [on_one_rank()] * 2, what="two ranks against one")
