"""A second way to end a step forgets the sum of gradients that ranks hold in parts.

NeMo-RL#3716 (2026): norms of queries and keys are replicated, and each tensor rank's gradient is
that of its own heads. One path of training ended in a function that sums them, the other, which was
written later, did not call it: replicas drifted apart step by step, without an error.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pytest_gtrainer import assert_replicas_equal

HEADS, WIDTH = 4, 8


class Queries(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads  # of this rank; they do not train here
        self.q_norm = nn.RMSNorm(WIDTH)

    def forward(self, x):
        return self.q_norm(torch.einsum("ti,hij->htj", x, self.heads))


def all_heads():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(HEADS, WIDTH, WIDTH, generator=generator)


def train(model, group=None):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x).sin().sum().backward()
    if group is not None:
        dist.all_reduce(model.q_norm.weight.grad, group=group)
    with torch.no_grad():
        model.q_norm.weight -= 0.1 * model.q_norm.weight.grad
    return model


def on_rank(mesh, bug):
    model = Queries(all_heads().chunk(2)[mesh.get_local_rank()])
    return train(model, None if bug else mesh.get_group())


def weights(model):
    return {"q_norm.weight": model.q_norm.weight}


@exhibit(
    "NeMo-RL#3716",
    2026,
    kind="reductions",
    found_by="bits",
    raises=AssertionError,
    says="q_norm.weight",
    usual=usual.of_results(
        lambda bug: weights(on_rank(init_device_mesh("cpu", (2,)), bug)),
        lambda: weights(train(Queries(all_heads()))),
        ranks=2,
    ),
)
@pytest.mark.gt_world("ranks", size=2, mesh={"tp": 2})
def test_replicas_stay_alike(gt_mesh, bug):
    assert_replicas_equal(on_rank(gt_mesh, bug), gt_mesh, over="tp")
