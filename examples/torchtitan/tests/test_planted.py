"""Faults that graph_trainer once had, put back: each is named."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

from debug_models import names_of_inputs
from torchtitan.experiments.graph_trainer import fsdp_passes, passes
from whole_trainer import config_of, traced_step

from pytest_gtrainer import LayoutDifference, assert_same_layout, bucket_layout, graphtext

# The trainer switches determinism on, and leaves it so.
pytestmark = pytest.mark.usefixtures("gt_deterministic")
LINE = ["--module graph_trainer.llama3", "--config graph_trainer_llama3_debugmodel_sdpa"]
FSDP = [*LINE, "--parallelism.data_parallel_shard_degree 2"]


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
