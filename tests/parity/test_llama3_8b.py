"""The joint graph of a published size, on one process: traced, rewritten and pinned."""

import pytest

from fixtures.training import published_llama3_training
from pytest_gtrainer.references.graph import GraphRun

on_64_ranks = pytest.mark.gt_world("fake", size=64, mesh={"fsdp": 64})


@pytest.mark.second_tier
@on_64_ranks
def test_llama3_8b_under_64_ranks_is_pinned(gt_mesh, gt_golden):
    """32 layers, 8 billion parameters, no memory: the meta device and a fake process group."""
    run = GraphRun(published_llama3_training(gt_mesh, "bf16_fp32"))
    layout = run.layout()
    assert [payload.label for payload in layout.of("all_gather")] == [
        "tok_embeddings",
        *(f"layers.{index}" for index in range(32)),
        "norm+lm_head",
    ]
    gt_golden.check(run.traced)
    gt_golden.check(run.traced, "schedule", view="schedule")
    gt_golden.check(layout, "layout")
