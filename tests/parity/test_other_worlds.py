"""The main job at other sizes of the world, longer, and at published sizes: the long form."""

import pytest

from fixtures.training import (
    PRECISIONS,
    deepseek_v3_training,
    llama3_training,
    published_llama3_training,
)
from pytest_gtrainer.references.graph import GraphRun

pytestmark = pytest.mark.long


@pytest.mark.gt_world("ranks", size=[2, 3, 4, 6])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("flavor", ["debug", "debug_odd"])
def test_llama3_equals_eager_fsdp2(gt_mesh, check_parity, flavor, precision):
    check_parity(llama3_training(gt_mesh, precision, flavor))


@pytest.mark.gt_world("ranks", size=8, mesh={"efsdp": 2, "ep": 4})
@pytest.mark.parametrize("precision", PRECISIONS)
def test_deepseek_v3_equals_eager_fsdp2_with_four_expert_ranks(gt_mesh, check_parity, precision):
    check_parity(deepseek_v3_training(gt_mesh, precision))


@pytest.mark.gt_world("ranks", size=8)
def test_twenty_steps(gt_mesh, check_parity):
    check_parity(llama3_training(gt_mesh, "bf16_fp32", "debug_odd", steps=20))


@pytest.mark.gt_world("fake", size=64)
@pytest.mark.parametrize(("flavor", "layers"), [("70B", 80), ("405B", 126)])
def test_larger_published_sizes_have_one_bucket_a_layer(gt_mesh, flavor, layers):
    layout = GraphRun(published_llama3_training(gt_mesh, "bf16_fp32", flavor)).layout()
    assert len(layout.of("all_gather")) == len(layout.of("reduce_scatter")) == layers + 2
