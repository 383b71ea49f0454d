"""Each rank keeps its own share of the gradient below experts that split their width.

torchtitan#4054 (2026): with tensor parallelism and without expert parallelism, the gradient of the
experts' inputs was taken for replicated where it was one contribution to a sum, so routers got a
part of their gradient (norms off by up to 2.7). The forward was right and the loss curves looked
normal. Here each rank has half of the experts' width, and ``local_map`` says what its gradients
are.
"""

import pytest
import torch
from museum import exhibit, usual
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from pytest_gtrainer import AnotherFunction, assert_same_model


def experts(x, score, up, down):
    return nn.functional.silu(x @ up) @ down * score


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 2, bias=False)
        self.up = nn.Parameter(torch.zeros(8, 16))
        self.down = nn.Parameter(torch.zeros(16, 8))
        self.experts = experts

    def forward(self, x):
        score = self.router(x).softmax(-1)[..., :1]
        return self.experts(x, score, self.up, self.down)


def reference():
    return nn.Sequential(nn.Linear(8, 8), MoE(), nn.Linear(8, 8))


def shard(name, module, mesh):
    if isinstance(module, MoE):
        module.up = nn.Parameter(distribute_tensor(module.up, mesh, [Shard(1)]))
        module.down = nn.Parameter(distribute_tensor(module.down, mesh, [Shard(0)]))


def parallel(mesh, bug):
    model = distribute_module(
        reference(),
        mesh,
        shard,
        lambda module, inputs, mesh: (distribute_tensor(inputs[0], mesh, [Replicate()]),),
        lambda module, output, mesh: output.to_local(),
    )
    whole, columns, rows, share = [Replicate()], [Shard(1)], [Shard(0)], [Partial()]
    on_each_rank = local_map(
        experts,
        out_placements=share,
        in_placements=(whole, whole, columns, rows),
        # Without them a gradient is placed as its input is: replicated, and nobody adds it up.
        in_grad_placements=None if bug else (share, share, columns, rows),
        device_mesh=mesh,
    )
    model[1].experts = lambda *inputs: on_each_rank(*inputs).redistribute(placements=whole)
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
    says="equal after a sum over 'tp'",
    usual=usual.of_models(parallel, reference, step, batch, mesh={"tp": 2}),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_the_router_has_its_whole_gradient(gt_mesh, bug):
    assert_same_model(
        lambda mesh: parallel(mesh, bug), reference, step, batch, mesh=gt_mesh, data_dims=()
    )
