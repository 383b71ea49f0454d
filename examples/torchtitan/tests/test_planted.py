"""Faults that graph_trainer once had, put back: each is named."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

import torch
from debug_models import names_of_inputs
from flavours import line_of
from torchtitan.experiments.graph_trainer import (
    common_utils,
    ep_chunk_pass,
    fsdp_passes,
    memory_policy,
    passes,
)
from torchtitan.experiments.graph_trainer.memory_policy import CheckpointPolicy
from whole_trainer import config_of, traced_step

from pytest_gtrainer import (
    CheckFailure,
    LayoutDifference,
    assert_graph,
    assert_same_layout,
    bucket_layout,
    graphtext,
)

# The trainer switches determinism on, and leaves it so.
pytestmark = pytest.mark.usefixtures("gt_deterministic")
LINE = ["--module graph_trainer.llama3", "--config graph_trainer_llama3_debugmodel_sdpa"]
FSDP = [*LINE, "--parallelism.data_parallel_shard_degree 2"]
TP = ("--parallelism.tensor_parallel_degree", "2")


def traced(folder, *more):
    config = config_of([*FSDP, *more], folder)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    return traced_step(config)


def layout_of(step):
    return bucket_layout(step.gm, names=names_of_inputs(step))


@pytest.mark.gt_world("fake", size=2)
def test_payloads_in_order_of_execution(gt_world, tmp_path, monkeypatch):
    """Eager FSDP2 packs in the order of registration; on several nodes another order has other bits."""
    expected = layout_of(traced(tmp_path))
    monkeypatch.setattr(passes, "get_fsdp_param_module_order", lambda names: {})
    with pytest.raises(LayoutDifference, match=r"bucket 'layers\.\d', .* sits at byte"):
        assert_same_layout(layout_of(traced(tmp_path)), expected)


@pytest.mark.gt_world("fake", size=2)
def test_a_group_of_an_ended_world(gt_world, tmp_path, monkeypatch):
    """A table that outlives a world gives its groups to the next one."""
    step = traced(tmp_path, "--compile.enable_fsdp_ag_rs_overlap")
    graphtext.render(step.gm, view="schedule")
    table = fsdp_passes._EXTRA_FSDP_PG_REGISTRY
    assert table
    for source in list(table):
        monkeypatch.setitem(table, source, "of_an_ended_world")
    with pytest.raises(RuntimeError, match="of_an_ended_world"):
        traced(tmp_path, "--compile.enable_fsdp_ag_rs_overlap")


@pytest.mark.gt_world("fake", size=4)
def test_the_loss_outside_of_the_last_bucket(gt_world, tmp_path, monkeypatch):
    """Under tensor parallelism each of the 8 chunks reduces its loss three times: in the bucket 3 times in all."""
    reduced = "count 3 all_reduce in fwd bucket(norm, lm_head, loss)"
    assert_graph(traced(tmp_path, *TP), reduced)
    plan_of = common_utils.get_default_transformer_block_buckets

    def without_the_loss(layers, **options):
        return plan_of(layers, **options | {"chunked_loss_enabled": False})

    monkeypatch.setattr(common_utils, "get_default_transformer_block_buckets", without_the_loss)
    alone = traced(tmp_path, *TP)
    with pytest.raises(CheckFailure, match="bucket"):
        assert_graph(alone, reduced)
    assert_graph(alone, "count 24 all_reduce in fwd loss")


@pytest.mark.gt_world("fake", size=4)
def test_a_gather_of_the_norm_that_nobody_needs(gt_world, tmp_path, monkeypatch):
    """Eager FSDP2 keeps the last norm behind the forward. 0.3.0 recomputes it, under tensor parallelism."""
    once = "count 1 all_gather_into_tensor_out in bucket(norm, lm_head, loss)"
    with pytest.raises(CheckFailure, match="all_gather_into_tensor_out"):
        assert_graph(traced(tmp_path, *TP), once)
    tag = memory_policy.tag_sac_policy

    def keep_the_norm(gm, **options):
        gm = tag(gm, **options)
        for node in gm.graph.nodes:
            if "recompute" in node.meta and node.meta.get("custom", {}).get("module_fqn") == "norm":
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return gm

    monkeypatch.setattr(memory_policy, "tag_sac_policy", keep_the_norm)
    assert_graph(traced(tmp_path, *TP), once)


@pytest.mark.usefixtures("gt_dense_flex_attention")
@pytest.mark.gt_world("fake", size=4)
def test_a_chunk_with_the_literals_of_the_whole_batch(gt_world, tmp_path, monkeypatch):
    """Each of two chunks has one of two sequences: a view of both is of no chunk."""
    line = line_of(
        "aot_fx_trace_deepseek_v3_flexattn_regional_inductor_ep_overlap_transformer_batch"
    )
    fewer = ("--parallelism.data_parallel_shard_degree", "4")

    def chunked():
        torch._dynamo.reset()
        config = config_of(line, tmp_path, *fewer)
        config.model_spec.model.layers = config.model_spec.model.layers[1:2]
        config.loss.num_chunks = 2
        return traced_step(config)

    never = "count 0 reshape in layers.0.attention -> [2, 64, ...]"
    assert_graph(chunked(), never)
    monkeypatch.setattr(ep_chunk_pass, "_chunk_symbol_subs", lambda hints: {s: s for s in hints})
    with pytest.raises(CheckFailure, match=r"layers\[0\] \| L.attention.wq .*aten.reshape"):
        assert_graph(chunked(), never)
