"""Ordinary models of the ``transformers`` package, tiny, from a config: parity with resharding,
FSDP2's default.

Skipped where the package is not installed: ``make test-transformers`` installs the extra of that
name and runs this.
"""

import pytest
import torch

from pytest_gtrainer import MixedPrecisionPolicy, TrainConfig, assert_parity
from pytest_gtrainer.graph.suggest import suggest_plan

pytestmark = pytest.mark.second_tier

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "use_cache": False,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ["model.layers.0", "model.layers.1"]
TIED = [*LAYERS, ["model.embed_tokens", "model.norm", "lm_head"]]
UNTIED = ["model.embed_tokens", *LAYERS, ["model.norm", "lm_head"]]
MODELS = {
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 18}, TIED),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}, UNTIED),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"state_size": 4},
        [
            "backbone.layers.0",
            "backbone.layers.1",
            ["backbone.embeddings", "backbone.norm_f", "lm_head"],
        ],
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {},
        [*LAYERS, ["model.embeddings", "model.final_norm", "head", "decoder"]],
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"num_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"},
        UNTIED,
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "moe_intermediate_size": 20,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "qk_nope_head_dim": 10,
            "num_key_value_heads": 2,
            "experts_implementation": "batched_mm",
        },
        UNTIED,
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 36,
            "d_kv": 18,
            "d_ff": 50,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        [
            *("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"),
            [
                *("shared", "encoder.embed_tokens", "encoder.final_layer_norm"),
                *("decoder.embed_tokens", "decoder.final_layer_norm", "lm_head"),
            ],
        ],
    ),
}


def step(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss.float()


def batch(step, rank):
    return (
        torch.randint(
            3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank)
        ),
    )


@pytest.mark.gt_world("ranks", size=3, device="cpu")
@pytest.mark.parametrize("name", MODELS)
def test_parity_with_resharding(name, gt_world, gt_mesh, gt_deterministic):
    """A13, D2: by the plan that is suggested: biases, tied weights, cross-attention, norms and
    experts; OLMoE in bf16.
    """
    transformers = pytest.importorskip(
        "transformers", reason="needs the extra `transformers`: make test-transformers"
    )
    config_name, model_name, changes, plan = MODELS[name]

    def build():
        torch.manual_seed(0)
        config = getattr(transformers, config_name)(**{**SIZES, **changes})
        return getattr(transformers, model_name)(config)

    assert suggest_plan(build()).plan == plan
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if name == "olmoe"
        else MixedPrecisionPolicy()
    )
    config = TrainConfig(
        model=build,
        step=step,
        batch=batch,
        bucket_plan=plan,
        mesh=gt_mesh,
        mp_policy=policy,
        steps=1,
    )
    assert_parity(config, gt_world, reshard_after_forward=True, invisible="report")
