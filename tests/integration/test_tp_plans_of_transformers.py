"""Models of the ``transformers`` package: by the tensor-parallel plans that it has for them, and
compiled.

Skipped where the package is not installed: ``make test-transformers`` installs the extra of that
name and runs this.
"""

from functools import partial

import pytest
import torch

from pytest_gtrainer import AnotherFunction, assert_same_model, gt_compile

pytestmark = pytest.mark.second_tier

VOCABULARY = 18
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "use_cache": False,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 0,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "head_dim": 2,
    "qk_nope_head_dim": 2,
    "v_head_dim": 4,
}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 4}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, **ROUTED}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, **ROUTED}),
    "phi3": ("Phi3Config", {}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
}


@pytest.fixture
def transformers():
    found = pytest.importorskip(
        "transformers", reason="needs the extra `transformers`: make test-transformers"
    )
    pytest.importorskip(
        "transformers.distributed.tensor_parallel",
        reason="this transformers applies its plans in another way than 5.23",
    )
    return found


def unsharded(transformers, name):
    torch.manual_seed(0)
    config, changes = CONFIGS[name]
    config = getattr(transformers, config)(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


def by_its_plan(transformers, name, mesh, without=()):
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = unsharded(transformers, name)
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh["tp"].size()))
    own = {module: style for module, style in plan.items() if style not in without}
    return apply_tensor_parallelism(model, mesh["tp"], own)


def batch(coordinate):
    generator = torch.Generator().manual_seed(coordinate)
    return (torch.randint(3, VOCABULARY, (3, 6), generator=generator),)


def step(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_by_its_own_plan_is_the_unsharded_one(name, transformers, gt_mesh):
    proof = assert_same_model(
        lambda mesh: by_its_plan(transformers, name, mesh),
        partial(unsharded, transformers, name),
        step,
        batch,
        mesh=gt_mesh,
        data_dims=(),
    )
    assert proof.kind == "reordered", str(proof)


@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_a_plan_that_forgets_the_gradients_of_norms_is_told(transformers, gt_mesh):
    """Each rank has the heads of its own, of which the norm of queries sees no others."""
    forgotten = ("replicated_with_grad_allreduce",)
    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(
            lambda mesh: by_its_plan(transformers, "qwen3", mesh, forgotten),
            partial(unsharded, transformers, "qwen3"),
            step,
            batch,
            mesh=gt_mesh,
            data_dims=(),
        )
    assert "self_attn.q_norm.weight" in str(failure.value)
    assert "equal after a sum over 'tp'" in str(failure.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_compiled_model_is_proven_at_each_stage(name, transformers):
    with gt_compile() as record:
        step(torch.compile(unsharded(transformers, name)), *batch(0)).backward()
    proof = record.assert_same_function("reordered")
    assert len(proof.stages) >= 4
