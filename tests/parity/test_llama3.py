"""The main job on Llama 3: eight ranks train twice, by eager FSDP2 and by the rewritten graph."""

import pytest

from fixtures.training import PRECISIONS, llama3_training
from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, assert_same_layout
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

on_eight_ranks = pytest.mark.gt_world("ranks", size=8, mesh={"fsdp": 8})


@on_eight_ranks
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_equals_eager_fsdp2(gt_mesh, pin, precision):
    """Five steps of AdamW: loss, gradients, weights and optimiser state of every rank (D4, D9, A1)."""
    config = llama3_training(gt_mesh, precision)
    eager, graph = EagerRun(config), GraphRun(config)
    expected, actual = eager.run(), graph.run()
    assert_same_layout(graph.layout(), eager.layout())
    assert_bitwise_equal(actual, expected)
    pin(graph.traced)


@on_eight_ranks
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_equals_eager_fsdp2_with_odd_shards(gt_mesh, precision):
    """Where gloo's bits depend on the order of the payload, and only some ranks pad (D2, D14, W4)."""
    config = llama3_training(gt_mesh, precision, "debug_odd")
    eager, graph = EagerRun(config), GraphRun(config)
    expected, actual = eager.run(), graph.run()
    assert_same_layout(graph.layout(), eager.layout())
    assert_bitwise_equal(actual, expected)


@on_eight_ranks
def test_a_payload_in_execution_order_differs_and_the_layout_says_where(gt_mesh):
    """The twin that must differ: the same graph, packed in the order it runs (L5)."""
    config = llama3_training(gt_mesh, "fp32", "debug_odd")
    eager, graph = EagerRun(config), GraphRun(config, payload_order="execution")
    expected, actual = eager.run(), graph.run()
    assert_bitwise_different(actual, expected)
    with pytest.raises(AssertionError) as failure:
        assert_same_layout(graph.layout(), eager.layout())
    assert "bucket 'layers.0', reduce_scatter: layers.0.attention.wq.weight sits at byte" in str(failure.value)
    assert "bucket 'norm+lm_head', reduce_scatter: lm_head.weight sits at byte 0, expected 36" in str(failure.value)
