"""DeepSeek-V3 under a fake world: traced with its twin, chunked, scheduled, bucketed and pinned,
folded.
"""

from dataclasses import replace

import pytest
import torch

from fixtures.models import deepseek_v3
from fixtures.models.expert_parallel import apply_expert_parallel
from fixtures.models.loss import ce_step
from fixtures.training import PRECISIONS
from pytest_gtrainer import (
    ChunkConfig,
    apply_graph_passes,
    construct_default_graph_passes,
    data_parallel,
    trace_step,
)
from pytest_gtrainer.graph.nodes import BODY, chunk_annotation, direction

CHUNKS = ChunkConfig("layers.*.moe", num_chunks=2)


def sharded(config, mesh):
    """Experts over ``ep``, their slices over ``efsdp``, everything else over all ranks; nothing is
    allocated.
    """
    with torch.device("meta"):
        model = deepseek_v3.DeepSeekV3(config)
        apply_expert_parallel(model, mesh["ep"])
    policy = PRECISIONS["bf16_fp32"]
    for layer in model.moe_layers():
        data_parallel(
            layer.routed_experts,
            mesh["efsdp"],
            mp_policy=policy,
            gradient_divide_factor=float(mesh.size()),
        )
    return data_parallel(model, mesh._flatten("fsdp"), mp_policy=policy)


def rewritten(config, mesh, seq):
    """The step traced, chunked, scheduled and bucketed."""
    tokens = torch.zeros(4, seq, dtype=torch.int64, device="meta")
    traced = trace_step(sharded(config, mesh), ce_step, (tokens, tokens), chunk=CHUNKS)
    passes = construct_default_graph_passes(
        n_layers=config.n_layers,
        moe_layers=range(config.n_dense_layers, config.n_layers),
        expert_fsdp_degree=mesh["efsdp"].size(),
        chunk=CHUNKS,
        schedule_chunks=True,
    )
    return apply_graph_passes(traced.gm, traced.example_inputs, passes, twin=traced.twin)


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=8, mesh={"efsdp": 2, "ep": 4})
def test_a_small_one(gt_mesh, gt_golden):
    """The short form, every operator: a dense layer and three MoE layers."""
    gt_golden.check(rewritten(replace(deepseek_v3.FLAVORS["debug"], n_layers=4), gt_mesh, 16))


@pytest.mark.long
@pytest.mark.gt_world("fake", size=512, mesh={"efsdp": 8, "ep": 64})
def test_the_published_one(gt_mesh, gt_golden):
    """61 layers, 671 billion parameters: every exchange, gather and reduction, and what is computed
    between them.

    Its operators one by one would be 3,600 lines, whatever the number of layers: parameters whose
    first extent 512 ranks do not divide are padded, gradient by gradient.
    """
    config = deepseek_v3.FLAVORS["671B"]
    gm = rewritten(config, gt_mesh, 4096)
    chunked = {
        (f"layers.{index}.moe", way)
        for index in range(3, config.n_layers)
        for way in ("fwd", "bwd")
    }
    found = [(chunk_annotation(node.meta.get("custom") or {}), node) for node in gm.graph.nodes]
    assert {
        (each.fqn, direction(node))
        for each, node in found
        if each is not None and each.role == BODY
    } == chunked
    gt_golden.check(gm, view="schedule")
