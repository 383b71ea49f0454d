"""The main job on DeepSeek-V3, with and without expert parallelism.

In short every two of the settings meet: mesh, sizes that ranks divide or not, precision. The long
form has all of them. Every rank traces the model, so in short four ranks train it, and eight where
bits show the order of a payload: at odd sizes, in fp32. The first tier trains a smaller one on
three. The graphs of eight are pinned in a fake world.
"""

import pytest

from fixtures.training import PRECISIONS, deepseek_v3_training
from pytest_gtrainer.references.graph import GraphRun


def world(kind, ranks, *, experts=False):
    """With ``experts`` they are parallel over pairs of ranks."""
    return pytest.mark.gt_world(
        kind, size=ranks, mesh={"efsdp": ranks // 2, "ep": 2} if experts else {"fsdp": ranks}
    )


def on_ranks(short, *, experts=False):
    """Every precision on eight ranks in the long form; ``short`` on four, in either form."""
    long = [
        pytest.param(each, marks=[world("ranks", 8, experts=experts), pytest.mark.long])
        for each in PRECISIONS
    ]
    on_four = pytest.param(short, marks=world("ranks", 4, experts=experts), id=f"{short}-four")
    return pytest.mark.parametrize("precision", [on_four, *long])


def short(precision):
    """The precision that the short form has here."""
    return pytest.mark.parametrize(
        "precision",
        [
            pytest.param(each, marks=[] if each == precision else [pytest.mark.long])
            for each in PRECISIONS
        ],
    )


@pytest.mark.second_tier
@on_ranks("fp32")
def test_graph_equals_eager_fsdp2(gt_mesh, check_parity, precision):
    """Routed experts and the rest of a layer in two buckets (B3)."""
    check_parity(deepseek_v3_training(gt_mesh, precision))


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=3, mesh={"fsdp": 3})
def test_a_small_graph_equals_eager_fsdp2(gt_mesh, check_parity):
    """W4: only some of three ranks pad, and three terms have an order to be added in."""
    check_parity(deepseek_v3_training(gt_mesh, "bf16_fp32", "debug_odd_small", steps=2))


@pytest.mark.second_tier
@on_ranks("bf16_fp32")
def test_graph_equals_eager_fsdp2_with_odd_shards(gt_mesh, check_parity, precision):
    """W4."""
    check_parity(deepseek_v3_training(gt_mesh, precision, "debug_odd"))


@pytest.mark.second_tier
@on_ranks("bf16_fp32", experts=True)
def test_graph_equals_eager_fsdp2_with_expert_parallelism(gt_mesh, check_parity, precision):
    """All-to-all with data-dependent splits; routed experts on a mesh of their own, never merged
    with the rest.
    """
    check_parity(deepseek_v3_training(gt_mesh, precision))


@world("fake", 8)
@short("fp32")
def test_the_graph_is_pinned(gt_mesh, pin, precision):
    """B3, at even shards: one graph for all ranks."""
    pin(GraphRun(deepseek_v3_training(gt_mesh, precision)).traced)


@pytest.mark.second_tier
@world("fake", 8, experts=True)
@short("bf16_fp32")
def test_the_graph_is_pinned_with_expert_parallelism(gt_mesh, pin, precision):
    """Splits that data decides, and a mesh of their own for routed experts."""
    pin(GraphRun(deepseek_v3_training(gt_mesh, precision)).traced)


@pytest.mark.second_tier
@pytest.mark.long
@world("ranks", 8, experts=True)
def test_graph_equals_eager_fsdp2_with_expert_parallelism_and_odd_shards(gt_mesh, check_parity):
    """W4: in bf16; in fp32 the test of execution order has it."""
    check_parity(deepseek_v3_training(gt_mesh, "bf16_fp32", "debug_odd"))


@pytest.mark.second_tier
@world("ranks", 8, experts=True)
def test_a_payload_in_execution_order_differs_and_the_layout_says_where(
    gt_mesh, check_parity_and_twin
):
    """W4, L5: in the managed order it equals eager FSDP2."""
    complaint = check_parity_and_twin(deepseek_v3_training(gt_mesh, "fp32", "debug_odd"))
    assert "bucket 'layers.1', reduce_scatter: layers.1.attention." in complaint
