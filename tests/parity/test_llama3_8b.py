"""The joint graph of a published size, on one process: traced, rewritten and pinned."""

import pytest

from fixtures.training import published_llama3_training
from pytest_gtrainer import bucket_layout, trace_step
from pytest_gtrainer.graphtext import render
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import GraphRun, rewrite, shard_traceably

on_64_ranks = pytest.mark.gt_world("fake", size=64, mesh={"fsdp": 64})


def stamped(config):
    """The rewritten step, of whose 32 layers four are traced."""
    model = shard_traceably(new_model(config), config)
    traced = trace_step(model, config.step, config.inputs(0), repeat_layers="auto")
    assert [run.units for run in traced.repeated.stamped] == [32], traced.repeated.full
    return rewrite(traced, config)


@on_64_ranks
def test_llama3_8b_under_64_ranks_is_pinned(gt_mesh, gt_golden):
    """32 layers, 8 billion parameters, no memory: the meta device and a fake process group."""
    traced = stamped(published_llama3_training(gt_mesh, "bf16_fp32"))
    layout = bucket_layout(traced.gm)
    assert [payload.label for payload in layout.of("all_gather")] == [
        "tok_embeddings",
        *(f"layers.{index}" for index in range(32)),
        "norm+lm_head",
    ]
    gt_golden.check(traced)
    gt_golden.check(traced, "schedule", view="schedule")
    gt_golden.check(layout, "layout")


@on_64_ranks
def test_all_layers_traced_are_those_that_were_stamped(gt_mesh):
    config = published_llama3_training(gt_mesh, "bf16_fp32")
    full, made = GraphRun(config), stamped(config).gm
    assert render(full.traced.gm) == render(made)
    assert str(full.layout()) == str(bucket_layout(made))
