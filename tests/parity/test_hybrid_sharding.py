"""Hybrid sharding (HSDP): replicas of shard groups, against eager ``fully_shard`` on a 2-D mesh."""

import pytest

from fixtures.training import llama3_training
from pytest_gtrainer import assert_bitwise_different
from pytest_gtrainer._torch.passes import ALL_REDUCE, REDUCE_SCATTER
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

two_by_two = pytest.mark.gt_world("ranks", size=4, mesh={"replicate": 2, "shard": 2})


def collectives(run, target):
    return len(run.traced.gm.graph.find_nodes(op="call_function", target=target))


@pytest.mark.second_tier
@two_by_two
def test_graph_equals_eager_hsdp(gt_mesh, check_parity):
    """D16: reduce-scatters and all-reduces are both packed; where each parameter sits is compared,
    too.
    """
    graph = check_parity(llama3_training(gt_mesh, "fp32", "debug_odd", steps=3))
    assert collectives(graph, ALL_REDUCE) == collectives(graph, REDUCE_SCATTER) == 4


@pytest.mark.second_tier
@two_by_two
def test_as_dtensor_reduces_it_differs(gt_mesh):
    """D16: the whole gradient between replicas first, then scattered. The known difference, and the
    twin.

    Not in bf16: the sum of a few bf16 gradients in fp32 is often exact in any order.
    """
    config = llama3_training(gt_mesh, "fp32", "debug_odd", steps=2)
    as_traced = GraphRun(config, reduce_scatter_first=False)
    assert_bitwise_different(as_traced.run(), EagerRun(config).run())
    assert collectives(as_traced, ALL_REDUCE) > collectives(as_traced, REDUCE_SCATTER) == 4


@pytest.mark.gt_world("fake", size=8, mesh={"replicate": 2, "shard": 4})
def test_the_graph_is_pinned(gt_mesh, gt_golden):
    """D16: text and schedule, at even shards: one graph for all ranks."""
    graph = GraphRun(llama3_training(gt_mesh, "bf16_fp32"))
    gt_golden.check(graph.traced)
    gt_golden.check(graph.traced, "schedule", view="schedule")


def on_ranks(replicas, shards, precision):
    mesh = {"replicate": replicas, "shard": shards}
    world = pytest.mark.gt_world("ranks", size=replicas * shards, mesh=mesh)
    return pytest.param(precision, marks=world, id=f"{replicas} replicas of {shards} shards")


@pytest.mark.long
@pytest.mark.parametrize(
    "precision", [on_ranks(3, 2, "fp32"), on_ranks(4, 2, "fp32"), on_ranks(2, 4, "bf16_fp32")]
)
def test_other_numbers_of_replicas_and_shards(gt_mesh, check_parity, precision):
    """D14: 201 rows over 4 ranks pad on the last only; the padding is between DTensor's two
    collectives.
    """
    check_parity(llama3_training(gt_mesh, precision, "debug_odd"))
