"""The main job on DeepSeek-V3, with and without expert parallelism.

In short every two of the settings meet: mesh, sizes that ranks divide or not, precision. The long form has all of them.
"""

import pytest

from fixtures.training import PRECISIONS, deepseek_v3_training

on_eight_ranks = pytest.mark.gt_world("ranks", size=8, mesh={"fsdp": 8})
with_expert_parallelism = pytest.mark.gt_world("ranks", size=8, mesh={"efsdp": 4, "ep": 2})


def short(precision):
    """The precision that the short form has here."""
    return pytest.mark.parametrize(
        "precision", [pytest.param(each, marks=[] if each == precision else [pytest.mark.long]) for each in PRECISIONS]
    )


@on_eight_ranks
@short("fp32")
def test_graph_equals_eager_fsdp2(gt_mesh, check_parity, pin, precision):
    """Routed experts and the rest of a layer in two buckets (B3)."""
    pin(check_parity(deepseek_v3_training(gt_mesh, precision)).traced)


@on_eight_ranks
@short("bf16_fp32")
def test_graph_equals_eager_fsdp2_with_odd_shards(gt_mesh, check_parity, precision):
    """W4."""
    check_parity(deepseek_v3_training(gt_mesh, precision, "debug_odd"))


@with_expert_parallelism
@short("bf16_fp32")
def test_graph_equals_eager_fsdp2_with_expert_parallelism(gt_mesh, check_parity, pin, precision):
    """All-to-all with data-dependent splits; routed experts on a mesh of their own, never merged with the rest."""
    pin(check_parity(deepseek_v3_training(gt_mesh, precision)).traced)


@with_expert_parallelism
@pytest.mark.long
def test_graph_equals_eager_fsdp2_with_expert_parallelism_and_odd_shards(gt_mesh, check_parity):
    """W4: in bf16; in fp32 the test of execution order has it."""
    check_parity(deepseek_v3_training(gt_mesh, "bf16_fp32", "debug_odd"))


@with_expert_parallelism
def test_a_payload_in_execution_order_differs_and_the_layout_says_where(gt_mesh, check_parity_and_twin):
    """W4, L5: in the managed order it equals eager FSDP2."""
    complaint = check_parity_and_twin(deepseek_v3_training(gt_mesh, "fp32", "debug_odd"))
    assert "bucket 'layers.1', reduce_scatter: layers.1.attention." in complaint
