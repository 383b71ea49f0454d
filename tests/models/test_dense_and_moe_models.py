"""Promises of both architectures: names, order, shapes, initial values, gradients, sizes."""

import pytest
import torch

from fixtures.models import deepseek_v3, llama3
from fixtures.models.loss import ce_step
from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, trace_step

DEBUG = ["llama3/debug", "llama3/debug_odd", "deepseek_v3/debug", "deepseek_v3/debug_odd"]
LLAMA3_LAYER = [
    "attention.wq.weight",
    "attention.wk.weight",
    "attention.wv.weight",
    "attention.wo.weight",
    "feed_forward.w1.weight",
    "feed_forward.w2.weight",
    "feed_forward.w3.weight",
    "attention_norm.weight",
    "ffn_norm.weight",
]
MOE_LAYER = [
    "attention.wq_a.weight",
    "attention.q_norm.weight",
    "attention.wq_b.weight",
    "attention.wkv_a.weight",
    "attention.kv_norm.weight",
    "attention.wkv_b.weight",
    "attention.wo.weight",
    "moe.routed_experts.w1",
    "moe.routed_experts.w2",
    "moe.routed_experts.w3",
    "moe.router.gate.weight",
    "moe.shared_experts.w1.weight",
    "moe.shared_experts.w2.weight",
    "moe.shared_experts.w3.weight",
    "attention_norm.weight",
    "ffn_norm.weight",
]


@pytest.mark.parametrize("flavor", DEBUG)
def test_tokens_become_logits_and_hidden_states(build, batch, flavor):
    model, (tokens, _) = build(flavor), batch
    assert model(tokens).shape == (8, 16, model.config.vocab_size)
    assert model(tokens, skip_lm_head=True).shape == (8, 16, model.config.dim)


@pytest.mark.parametrize(
    ("flavor", "layer", "names"),
    [("llama3/debug", 0, LLAMA3_LAYER), ("deepseek_v3/debug", 1, MOE_LAYER)],
)
def test_parameters_have_the_names_and_registration_order_of_the_field(build, flavor, layer, names):
    prefix = f"layers.{layer}."
    all_names = [name for name, _ in build(flavor).named_parameters()]
    assert [name.removeprefix(prefix) for name in all_names if name.startswith(prefix)] == names
    assert (all_names[0], all_names[-2:]) == (
        "tok_embeddings.weight",
        ["norm.weight", "lm_head.weight"],
    )


@pytest.mark.parametrize("flavor", ["llama3/debug", "deepseek_v3/debug"])
def test_registration_order_is_not_execution_order(build, batch, flavor):
    model, executed = build(flavor), []
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_, name=name: executed.append(name))
    model(batch[0])
    registered = [name for name, module in model.named_modules() if name in executed]
    assert sorted(executed) == sorted(registered), "every module with parameters runs once"
    assert executed != registered
    w1, w2, w3 = (executed.index(f"layers.0.feed_forward.w{i}") for i in (1, 2, 3))
    assert w1 < w3 < w2


@pytest.mark.parametrize("flavor", DEBUG)
def test_initial_values_depend_on_the_seed_alone(build, flavor):
    first = build(flavor)
    torch.manual_seed(1234)
    state = first.state_dict()
    assert_bitwise_equal(build(flavor).state_dict(), state, what="the same seed")
    assert_bitwise_different(build(flavor, seed=1).state_dict(), state, what="another seed")


def test_a_parameter_is_initialised_alike_in_models_of_other_depth():
    """The value is a function of seed and name: what a rank or a device does before has no part in
    it.
    """
    models = [llama3.Llama3(llama3.Llama3Config(n_layers=n)) for n in (1, 3)]
    for model in models:
        model.init_weights(5)
    shallow, deep = (dict(model.named_parameters()) for model in models)
    assert_bitwise_equal(
        {n: p.detach() for n, p in shallow.items()}, {n: deep[n].detach() for n in shallow}
    )
    one, other = deep["layers.0.attention.wk.weight"], deep["layers.1.attention.wk.weight"]
    assert not torch.equal(one, other), "two layers are not alike"


@pytest.mark.parametrize("flavor", ["llama3/debug", "deepseek_v3/debug"])
def test_init_weights_repairs_buffers_of_a_model_made_without_storage(build, flavor):
    fresh = build(flavor)
    with torch.device("meta"):
        model = type(fresh)(fresh.config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(7)
    model.init_weights(0)
    assert_bitwise_equal(dict(model.named_buffers()), dict(fresh.named_buffers()))


@pytest.mark.parametrize("flavor", DEBUG)
def test_gradients_reach_every_parameter(build, batch, run_step, flavor):
    results = run_step(build(flavor), ce_step, batch)
    assert [
        name for name, value in results.items() if value is None or not value.abs().sum() > 0
    ] == []
    assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize("flavor", ["llama3/debug", "deepseek_v3/debug"])
def test_a_token_sees_only_what_comes_before_it(build, batch, flavor):
    model, (tokens, _) = build(flavor), batch
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 136
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all(), (
        "the token and all after it see the change"
    )


@pytest.mark.parametrize("flavor", DEBUG)
def test_a_model_in_bf16_returns_bf16(build, batch, flavor):
    assert build(flavor).bfloat16()(batch[0]).dtype is torch.bfloat16


@pytest.mark.second_tier("deepseek_v3")
@pytest.mark.parametrize("flavor", ["llama3/debug_odd", "deepseek_v3/debug_odd"])
def test_the_traced_step_equals_the_eager_one(build, batch, run_step, flavor):
    """Loss, gradients and buffers, data-dependent sizes included."""
    model, replayed = build(flavor), build(flavor)
    expected = run_step(model, ce_step, batch)
    traced = trace_step(build(flavor), ce_step, batch)
    actual = {"loss": traced.replay(replayed, *batch)} | {
        n: p.grad for n, p in replayed.named_parameters()
    }
    assert_bitwise_equal(actual, expected, what="traced against eager")
    assert_bitwise_equal(
        dict(replayed.named_buffers()), dict(model.named_buffers()), what="buffers"
    )
    assert_bitwise_different(
        traced.replay(replayed, batch[0], batch[1].flip(1)), expected["loss"], what="other labels"
    )


@pytest.mark.second_tier("671B")
@pytest.mark.parametrize(
    ("model", "config", "published", "tolerance"),
    [
        (llama3.Llama3, llama3.FLAVORS["8B"], 8.03e9, 0.005),
        (llama3.Llama3, llama3.FLAVORS["70B"], 70.6e9, 0.005),
        (llama3.Llama3, llama3.FLAVORS["405B"], 405.9e9, 0.005),
        (deepseek_v3.DeepSeekV3, deepseek_v3.FLAVORS["16B"], 15.7e9, 0.015),
        (deepseek_v3.DeepSeekV3, deepseek_v3.FLAVORS["671B"], 671e9, 0.015),
    ],
    ids=["8B", "70B", "405B", "16B", "671B"],
)
def test_published_sizes_without_storage(model, config, published, tolerance):
    with torch.device("meta"):
        built = model(config)
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
    assert sum(p.numel() for p in built.parameters()) == pytest.approx(published, rel=tolerance)
