"""Hooks that add the gradients of norms stay on parameters that a wrapper has replaced.

gpt-neox#1259 (2024): under sequence parallelism each rank sees its part of the sequence, so a hook
sums the gradients of norms over tensor ranks. The hooks were registered before the engine was
initialised, and none ever ran; the change registers them afterwards. That the engine replaces
parameters is rebuilt from that.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_gtrainer import AnotherFunction, assert_same_model


class Gather(torch.autograd.Function):
    """Gather the sequence. Tensor ranks have one gradient, so each goes on with its part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        return part_of(gradient, ctx.group), None


def part_of(x, group):
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]


def reference():
    return nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))


def parallel(mesh, bug):
    group = mesh.get_group()
    model = parallelize_module(reference(), mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    norm = model[0]
    norm.register_forward_pre_hook(lambda module, inputs: (part_of(inputs[0], group),))
    norm.register_forward_hook(lambda module, inputs, output: Gather.apply(output, group))

    def wrap():
        norm.weight = nn.Parameter(norm.weight.detach().clone())

    def add_hooks():
        norm.weight.register_post_accumulate_grad_hook(
            lambda parameter: dist.all_reduce(parameter.grad, group=group)
        )

    for action in (add_hooks, wrap) if bug else (wrap, add_hooks):
        action()
    return model


def step(model, x):
    return model(x).square().mean()


def batch(_):
    return (torch.randn(2, 4, 8),)


@exhibit(
    "gpt-neox#1259",
    2024,
    kind="reductions",
    found_by="proof",
    raises=AnotherFunction,
    says="equal after a sum over 'tp'",
    usual=usual.of_models(parallel, reference, step, batch, mesh={"tp": 2}),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_norms_are_added_over_the_sequence(gt_mesh, bug):
    assert_same_model(
        lambda mesh: parallel(mesh, bug), reference, step, batch, mesh=gt_mesh, data_dims=()
    )
