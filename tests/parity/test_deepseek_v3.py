"""The main job on DeepSeek-V3, with and without expert parallelism."""

import pytest

from fixtures.training import PRECISIONS, deepseek_v3_training
from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, assert_same_layout
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

on_eight_ranks = pytest.mark.gt_world("ranks", size=8, mesh={"fsdp": 8})
with_expert_parallelism = pytest.mark.gt_world("ranks", size=8, mesh={"efsdp": 4, "ep": 2})


def check_parity(config):
    eager, graph = EagerRun(config), GraphRun(config)
    expected, actual = eager.run(), graph.run()
    assert_same_layout(graph.layout(), eager.layout())
    assert_bitwise_equal(actual, expected)
    return graph


@on_eight_ranks
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_equals_eager_fsdp2(gt_mesh, pin, precision):
    """Routed experts and the rest of a layer in two buckets (B3)."""
    pin(check_parity(deepseek_v3_training(gt_mesh, precision)).traced)


@on_eight_ranks
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_equals_eager_fsdp2_with_odd_shards(gt_mesh, precision):
    check_parity(deepseek_v3_training(gt_mesh, precision, "debug_odd"))


@with_expert_parallelism
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_equals_eager_fsdp2_with_expert_parallelism(gt_mesh, pin, precision):
    """All-to-all with data-dependent splits; routed experts on a mesh of their own, never merged with the rest."""
    pin(check_parity(deepseek_v3_training(gt_mesh, precision)).traced)


@with_expert_parallelism
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_equals_eager_fsdp2_with_expert_parallelism_and_odd_shards(gt_mesh, precision):
    check_parity(deepseek_v3_training(gt_mesh, precision, "debug_odd"))


@with_expert_parallelism
def test_a_payload_in_execution_order_differs_and_the_layout_says_where(gt_mesh):
    """The twin that must differ (L5)."""
    config = deepseek_v3_training(gt_mesh, "fp32", "debug_odd")
    eager, graph = EagerRun(config), GraphRun(config, payload_order="execution")
    expected, actual = eager.run(), graph.run()
    assert_bitwise_different(actual, expected)
    with pytest.raises(AssertionError, match=r"bucket 'layers\.1', reduce_scatter: layers\.1\.attention\.\S+ sits at"):
        assert_same_layout(graph.layout(), eager.layout())
