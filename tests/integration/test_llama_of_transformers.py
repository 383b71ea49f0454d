"""The Llama of the ``transformers`` package: not our model, not our module names, a plan by hand.

Skipped where the package is not installed: ``make test-transformers`` installs the extra of that
name and runs this.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fixtures.pages import follow
from pytest_gtrainer import (
    MixedPrecisionPolicy,
    TrainConfig,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_same_layout,
    bucket_layout,
)
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

pytestmark = pytest.mark.second_tier

PLAN = ["model.embed_tokens", "model.layers.0", "model.layers.1", ["model.norm", "lm_head"]]
VOCABULARY = 61


@pytest.fixture
def llama():
    """``llama()``: two layers with random weights, equal at every call; 3 ranks pad what is 61 or
    50.

    Attention is the package's "eager" one: its "sdpa" takes another path where it sees fake
    tensors, so that a trace of grouped queries has other operators than the eager run, and in bf16
    other bits.
    """
    transformers = pytest.importorskip(
        "transformers", reason="needs the extra `transformers`: make test-transformers"
    )
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        use_cache=False,
        attn_implementation="eager",
    )

    def build():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    return build


def next_token_step(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch(step, rank):
    return (
        torch.randint(
            0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank)
        ),
    )


@pytest.mark.gt_world("ranks", size=3, device="cpu")
def test_a_plan_by_hand_gives_fully_shards_layout_and_bits(llama, gt_mesh):
    """B5, B6, D2, D4: each layer is one payload a direction, where ``fully_shard`` has it; two
    steps, every bit.

    The twin reduces gradients in bf16 (L5).
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    config = TrainConfig(
        model=llama,
        step=next_token_step,
        batch=batch,
        bucket_plan=PLAN,
        mesh=gt_mesh,
        mp_policy=policy,
        steps=2,
    )
    eager, graph = EagerRun(config), GraphRun(config)
    expected = eager.run()
    layout = bucket_layout(graph.traced.gm)
    assert len(layout.of("all_gather")) == len(layout.of("reduce_scatter")) == len(PLAN)
    assert_same_layout(layout, eager.layout())
    assert_bitwise_equal(graph.run(), expected)
    narrow = replace(config, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    assert_bitwise_different(GraphRun(narrow).run(), expected)


def test_the_how_to_is_followed(llama, tmp_path):
    page, section = Path(__file__).parents[2] / "docs" / "tutorial.md", "A model of transformers"
    assert follow(page, tmp_path, Path(sys.executable).parent, section) == 4
