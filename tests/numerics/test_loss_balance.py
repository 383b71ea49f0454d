"""The mean over all tokens from ranks with different numbers of tokens."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fixtures.training import deepseek_v3_training
from pytest_gtrainer import (
    DebugConfig,
    assert_bitwise_different,
    assert_bitwise_equal,
    balanced_loss,
    trace_step,
)
from pytest_gtrainer._torch import passes

COUNTS = (3, 8, 5)  # tokens a rank


def tokens_of(rank: int, *, exact: bool = False) -> torch.Tensor:
    """``[tokens, 4]``, with ``exact`` small whole numbers, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(COUNTS[rank % 3], 4, generator=generator)
    return (values * 4).round() if exact else values


def gradient(weight: torch.Tensor, share) -> torch.Tensor:
    """Return the gradient averaged over ranks, of the losses ``share(per-token losses)``."""
    weight = weight.clone().requires_grad_()
    share((tokens_of(dist.get_rank()) @ weight).square()).backward()
    dist.all_reduce(weight.grad, dist.ReduceOp.SUM)
    return weight.grad / dist.get_world_size()


def alone(weight: torch.Tensor, *, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient on one rank that has all tokens."""
    weight = weight.clone().requires_grad_()
    loss = (torch.cat([tokens_of(rank, exact=exact) for rank in range(3)]) @ weight).square().mean()
    loss.backward()
    return loss.detach(), weight.grad


@pytest.mark.gt_world("ranks", size=3)
def test_averaged_gradients_are_those_of_the_global_mean_within_the_bound(gt_world):
    weight = torch.tensor([0.3, -1.7, 0.9, 2.2])
    ours = gradient(weight, lambda losses: balanced_loss(losses.sum(), len(losses)))
    _, expected = alone(weight)
    x = torch.cat([tokens_of(rank) for rank in range(3)])
    terms = 2 * (x * (x @ weight).unsqueeze(1)).abs().mean(0)  # what is added up, without signs
    bound = 32 * torch.finfo(torch.float32).eps * terms
    assert ((ours - expected).abs() <= bound).all()
    naive = gradient(weight, torch.mean)
    assert ((naive - expected).abs() > 1000 * bound).any(), (
        "the twin: a mean per rank is something else"
    )


@pytest.mark.gt_world("ranks", size=3)
def test_shares_add_up_to_the_global_mean(gt_world):
    """Whole numbers over 16 tokens: all sums and quotients are exact, as on one rank."""
    weight = torch.tensor([1.0, -2.0, 1.0, 3.0])
    loss, _ = alone(weight, exact=True)

    def added_up(share) -> torch.Tensor:
        losses = (tokens_of(gt_world.rank, exact=True) @ weight).square()
        return dist_sum(share(losses))

    assert_bitwise_equal(added_up(lambda x: balanced_loss(x.sum(), len(x), gradients="sum")), loss)
    assert_bitwise_equal(added_up(lambda x: balanced_loss(x.sum(), len(x))), loss * 3)
    assert_bitwise_different(added_up(lambda x: x.mean() / 3), loss, what="a mean per rank")


def dist_sum(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=4)
def test_with_equal_counts_it_is_the_local_mean_bit_for_bit(gt_world):
    losses = torch.randn(7, generator=torch.Generator().manual_seed(gt_world.rank)).square()
    assert_bitwise_equal(balanced_loss(losses.sum(), 7), losses.sum() / 7)
    assert_bitwise_different(balanced_loss(losses.sum(), 7 + gt_world.rank), losses.sum() / 7)


@pytest.mark.gt_world("ranks", size=2)
def test_a_rank_without_tokens_has_no_share(gt_world):
    losses = torch.ones(4 * gt_world.rank)
    assert balanced_loss(losses.sum(), losses.numel()).item() == 2.0 * gt_world.rank


@pytest.mark.gt_world("ranks", size=4, mesh={"dp": 2, "tp": 2})
def test_tokens_of_a_group_are_counted_exactly(gt_world, gt_mesh):
    """More than fp32 can count; the ranks of another group have others and are not asked."""
    counts = [2**24 + 1, 5, 2**24, 7]
    group = [rank for rank in range(4) if rank % 2 == gt_world.rank % 2]
    assert torch.distributed.get_process_group_ranks(gt_mesh.get_group("dp")) == group
    one = torch.tensor(1.0, dtype=torch.float64)
    for gradients, factor in (("sum", 1), ("avg", 2)):
        share = balanced_loss(
            one, counts[gt_world.rank], gt_mesh.get_group("dp"), gradients=gradients
        )
        assert share.item() == factor / sum(counts[rank] for rank in group)


@pytest.mark.parametrize(
    ("dtype", "loss", "tokens"),
    [
        (torch.float16, 60000.0, 6),
        (torch.float16, 3.0517578125e-05, 4),  # a share of its mean is too small for fp16
        (torch.bfloat16, 3e38, 4),
        (torch.float32, 1e38, 3),
    ],
)
@pytest.mark.gt_world("fake", size=8)
def test_no_number_on_the_way_is_out_of_range(gt_world, dtype, loss, tokens, monkeypatch):
    """Eight ranks have equally many tokens: a fake all-reduce leaves the count."""
    all_reduce = passes.functional_collectives.all_reduce
    monkeypatch.setattr(
        passes.functional_collectives, "all_reduce", lambda *args: all_reduce(*args) * 8
    )
    loss_sum = torch.tensor(loss, dtype=dtype)
    assert_bitwise_equal(balanced_loss(loss_sum, tokens), loss_sum / tokens)


@pytest.mark.gt_world("fake", size=8)
def test_it_can_be_traced(gt_world):
    model = torch.nn.Linear(4, 4)

    def step(model, x):
        return balanced_loss(F.relu(model(x)).sum(), x.shape[0])

    targets = [
        str(node.target) for node in trace_step(model, step, (torch.ones(3, 4),)).gm.graph.nodes
    ]
    assert targets.count("_c10d_functional.all_reduce.default") == 1


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (torch.ones(2), {}, "a scalar; not"),
        (torch.ones(()), {"gradients": "mean"}, "by 'avg' or 'sum'; not 'mean'"),
    ],
)
def test_bad_input(loss, options, message):
    with pytest.raises(ValueError, match=message):
        balanced_loss(loss, 1, **options)


@pytest.mark.gt_world("fake", size=2, mesh={"fsdp": 2})
def test_the_debug_configuration_balances_the_experts_of_deepseek_v3(gt_mesh):
    """K5: counts differ by at most one in every layer; without it they do not."""

    def spread(debug: DebugConfig) -> int:
        config = deepseek_v3_training(gt_mesh, "fp32", debug=debug)
        model = config.model()
        config.step(model, *config.batch(0, 0))
        counts = torch.stack([moe.tokens_per_expert for moe in model.moe_layers()])
        return int((counts.max(1).values - counts.min(1).values).max())

    assert spread(DebugConfig(moe_force_load_balance=True)) <= 1
    assert spread(DebugConfig()) > 1
