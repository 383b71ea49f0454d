"""The rewritten graph against eager ``fully_shard`` on 16 ranks of two nodes, in one process."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from fixtures.models.chunked_loss import chunked_ce_step
from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import (
    NetModel,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_simulated_parity,
    train_eager,
    train_graph,
)
from pytest_gtrainer.passes.layout import LayoutDifference, assert_same_layout
from pytest_gtrainer.worlds.simulated.errors import DependsOnRank
from pytest_gtrainer.worlds.simulated.graph_training import SimulatedGraphRun
from pytest_gtrainer.worlds.simulated.parity import VacuousCheck
from pytest_gtrainer.worlds.simulated.threads.training import simulated_eager

CONFIG = functools.partial(llama3_training, precision="fp32", steps=2)
TWO_NODES = pytest.mark.gt_world("simulated", size=16, nodes=2)


def with_net(world, **fields):
    return dataclasses.replace(world, net=NetModel.of_world(world.size, **fields))


@TWO_NODES
def test_the_managed_order_gives_eager_bits(gt_world):
    """S2, S3: every loss, gradient, weight, optimiser state of every rank; and the control differs."""
    parity = assert_simulated_parity(CONFIG, gt_world)
    assert parity.control.outcome == "different"
    assert parity.graph.ranks == tuple(range(16))


@TWO_NODES
def test_execution_order_is_told_by_the_layout(gt_world):
    """S1: the bug of pull request 3590; no arithmetic needed."""
    with pytest.raises(LayoutDifference, match=r"bucket 'layers\.0', .*layers\.0\.attention\.wq\.weight sits at byte"):
        assert_simulated_parity(CONFIG, gt_world, payload_order="execution")


@TWO_NODES
def test_execution_order_shows_in_bits_from_the_first_step_on(gt_world):
    """S1."""
    graph = train_graph(CONFIG, world=gt_world, payload_order="execution")
    verdict = assert_bitwise_different(graph, train_eager(CONFIG, world=gt_world))
    assert verdict.origin[0] == 0
    assert verdict.first.key.phase == "gradient"


@TWO_NODES
@pytest.mark.parametrize(
    "net", [{"nodes": 1}, {"nodes": 2, "channels": 1}, {"nodes": 2, "accumulate": "fp32"}], ids=str
)
def test_the_bug_is_invisible(gt_world, net):
    """S1, S3: on one node, with one channel, with fp32 accumulation; then the check refuses to pass."""
    world = with_net(gt_world, **net)
    config = functools.partial(llama3_training, precision="fp32", steps=1)
    graph = train_graph(config, world=world, payload_order="execution")
    assert_bitwise_equal(graph, train_eager(config, world=world))
    with pytest.raises(VacuousCheck, match="could not fail: take two nodes or more with two channels"):
        assert_simulated_parity(config, world)


def chunked(mesh, *last):
    """Llama 3 whose head runs inside the loss, in four chunks; ``last`` are the last entries of its bucket plan."""
    plan = ["tok_embeddings", "layers.0", "layers.1", *last]
    return llama3_training(mesh, "fp32", step=chunked_ce_step(4), bucket_plan=plan, steps=1)


@TWO_NODES
def test_a_head_left_out_of_the_last_bucket(gt_world):
    """B2, the bug of pull request 3770: the layout names the head, and its bits differ, as another channel adds it."""
    eager = simulated_eager(lambda mesh: chunked(mesh, ["norm", "lm_head", "loss"]), gt_world.net)
    graph = SimulatedGraphRun(lambda mesh: chunked(mesh, "norm", ["lm_head", "loss"]), gt_world)
    with pytest.raises(LayoutDifference, match=r"bucket 'norm\+lm_head', all_gather: lm_head\.weight is missing"):
        assert_same_layout(graph.layout(), eager.layout)
    verdict = assert_bitwise_different(graph.run(), eager.record)
    assert verdict.first.key.name == "lm_head.weight"


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, pytest.param({"efsdp": 4, "ep": 2}, marks=pytest.mark.long)], ids=str)
@pytest.mark.gt_world("simulated", size=8, nodes=2)
def test_deepseek_v3(gt_world, mesh):
    """S2: routed experts, shared ones, and exchanged rows over a mesh of their own."""
    config = functools.partial(deepseek_v3_training, precision="fp32", steps=1)
    parity = assert_simulated_parity(config, dataclasses.replace(gt_world, mesh=mesh))
    assert parity.control.outcome == "different"


@TWO_NODES
def test_a_world_of_odd_shards_is_refused(gt_world):
    """S4: by the first tensor that is another on the last rank."""
    config = functools.partial(llama3_training, precision="fp32", flavor="debug_odd", steps=1)
    with pytest.raises(DependsOnRank, match=r"rank 0 has .*float32\[9, 72\], rank 15 has .*float32\[1, 72\]"):
        train_graph(config, world=gt_world)


@pytest.mark.gt_world("fake", size=16)
def test_a_fake_world_has_no_net(gt_world):
    with pytest.raises(ValueError, match=r"kind 'fake' has no net model: mark the test gt_world\(\"simulated\""):
        assert_simulated_parity(CONFIG, gt_world)
