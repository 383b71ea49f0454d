"""Training, graph against eager code, where reductions go through trees; and a net of one's own."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fixtures.training import llama3_training
from pytest_gtrainer import NetModel, assert_simulated_parity, sweep_nets
from pytest_gtrainer.graph.layout import LayoutDifference
from pytest_gtrainer.worlds.simulated.collectives import Contribution, reduce_scatter
from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank
from pytest_gtrainer.worlds.simulated.net import row_of
from pytest_gtrainer.worlds.simulated.threads import run_threads
from tests.worlds.simulated import graphs

CONFIG = functools.partial(llama3_training, precision="fp32", steps=1)
HSDP = pytest.mark.gt_world("simulated", size=8, nodes=4, mesh={"replicate": 4, "shard": 2})
BLOCKS = re.findall(r"```python\n(.*?)```", Path("docs/simulated-world.md").read_text(), re.DOTALL)


def through_trees(world):
    return replace(world, net=replace(world.net, algorithm="tree"))


@HSDP
def test_hybrid_sharding_over_four_nodes(gt_world):
    """S2, S9: shards are reduced on rings inside nodes, replicas by trees over them; the control differs there."""
    parity = assert_simulated_parity(CONFIG, through_trees(gt_world))
    assert parity.control.outcome == "different"


@HSDP
def test_a_wrong_order_is_told_with_the_tree_that_adds_it(gt_world):
    """The twin, and what it says of the all-reduce."""
    with pytest.raises(LayoutDifference) as error:
        assert_simulated_parity(CONFIG, through_trees(gt_world), payload_order="execution")
    text = str(error.value)
    assert "and therefore bits are different" in text
    path = r"channel [0-3], tree, summed in the order of ranks( \d){4}\n"
    assert re.search(rf"graph: bucket .*, all_reduce, element \d+ of \d+, {path}", text)


@pytest.mark.gt_world("simulated", size=8, nodes=4)
def test_ddp_through_trees(gt_world):
    """D10, S9: a gradient by itself; the control is DDP with torch's own buckets."""
    parity = assert_simulated_parity(functools.partial(CONFIG, replicate=True), through_trees(gt_world))
    assert parity.control.outcome == "different"


def reduce_scatter_on_a_thread(rank):
    shard = torch.empty(40)
    dist.reduce_scatter_single(shard, graphs.numbers(320, seed=rank))
    return shard


@pytest.mark.gt_world("fake", size=8)
def test_pat_in_a_graph_and_on_threads(gt_world):
    """S9: the sum of a reduce-scatter with one rank a node; the twin goes around rings."""
    net = NetModel(8, 1, algorithm="pat")
    eager = run_threads(8, reduce_scatter_on_a_thread, net=net)

    def step(x):
        return graphs.wait(graphs.c10d.reduce_scatter_tensor(x, "sum", 8, graphs.world_group()))

    output = graphs.run(step, graphs.different(8, 320), net=net)
    around = graphs.run(step, graphs.different(8, 320), net=replace(net, algorithm="ring"))
    assert all(torch.equal(of_rank(output, rank), eager[rank]) for rank in range(8))
    assert not all(torch.equal(of_rank(around, rank), eager[rank]) for rank in range(8))


@pytest.mark.parametrize("op", ["sum", "premul_sum"])
def test_a_sum_of_products_is_told_to_the_net(op):
    """enqueue.cc:2009: FSDP2's PreMulSum goes around rings, a sum by PAT."""

    def reduced(algorithm):
        given = [Contribution(rank=r, inputs=[graphs.numbers(320, seed=r)], op=op, factor=0.7) for r in range(8)]
        return [shard for (shard,) in reduce_scatter(NetModel(8, 1, algorithm=algorithm), given)]

    same = all(map(torch.equal, reduced("pat"), reduced("ring")))
    assert same == (op == "premul_sum")


@pytest.mark.gt_world("simulated", size=8)
def test_the_documentations_own_net(gt_world):
    """A net by the documented protocol: parity holds, its order shows, and messages and tables tell it by its name."""
    own, example = {"__name__": "my_net"}, {"__name__": "test_nets"}
    for name, namespace in (("# my_net.py", own), ("# test_nets.py", example)):
        text = next(block for block in BLOCKS if block.startswith(name))
        exec(compile(text, name, "exec", dont_inherit=True), namespace)
    world = replace(gt_world, net=own["UpAndDown"](8))
    assert assert_simulated_parity(example["training"], world).control.outcome == "different"
    with pytest.raises(LayoutDifference, match=r"channel 0, up and down, summed in the order of ranks [07]"):
        assert_simulated_parity(example["training"], world, payload_order="execution")
    assert row_of(world.net)["algorithm"] == "UpAndDown"


def test_a_table_tells_trees():
    nets = [parameter.values[0] for parameter in sweep_nets(8, nodes=[4], channels=[2], algorithm=["ring", "tree"])]
    assert [row_of(net)["algorithm"] for net in nets] == ["ring", "tree"]
