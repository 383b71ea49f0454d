"""Replicas: hybrid sharding and DDP, by graph and eagerly, on ranks of two nodes."""

import functools

import pytest
import torch

from fixtures.training import llama3_training
from pytest_gtrainer import (
    MixedPrecisionPolicy,
    NetModel,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_simulated_parity,
    train_eager,
    train_graph,
)
from pytest_gtrainer.graph.layout import LayoutDifference
from pytest_gtrainer.references.replicas import ReplicasDiffer, assert_alike, peers_by
from pytest_gtrainer.worlds.simulated.threads import run_threads

CONFIG = functools.partial(llama3_training, precision="fp32", steps=1)
EIGHT = pytest.mark.gt_world("simulated", size=8, nodes=2)
MESH = {"replicate": 2, "shard": 4}
OVER_NODES = pytest.mark.gt_world("simulated", size=8, nodes=4, mesh=MESH)
INSIDE_NODES = pytest.mark.gt_world("simulated", size=8, nodes=2, mesh=MESH)


@pytest.mark.second_tier
@OVER_NODES
def test_hybrid_sharding_equals_fully_shard(gt_world):
    """D16, S2: shard groups span two nodes, replicas two others; both reduce in the net's order."""
    parity = assert_simulated_parity(CONFIG, gt_world)
    assert parity.control.outcome == "different"
    assert [payload.ranks for payload in parity.layout.of("reduce_scatter")] == [(0, 1, 2, 3)] * 4
    assert [payload.ranks for payload in parity.layout.of("all_reduce")] == [(0, 4)] * 4


@pytest.mark.second_tier
@INSIDE_NODES
def test_shard_groups_inside_a_node_hide_the_order_of_buckets(gt_world):
    """S1: their ring is one cycle, and the sum of two replicas is the same either way.

    A sweep reports it as such.
    """
    parity = assert_simulated_parity(CONFIG, gt_world, invisible="report")
    assert parity.control.outcome == "equal"


@pytest.mark.second_tier
@INSIDE_NODES
def test_hybrid_sharding_as_dtensor_reduces_it_differs(gt_world):
    """D16: replicas reduce whole gradients first: no all-reduce of shards, and other bits."""
    with pytest.raises(LayoutDifference) as error:
        assert_simulated_parity(CONFIG, gt_world, reduce_scatter_first=False)
    text = str(error.value)
    assert "bucket 'layers.0': no all_reduce of layers.0.attention.wq.weight" in text
    assert "and therefore bits are different" in text
    assert "gradient of tok_embeddings.weight" in text


@pytest.mark.second_tier
@EIGHT
def test_ddp_equals_a_graph_that_reduces_each_gradient_by_itself(gt_world):
    """D10, S2: DDP with buckets of one gradient; the control is DDP with torch's own buckets."""
    parity = assert_simulated_parity(functools.partial(CONFIG, replicate=True, steps=2), gt_world)
    assert parity.control.outcome == "different"
    assert parity.layout.payloads == ()


@pytest.mark.second_tier
@EIGHT
def test_ddps_own_buckets_have_other_bits(gt_world):
    """D10, the known difference: in a bucket an element sits elsewhere, and the ring starts to add
    it elsewhere.

    Nodes do not matter to that: the start is what an all-reduce's offset decides.
    """
    config = functools.partial(CONFIG, replicate=True)
    by_torch = train_eager(functools.partial(config, ddp_bucket_mb=None), world=gt_world)
    verdict = assert_bitwise_different(train_graph(config, world=gt_world), by_torch)
    assert {found.key.phase for found in verdict.differences} == {"gradient", "weight", "optimizer"}


def test_what_one_rank_alone_holds_is_told_by_its_name():
    """N4: rank 1 has a gradient that rank 0 lacks; letters beyond ASCII arrive whole."""

    def compare(rank):
        held = ["größe", "the gradient of größe"][: 1 + rank]
        with pytest.raises(ReplicasDiffer) as raised:
            assert_alike([(name, torch.ones(2)) for name in held], peers_by(0), "held by both")
        return str(raised.value)

    said = run_threads(2, compare, net=NetModel(1, 2))
    expected = (
        "the gradient of größe differs between ranks 0 and 1, and is held by both; so do 0 more of "
        "1 such"
    )
    assert [text.removesuffix(" tensors") for text in said] == [expected] * 2, (
        "the gradient that one rank alone has, and nothing else"
    )


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=3)
def test_ddp_on_real_ranks_equals_the_graph(gt_mesh):
    """D10: the same reference outside of a simulated world.

    A third is rounded: gloo would divide after the sum.
    """
    config = CONFIG(gt_mesh, replicate=True, steps=2)
    assert_bitwise_equal(train_graph(config), train_eager(config))


@pytest.mark.gt_world("fake", size=8, mesh={"replicate": 2, "shard": 4})
def test_what_ddp_cannot_be_asked_for(gt_mesh):
    with pytest.raises(ValueError, match="replicate=True is for a 1-D mesh without submeshes"):
        CONFIG(gt_mesh, replicate=True)
    for policy in (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    ):
        with pytest.raises(
            ValueError, match=r"replicate=True with .*bfloat16.*: DDP has no dtypes of its own"
        ):
            CONFIG(gt_mesh["shard"], replicate=True, mp_policy=policy)
