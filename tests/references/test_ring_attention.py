"""Torch's own ring attention computes the attention to the whole sequence.

``context_parallel`` refuses the kernel of the CPU, as no sharding strategy is registered for it.
Its ring takes any kernel: so here it is called with this one.
"""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_gtrainer import AnotherFunction, assert_same_model

ring = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
go_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
WIDTH = 8


def go_back_of_part(grad_out, query, key, value, out, logsumexp, is_causal):
    return go_back(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)


def go_back_of_block(grad_out, query, key, value, out, logsumexp, is_causal):
    """Forget that the row goes on in other blocks."""
    of_block = attend(query, key, value, is_causal=is_causal)
    return go_back(grad_out, query, key, value, *of_block, 0.0, is_causal)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, is_causal, backward, *qkv):
        found = ring._templated_ring_attention(group, 2, attend, *qkv, is_causal=is_causal)
        ctx.save_for_backward(*qkv, *found[:2])
        ctx.others = group, is_causal, backward
        return found[0]

    @staticmethod
    def backward(ctx, gradient):
        group, is_causal, backward = ctx.others
        gradients = ring._templated_ring_attention_backward(
            group, 2, backward, gradient, "grad_out", *ctx.saved_tensors, is_causal
        )
        return None, None, None, *gradients[:3]


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attend = attend

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*qkv).transpose(1, 2).flatten(2))


def step(model, x):
    return model(x).square().mean()


def batch(coordinate):
    return (torch.randn(2, 8, WIDTH),)


def prove_ring(mesh, is_causal, is_balanced, backward=go_back_of_part):
    def reference():
        return Attention(partial(F.scaled_dot_product_attention, is_causal=is_causal))

    def parallel(mesh):
        rank, count = mesh.get_local_rank(), mesh.size()

        def step_of_part(model, x):
            parts = x.chunk(2 * count, 1)
            own = parts[2 * rank], parts[2 * rank + 1]
            if is_balanced:
                own = parts[rank], parts[-1 - rank]
            return step(model, torch.cat(own, 1))

        model = Attention(partial(Ring.apply, mesh.get_group(), is_causal, backward))
        return fully_shard(model, mesh=mesh), step_of_part

    options = {"mesh": mesh, "data_dims": (), "loss_dims": ("cp",)}
    with mock.patch.object(ring._cp_options, "enable_load_balance", is_balanced):
        return assert_same_model(parallel, reference, step, batch, **options)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, mesh={"cp": 2})
@pytest.mark.parametrize(
    ("is_causal", "is_balanced"),
    [
        pytest.param(False, False, id="full"),
        pytest.param(True, False, id="causal"),
        pytest.param(True, True, id="balanced"),
    ],
)
def test_a_ring_is_the_whole_attention(gt_mesh, is_causal, is_balanced):
    assert prove_ring(gt_mesh, is_causal, is_balanced).kind == "reordered"


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=4, mesh={"cp": 4})
@pytest.mark.parametrize(
    "is_balanced",
    [
        pytest.param(False, id="causal"),
        pytest.param(True, id="balanced", marks=pytest.mark.long),
    ],
)
def test_a_longer_ring(gt_mesh, is_balanced):
    assert prove_ring(gt_mesh, is_causal=True, is_balanced=is_balanced).kind == "reordered"


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, mesh={"cp": 2})
def test_a_backward_that_forgets_the_other_blocks_is_told(gt_mesh):
    with pytest.raises(AnotherFunction, match=r"gradient of qkv\.weight"):
        prove_ring(gt_mesh, True, False, go_back_of_block)
