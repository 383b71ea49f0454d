"""deepseek_v3's MoE layers: routing, counts, bias, shared and routed experts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fixtures.models.deepseek_v3 import FLAVORS, DeepSeekV3
from fixtures.models.moe import MoE, MoEConfig, balanced_choice, limit_groups
from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal


@pytest.fixture
def layer(build) -> MoE:
    return build("deepseek_v3/debug").layers[1].moe


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(3))


def by_hand(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """The definition, token by token: ``[batch, seq, dim]``."""
    w1, w2, w3 = layer.routed_experts.parameters()
    out = []
    for token in x.flatten(0, 1):
        scores = layer.router.gate(token).sigmoid()
        chosen = (scores + layer.expert_bias).topk(layer.config.top_k).indices.tolist()
        terms = [scores[e] * (w2[e] @ (F.silu(w1[e] @ token) * (w3[e] @ token))) for e in chosen]
        out.append(sum(terms) / scores[chosen].sum() + layer.shared_experts(token))
    return torch.stack(out).unflatten(0, x.shape[:2])


def test_the_layer_is_what_its_definition_says(layer, x):
    layer.expert_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    torch.testing.assert_close(layer(x), by_hand(layer, x))


def test_the_first_layers_are_dense():
    model = DeepSeekV3(replace(FLAVORS["debug"], n_layers=4, n_dense_layers=2))
    assert [block.is_moe for block in model.layers] == [False, False, True, True]
    assert len(model.moe_layers()) == 2


def test_every_parameter_of_a_moe_layer_lies_in_one_of_its_two_buckets(layer, build):
    """B3."""
    dense = ("attention_norm", "attention", "ffn_norm", "moe.router", "moe.shared_experts")
    names = [name for name, _ in build("deepseek_v3/debug").layers[1].named_parameters()]
    homes = {
        name: [b for b in (*dense, "moe.routed_experts") if name.startswith(f"{b}.")]
        for name in names
    }
    assert {name: home for name, home in homes.items() if len(home) != 1} == {}


def test_counts_add_up_over_forward_passes(layer, x):
    layer(x)
    once = layer.tokens_per_expert.clone()
    assert once.sum() == 2 * 16 * 2
    layer(x)
    assert_bitwise_equal(layer.tokens_per_expert, once * 2)


def test_counts_are_of_the_chosen_experts(layer, x):
    chosen = layer.router(x.flatten(0, 1)).topk(2).indices.flatten()
    layer(x)
    assert_bitwise_equal(layer.tokens_per_expert, torch.bincount(chosen, minlength=8))


def test_the_expert_bias_decides_the_choice(layer, x):
    layer.expert_bias[5] = 100.0
    layer(x)
    assert layer.tokens_per_expert[5] == 32


def test_the_expert_bias_is_not_part_of_the_weights(layer, x):
    """A bias equal for all experts changes no choice, hence nothing."""
    before = layer(x)
    layer.expert_bias.fill_(0.5)
    assert_bitwise_equal(layer(x), before)
    layer.expert_bias[:4] -= 0.25
    assert_bitwise_different(layer(x), before)


def test_an_expert_without_rows_gets_a_gradient_of_zeros(layer, x):
    layer.expert_bias[3] = -100.0
    layer(x).sum().backward()
    assert layer.tokens_per_expert[3] == 0
    assert layer.routed_experts.w1.grad[3].abs().sum() == 0
    assert (layer.routed_experts.w1.grad.abs().sum((1, 2)) > 0).sum() == 7


def test_scores_stay_fp32_in_a_bf16_model(layer, x):
    assert layer.bfloat16().router(x.bfloat16().flatten(0, 1)).dtype is torch.float32
    assert layer(x.bfloat16()).dtype is torch.bfloat16


def test_softmax_scores_without_normalisation(x):
    layer = MoE(64, MoEConfig(score="softmax", normalize=False, scale=2.0))
    scores = layer.router(x.flatten(0, 1))
    torch.testing.assert_close(scores.sum(-1), torch.ones(32))
    chosen = scores.topk(2).indices
    torch.testing.assert_close(layer._weights(scores, chosen), scores.gather(1, chosen) * 2)


def test_normalised_weights_add_up_to_the_scale(x):
    layer = MoE(64, MoEConfig(scale=2.5))
    scores = layer.router(x.flatten(0, 1))
    torch.testing.assert_close(
        layer._weights(scores, scores.topk(2).indices).sum(-1), torch.full((32,), 2.5)
    )


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(32, 2, 8), (7, 3, 8), (1, 1, 4), (5, 2, 3)]
)
def test_forced_balance_differs_by_at_most_one(tokens, top_k, experts):
    """K5."""
    chosen = balanced_choice(tokens, top_k, experts, torch.device("cpu"))
    assert chosen.flatten().tolist() == [i % experts for i in range(tokens * top_k)]
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    assert counts.max() - counts.min() <= 1


def test_a_layer_with_forced_balance_ignores_its_scores(x):
    """K5."""
    layer = MoE(64, MoEConfig(force_load_balance=True))
    layer.expert_bias[0] = 100.0
    layer(x)
    assert layer.tokens_per_expert.tolist() == [8] * 8


def test_a_token_chooses_within_its_best_groups():
    """Groups of two experts; the sum of the two decides, not the single best."""
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.4, 0.45, 0.1, 0.1]])
    limited = limit_groups(scores, n_groups=4, n_limited=2)
    assert limited.isfinite().tolist() == [[True, True, True, True, False, False, False, False]]
    assert limit_groups(scores, 4, 1).isfinite().tolist() == [
        [False, False, True, True] + [False] * 4
    ]
    assert limit_groups(scores, 4, 4) is scores


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "relu"}, "not 'relu'"),
        ({"top_k": 9}, "1 to 8 experts; not 9"),
        ({"n_groups": 3}, "do not divide into 3 groups"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**options)
