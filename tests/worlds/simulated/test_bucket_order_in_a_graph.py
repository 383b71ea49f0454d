"""The order of a bucket in the gradients of a rewritten training step (S1)."""

import copy
from dataclasses import replace

import pytest
import torch

from fixtures.training import llama3_training
from pytest_gtrainer import (
    MixedPrecisionPolicy,
    NetModel,
    assert_bitwise_different,
    assert_bitwise_equal,
)
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import rewrite, shard_traceably, trace_config
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank
from pytest_gtrainer.worlds.spec import make_spec

pytestmark = pytest.mark.second_tier

RANKS = 16
TWO_NODES = NetModel(nodes=2, channels=4)


@pytest.fixture(scope="module")
def step():
    """``step(net, order)``: every rank's loss and gradients of one step in bf16, its buckets packed
    in an order.
    """
    with fake_world(make_spec("fake", size=RANKS)) as world:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        config = llama3_training(make_mesh(world), "fp32", mp_policy=policy)
        traced = trace_config(config, shard_traceably(new_model(config), config))
        graphs = {}
        for order in ("managed", "execution"):
            again = replace(traced, gm=copy.deepcopy(traced.gm))
            graphs[order] = RankGraph.of(
                rewrite(again, config, payload_order=order).gm, config.mesh
            )
    model = new_model(config)
    shards = [PerRank(parameter.detach().chunk(RANKS)) for parameter in model.parameters()]
    batches = [config.batch(0, rank) for rank in range(RANKS)]
    inputs = [
        *shards,
        *model.buffers(),
        *(PerRank(values) for values in zip(*batches, strict=True)),
    ]

    def run(net, order):
        output = Interpreter(graphs[order], net).run(inputs)
        return [of_rank(output, rank) for rank in range(RANKS)]

    return run


def differing(ours, theirs):
    """Count the elements that differ, over all ranks."""
    pairs = (
        pair
        for own, other in zip(ours, theirs, strict=True)
        for pair in zip(own, other, strict=True)
    )
    return sum(int((own != other).sum()) for own, other in pairs)


@pytest.mark.parametrize("partition", ["contiguous", "round-robin"])
def test_two_nodes_see_that_buckets_are_packed_in_execution_order(step, partition):
    """S1: the bug that showed on 16 to 256 GPUs only; the losses of the step are equal."""
    net = replace(TWO_NODES, partition=partition, chunk_bytes=64)
    ours, theirs = step(net, "managed"), step(net, "execution")
    count = differing(ours, theirs)
    assert count > 1000, (
        f"two nodes hide the order of packing: {count} elements differ between managed and "
        f"execution"
    )
    losses = [[own[0] for own in side] for side in (ours, theirs)]
    assert_bitwise_equal(*losses, what="losses of all ranks, managed against execution order")
    assert_bitwise_different(
        ours[0][1:], theirs[0][1:], what="rank 0's gradients, managed against execution order"
    )


@pytest.mark.parametrize(
    "net",
    [
        NetModel(1, RANKS, channels=4),
        replace(TWO_NODES, channels=1),
        replace(TWO_NODES, accumulate="fp32"),
    ],
    ids=["one node", "one channel", "accumulated in fp32"],
)
def test_where_nobody_sees_it(step, net):
    """S1: by reduce-scatters, on one node with rail rings, with one channel, or accumulated in
    fp32.
    """
    assert differing(step(net, "managed"), step(net, "execution")) == 0
