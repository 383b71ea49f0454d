"""The rewritten graph against eager ``fully_shard`` on 8 and 16 ranks of two nodes, in one
process.
"""

import dataclasses
import functools

import pytest

from fixtures.models import llama3
from fixtures.models.chunked_loss import chunked_ce_step
from fixtures.training import Parallelism, deepseek_v3_training, llama3_training
from pytest_gtrainer import (
    VacuousCheck,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_simulated_parity,
    train_eager,
    train_graph,
)
from pytest_gtrainer.graph.collectives import PlanError
from pytest_gtrainer.graph.layout import LayoutDifference, assert_same_layout
from pytest_gtrainer.references.simulated import SimulatedGraphRun, simulated_eager

pytestmark = pytest.mark.second_tier

CONFIG = functools.partial(llama3_training, precision="fp32", steps=2)
EIGHT = pytest.mark.gt_world("simulated", size=8, nodes=2)
TWO_NODES = pytest.mark.gt_world("simulated", size=16, nodes=2)


@TWO_NODES
def test_the_managed_order_gives_eager_bits(gt_world):
    """S2, S3: every loss, gradient, weight, optimiser state of every rank; and the control
    differs.
    """
    parity = assert_simulated_parity(CONFIG, gt_world)
    assert parity.control.outcome == "different"
    assert parity.graph.ranks == tuple(range(16))


def chunked(mesh, *last):
    """Llama 3 whose head runs inside the loss, in four chunks; ``last`` are the last entries of its
    bucket plan.
    """
    plan = ["tok_embeddings", "layers.0", "layers.1", *last]
    return llama3_training(mesh, "fp32", step=chunked_ce_step(4), bucket_plan=plan, steps=1)


@EIGHT
def test_a_head_left_out_of_the_last_bucket(gt_world):
    """B2, the bug of pull request 3770: the layout names the head, and its bits differ, as another
    channel adds it.
    """
    eager = simulated_eager(lambda mesh: chunked(mesh, ["norm", "lm_head", "loss"]), gt_world.net)
    graph = SimulatedGraphRun(lambda mesh: chunked(mesh, "norm", ["lm_head", "loss"]), gt_world)
    with pytest.raises(
        LayoutDifference, match=r"bucket 'norm\+lm_head', all_gather: lm_head\.weight is missing"
    ):
        assert_same_layout(graph.layout(), eager.layout)
    verdict = assert_bitwise_different(graph.run(), eager.record)
    different = {
        each.key.name
        for each in verdict.differences
        if each.key.phase == "gradient" and each.key.step == 0
    }
    assert "lm_head.weight" in different <= {"norm.weight", "lm_head.weight"}


@EIGHT
def test_a_last_bucket_without_the_loss_is_refused(gt_world):
    """B2, B6: the plan of pull request 3770, where no bucket has the head inside the loss."""
    with pytest.raises(
        PlanError, match=r"covers no all-gather of lm_head\.weight \(read in loss\)"
    ):
        train_graph(lambda mesh: chunked(mesh, ["norm", "lm_head"]), world=gt_world)


def check_deepseek_v3(world, **mesh):
    config = functools.partial(
        deepseek_v3_training, precision="fp32", flavor="debug_small", steps=1
    )
    parity = assert_simulated_parity(config, dataclasses.replace(world, mesh=mesh))
    assert parity.control.outcome == "different"
    return parity


@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_expert_parallelism(gt_world):
    """S2: dense parameters over all ranks, experts over every second one, rows exchanged by sizes
    that data decides.
    """
    parity = check_deepseek_v3(gt_world, efsdp=2, ep=2)
    assert {payload.ranks for payload in parity.layout.of("reduce_scatter")} == {
        (0, 1, 2, 3),
        (0, 2),
    }


@pytest.mark.long
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"efsdp": 4, "ep": 2}], ids=str)
@EIGHT
def test_deepseek_v3_on_eight_ranks(gt_world, mesh):
    """S2: routed experts, shared ones, and exchanged rows over a mesh of their own."""
    check_deepseek_v3(gt_world, **mesh)


def eight_heads(mesh):
    """Llama 3 that eight ranks share, in parts of the sequence between the projections."""
    sizes, parallel = (
        llama3.Llama3Config(n_heads=8, n_kv_heads=8, ffn_dim=128),
        Parallelism({"sequence": True}),
    )

    def model():
        built = llama3.Llama3(sizes)
        built.init_weights(seed=0)
        parallel.apply(built, mesh)
        return built

    return llama3_training(mesh, "fp32", parallel=parallel, model=model, steps=1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest_gtrainer.references.replicas.ReplicaWarning")
@pytest.mark.gt_world("simulated", size=64, nodes=8, mesh={"dp": 16, "tp": 4})
def test_tensor_parallelism_inside_a_node_and_fsdp_across(gt_world):
    """N9: 64 ranks. ``python -m benchmarks.simulate --tp 4`` goes to 256."""
    parity = assert_simulated_parity(eight_heads, gt_world)
    assert parity.control.outcome == "different"
    assert {payload.ranks for payload in parity.layout.of("reduce_scatter")} == {
        tuple(range(0, 64, 4))
    }, "two a node"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest_gtrainer.references.replicas.ReplicaWarning")
@pytest.mark.gt_world("simulated", size=32, nodes=4, mesh={"dp": 4, "tp": 8})
def test_one_data_rank_a_node_shows_no_order(gt_world):
    """A ring has one way through four nodes: all channels add alike, wherever a parameter lies in
    its payload.
    """
    with pytest.raises(
        VacuousCheck, match="payloads packed in another order give the same bits under this net"
    ):
        assert_simulated_parity(eight_heads, gt_world)


@pytest.mark.gt_world("fake", size=16)
def test_a_fake_world_has_no_net(gt_world):
    with pytest.raises(
        ValueError, match=r"kind 'fake' has no net model: mark the test gt_world\(\"simulated\""
    ):
        assert_simulated_parity(CONFIG, gt_world)


@pytest.mark.gt_world("simulated", size=1)
def test_a_world_of_one_trains_and_is_no_check(gt_world):
    """S3: both sides run, and are equal in whatever order."""
    assert_bitwise_equal(train_graph(CONFIG, world=gt_world), train_eager(CONFIG, world=gt_world))
    with pytest.raises(
        ValueError,
        match="a world of 1 rank adds nothing, so no order can show: take size=16, nodes=2",
    ):
        assert_simulated_parity(CONFIG, gt_world)
