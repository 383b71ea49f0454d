"""Tensor parallelism adds in another order than one process: how far apart the two may be is
derived, not guessed.

In floating-point numbers of unit roundoff u a sum of n products, added in any order, is off by at
most gamma(n) times the sum of their absolute values, with gamma(n) = n u / (1 - n u); errors of
products of matrices add up as gamma(n + m), and a ReLU passes them on (Higham, Accuracy and
Stability of Numerical Algorithms, 2002, 3.1 and 3.5).
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fixtures.models import deepseek_v3
from fixtures.models.loss import ce_step
from fixtures.training import Parallelism, token_batches

TOKENS, WIDTH, HIDDEN = 6, 24, 40


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def trained(model, x, c):
    """Output, loss and gradients; whole, where a rank has a shard."""
    x = x.clone().requires_grad_()
    y = model(x)
    loss = (y * c).sum()
    loss.backward()
    found = {"output": y, "loss": loss, "gradient of x": x.grad}
    found |= {"up": model.up.weight.grad, "down": model.down.weight.grad}
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }
    return {name: value.detach() for name, value in whole.items()}


def gamma(n):
    u = torch.finfo(torch.float32).eps / 2
    return n * u / (1 - n * u)


def bounds(model, x, c):
    """For each result the largest error of any order of its sums."""
    x, c, up, down = (
        each.detach().double().abs() for each in (x, c, model.up.weight, model.down.weight)
    )
    hidden = x @ up.T  # of absolute values, as all that follows
    output, back = hidden @ down.T, c @ down
    return {
        "output": gamma(WIDTH + HIDDEN) * output,
        "loss": gamma(WIDTH + HIDDEN + TOKENS * WIDTH + 1) * (c * output).sum(),
        "gradient of x": gamma(WIDTH + HIDDEN) * back @ up,
        "up": gamma(WIDTH + TOKENS) * back.T @ x,
        "down": gamma(WIDTH + TOKENS) * c.T @ hidden,
    }


def share_of_bound(found, exact, allowed):
    """Return the largest error by result; 1 is the bound that the order of sums can explain."""
    return {
        name: float(((found[name].double() - exact[name]).abs() / allowed[name]).max())
        for name in exact
    }


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"tp": 2})
def test_it_is_as_close_as_the_order_of_sums_allows(gt_mesh):
    """So is one process; an output whose sum is left out is 1,000 times too far."""
    generator = torch.Generator().manual_seed(1)
    x, c = (torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))
    exact, allowed = trained(Mlp().double(), x.double(), c.double()), bounds(Mlp(), x, c)
    hidden = Mlp().double().up(x.double())
    assert (hidden.abs() > gamma(WIDTH) * (x.abs() @ Mlp().up.weight.abs().T)).all(), (
        "a ReLU may open on one side only"
    )

    def parallel(placement):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=placement)}
        return parallelize_module(Mlp(), gt_mesh["tp"], plan)

    right = trained(parallel(Replicate()), x, c)
    whole = trained(Mlp(), x, c)
    for found in (right, whole):
        shares = share_of_bound(found, exact, allowed)
        assert all(share < 1 for share in shares.values()), shares
    assert any(not torch.equal(right[name], whole[name]) for name in right), (
        "the order of sums does not show"
    )
    # a plan that does not sum what the ranks have computed in part
    wrong = share_of_bound(trained(parallel(Partial()), x, c), exact, allowed)
    assert wrong["output"] > 1000
    assert wrong["loss"] > 10, "its terms have two signs"


def gradients_of(
    tensor, mesh=None, break_it=lambda model: None, prepare=lambda model: None, flavor="debug_small"
):
    """Return the gradients of the whole DeepSeek-V3 in fp64."""
    config = deepseek_v3.FLAVORS[flavor]
    model = deepseek_v3.DeepSeekV3(config)
    model.init_weights(seed=0)
    prepare(model.double())
    Parallelism(tensor).apply(model, {"tp": mesh})
    break_it(model)
    ce_step(model, *token_batches(config.vocab_size, "cpu")(0, 0)).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in found.items()
    }


def distances(found, expected):
    """Return the distance of each gradient, relative to the norm of the expected one."""
    return {
        name: float((found[name] - grad).norm() / grad.norm()) for name, grad in expected.items()
    }


def without_the_sum_over_heads(model):
    """Each rank goes on with its own heads' gradient of the key part that all heads share."""
    for layer in model.layers:
        layer.attention.to_every_head = lambda x: x.to_local()


def without_the_sum_over_parts_of_experts(model):
    """Each rank goes on with what its part of an expert gives."""
    for layer in model.moe_layers():
        layer.routed_experts.run_sorted = type(layer.routed_experts).run_sorted.__get__(
            layer.routed_experts
        )


@pytest.mark.gt_world("ranks", size=2, mesh={"tp": 2})
@pytest.mark.parametrize(
    ("tensor", "mistake", "seen_in"),
    [
        pytest.param({}, None, None, id="tensor"),
        pytest.param(
            {"sequence": True},
            without_the_sum_over_heads,
            "layers.0.attention.wkv_a.weight",
            id="sequence",
        ),
        pytest.param(
            {"experts": True},
            without_the_sum_over_parts_of_experts,
            "layers.1.moe.routed_experts.w1",
            id="experts",
        ),
    ],
)
def test_latent_attention_and_experts_compute_what_the_whole_model_computes(
    gt_mesh, tensor, mistake, seen_in
):
    """Every gradient of DeepSeek-V3, but for the roundings of its norms and routers, which compute
    in fp32.

    If a sum is left out, a gradient is off by more than a hundredth of its length.
    """
    whole = gradients_of(None)
    right = distances(gradients_of(tensor, gt_mesh["tp"]), whole)
    assert max(right.values()) < 1e-5, right
    if mistake is not None:
        assert distances(gradients_of(tensor, gt_mesh["tp"], mistake), whole)[seen_in] > 1e-2
