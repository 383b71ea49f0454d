"""What only GPUs can tell: the main job over NCCL. The other tests of this folder use GPUs where there are any."""

import pytest

from fixtures.training import PRECISIONS, llama3_training
from pytest_gtrainer import assert_bitwise_equal, assert_same_layout
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun


@pytest.mark.gt_world("ranks", size=[2, 8], device="cuda")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_equals_eager_fsdp2_over_nccl(gt_mesh, gt_deterministic, precision):
    config = llama3_training(gt_mesh, precision)
    eager, graph = EagerRun(config), GraphRun(config)
    expected, actual = eager.run(), graph.run()
    assert_same_layout(graph.layout(), eager.layout())
    assert_bitwise_equal(actual, expected)
