"""The Mixtral of the ``transformers`` package: experts in one parameter, a router, a plan by hand.

Skipped where the package is not installed: ``make test-transformers`` installs the extra of that
name and runs this.
"""

from dataclasses import replace

import pytest
import torch

from pytest_gtrainer import (
    TrainConfig,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_same_layout,
    bucket_layout,
)
from pytest_gtrainer.graph.layout import LayoutDifference
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

PLAN = ["model.embed_tokens", "model.layers.0", "model.layers.1", ["model.norm", "lm_head"]]
VOCABULARY = 61


@pytest.fixture
def mixtral():
    """``mixtral()``: two layers of three experts with random weights, equal at every call.

    Experts by the package's "batched_mm": its "eager" looks which experts have tokens, which no
    trace of shapes knows, and its "grouped_mm" takes bf16 only.
    """
    transformers = pytest.importorskip(
        "transformers", reason="needs the extra `transformers`: make test-transformers"
    )
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=37,  # 3 ranks pad it
        head_dim=20,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        use_cache=False,
        attn_implementation="eager",
        experts_implementation="batched_mm",
    )

    def build():
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(config)

    return build


def next_token_step(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step, rank):
    return (
        torch.randint(
            0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank)
        ),
    )


@pytest.mark.gt_world("ranks", size=3, device="cpu")
def test_a_plan_by_hand_gives_fully_shards_layout_and_bits(mixtral, gt_mesh, gt_deterministic):
    """B5, B6, D2, D4: each layer with its experts is one payload a direction; two steps, every bit.

    The twins: payloads in the order of execution, whose bits are equal here, have another layout;
    and other bits differ. Deterministic, as threads add up the tokens of several experts in any
    order otherwise, eagerly, too.
    """
    config = TrainConfig(
        model=mixtral, step=next_token_step, batch=batch, bucket_plan=PLAN, mesh=gt_mesh, steps=2
    )
    eager, graph = EagerRun(config), GraphRun(config)
    expected = eager.run()
    layout = bucket_layout(graph.traced.gm)
    assert len(layout.of("all_gather")) == len(layout.of("reduce_scatter")) == len(PLAN)
    assert_same_layout(layout, eager.layout())
    assert_bitwise_equal(graph.run(), expected)
    with pytest.raises(LayoutDifference):
        assert_same_layout(graph.rewritten(payload_order="execution").layout(), eager.layout())
    dealt_otherwise = replace(config, batch=lambda step, rank: batch(step, 2 - rank))
    assert_bitwise_different(EagerRun(dealt_otherwise).run(), expected)
