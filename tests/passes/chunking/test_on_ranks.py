"""Chunked graphs on real ranks: expert parallelism and sharded parameters, against eager chunking
under FSDP2.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fixtures.chunking import (
    Case,
    check_equals_eager,
    strict,
    train_chunked_graph,
    train_eager_chunked,
)
from fixtures.models import deepseek_v3
from fixtures.models.expert_parallel import apply_expert_parallel
from fixtures.models.loss import ce_step
from fixtures.training import token_batches
from pytest_gtrainer import (
    MixedPrecisionPolicy,
    TrainConfig,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_same_layout,
    get_default_transformer_block_buckets,
)
from pytest_gtrainer.passes.chunking import rewrite
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

pytestmark = pytest.mark.second_tier

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


MODEL = deepseek_v3.DeepSeekV3Config(
    dim=16,
    n_layers=2,
    n_heads=2,
    q_lora_rank=0,
    kv_lora_rank=8,
    ffn_dim=24,
    vocab_size=40,
    moe=deepseek_v3.MoEConfig(n_experts=4, ffn_dim=12),
)


def expert_parallel_model(mesh, config=MODEL):
    """Two layers, the experts of the second one on ``mesh``."""
    model = deepseek_v3.DeepSeekV3(config)
    model.init_weights()
    return apply_expert_parallel(model, mesh)


def training(mesh, policy, chunk):
    """Parameters sharded over all ranks, experts over ``ep``, their slices over ``efsdp``; a batch
    of four a rank.
    """
    return TrainConfig(
        model=lambda: expert_parallel_model(mesh["ep"]),
        step=ce_step,
        batch=token_batches(MODEL.vocab_size, "cpu", batch=4, seq=8),
        bucket_plan=get_default_transformer_block_buckets(2, moe_layers=[1], expert_fsdp_degree=2),
        mesh=mesh._flatten("fsdp"),
        submeshes={"layers.1.moe.routed_experts": mesh["efsdp"]},
        mp_policy=policy,
        chunk=chunk,
        steps=3,
    )


@pytest.mark.gt_world("ranks", size=2, mesh={"ep": 2})
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(strict("layers.*"), id="blocks", marks=pytest.mark.long),
        pytest.param(strict("layers.*.moe", "sequence", 4), id="moe"),
    ],
)
def test_expert_parallelism_on_two_ranks(gt_world, gt_mesh, config):
    """Every rank has other tokens, so every exchange other sizes. In short each way to chunk has
    one of the worlds.
    """
    batch = token_batches(MODEL.vocab_size, "cpu", batch=4, seq=8)
    model = partial(expert_parallel_model, gt_mesh["ep"])
    check_equals_eager(
        Case(model=model, config=config, batch=lambda step: batch(step, gt_world.rank))
    )


@pytest.mark.gt_world("ranks", size=2, mesh={"ep": 2})
def test_gradients_added_first_chunk_first(gt_world, gt_mesh, monkeypatch):
    """G14, the twin: on every rank."""
    batch = token_batches(MODEL.vocab_size, "cpu", batch=4, seq=8)
    case = Case(
        model=partial(
            expert_parallel_model, gt_mesh["ep"], replace(MODEL, n_layers=1, n_dense_layers=0)
        ),
        config=strict("layers.*.moe", "sequence", 4),
        batch=lambda step: batch(step, gt_world.rank),
        steps=1,
    )
    fold = rewrite.Rewrite._fold
    monkeypatch.setattr(
        rewrite.Rewrite, "_fold", lambda self, terms, like: fold(self, terms[::-1], like)
    )
    actual, _ = train_chunked_graph(case)
    assert_bitwise_different(actual, train_eager_chunked(case), what="first chunk first")


@pytest.mark.gt_world("ranks", size=4, mesh={"efsdp": 2, "ep": 2})
@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(strict("layers.*", num_chunks=4), id="blocks"),
        pytest.param(strict("layers.*.moe", "sequence"), id="moe", marks=pytest.mark.long),
    ],
)
def test_expert_parallelism_on_four_ranks_in_bf16(gt_mesh, chunk):
    """Uneven, data-dependent splits; sharded parameters, bucketed; the buffers are FSDP2's. Records
    hold loss, gradients, weights and buffers.
    """
    config = training(gt_mesh, POLICY, chunk)
    eager, graph = EagerRun(config), GraphRun(config)
    assert_bitwise_equal(graph.run(), eager.run(), what="chunked graph against eager chunking")
    assert_same_layout(graph.layout(), eager.layout())
