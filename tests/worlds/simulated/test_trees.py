"""Training, graph against eager code, where reductions go through trees; and a net of one's own."""

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
from pytest_gtrainer.worlds.simulated.trees import (
    binary_children,
    pat_delta,
    tree_over_chains,
)
from tests.worlds.simulated import graphs

CONFIG = functools.partial(llama3_training, precision="fp32", steps=1)
HSDP = pytest.mark.gt_world("simulated", size=8, nodes=4, mesh={"replicate": 4, "shard": 2})
BLOCKS = re.findall(r"```python\n(.*?)```", Path("docs/worlds.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("nodes", range(2, 10))
def test_a_node_inside_one_tree_is_a_leaf_of_the_other(nodes):
    """NCCL balances its two trees, so that no node adds in both.

    The first one alone may, if nodes are odd.
    """
    trees = [binary_children(nodes, second)[1] for second in (False, True)]
    inside = [
        {node for node, children in tree.items() if any(child is not None for child in children)}
        for tree in trees
    ]
    assert inside[0] & inside[1] <= ({0} if nodes % 2 else set()), (
        f"nodes that add in both trees of {nodes}: {inside}"
    )


def ranks_in(order):
    found = []
    for each in order:
        found += ranks_in(each) if isinstance(each, tuple) else [each]
    return found


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (3,), (1, 1), (1, 2), (3, 1), (1,) * 4, (2, 1, 1, 3), (1, 3, 1, 1, 2)],
    ids=str,
)
def test_a_tree_over_nodes_of_any_number_of_ranks_adds_each_rank_once(lengths, second):
    """Of one rank, too, where the sums of both children arrive."""
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    chains = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    found = ranks_in(tree_over_chains(chains, second))
    assert sorted(found) == list(range(sum(lengths)))


def test_the_tree_of_a_group_is_over_the_nodes_of_its_ranks():
    """Two ranks on each of two nodes: each node adds its own, and one sum goes from node to
    node.
    """
    net = NetModel(2, 4, algorithm="tree").for_group((0, 1, 4, 5))
    ranks = net.explain("all_reduce", 0, 64, torch.float32).ranks
    inner = [set(term) for term in ranks if isinstance(term, tuple)]
    assert inner in ([{0, 1}], [{4, 5}]), f"one node's ranks arrive as one sum, and not {ranks}"


def test_a_tree_does_not_depend_on_the_order_in_which_a_ring_visits_the_nodes():
    """NCCL numbers nodes by their lowest rank, and builds the tree over these numbers."""
    nets = [
        NetModel(4, 2, algorithm="tree", rings=[ring])
        for ring in (range(8), (0, 1, 6, 7, 2, 3, 4, 5))
    ]
    first, other = (net.explain("all_reduce", 0, 8, torch.float32).ranks for net in nets)
    assert other == first, "the ring visits node 3 before node 1: its tree has to be the same"


def test_a_tree_has_no_places_that_pieces_are_dealt_to():
    """Round-robin: a ring's pieces are as many chunks as ranks, one for each place.

    A tree's are single chunks.
    """
    nets = [
        NetModel(2, 2, partition="round-robin", chunk_bytes=16, algorithm=by)
        for by in ("tree", "ring")
    ]
    tree, ring = (
        [net.explain("all_reduce", at, 64, torch.float32).channel for at in (0, 4, 16)]
        for net in nets
    )
    assert (tree, ring) == ([0, 1, 0], [0, 0, 1]), (
        "channels of elements 0, 4, 16: chunks of 4 elements, 4 ranks"
    )


@pytest.mark.parametrize(
    ("part_bytes", "ranks", "delta"), [(1 << 20, 32, 4), (16, 32, 2), (16, 8, 2), (16, 5, 4)]
)
def test_small_parts_are_aggregated_over_half_of_the_ranks_at_most(part_bytes, ranks, delta):
    """S9: from which distance on PAT aggregates (collectives.h:542-562)."""
    assert pat_delta(part_bytes, ranks) == delta, f"{part_bytes} bytes over {ranks} ranks"


def test_an_average_through_a_tree_multiplies_by_what_a_ring_multiplies_by():
    """1/N in the dtype of the wire, as NCCL hands it on: where one rank alone has values, no order
    matters.
    """
    inputs = torch.zeros(3, 64, dtype=torch.bfloat16)
    inputs[1] = torch.linspace(1, 2, 64)
    ring, tree = (
        NetModel(3, 1, algorithm=algorithm).all_reduce(inputs, "avg")
        for algorithm in ("ring", "tree")
    )
    assert torch.equal(ring, tree), (
        f"{int((ring != tree).sum())} of 64 averages differ: is 1/3 rounded to bfloat16?"
    )


def through_trees(world):
    return replace(world, net=replace(world.net, algorithm="tree"))


@pytest.mark.second_tier
@HSDP
def test_hybrid_sharding_over_four_nodes(gt_world):
    """S2, S9: shards are reduced on rings inside nodes, replicas by trees over them.

    The control differs there.
    """
    parity = assert_simulated_parity(CONFIG, through_trees(gt_world))
    assert parity.control.outcome == "different"


@pytest.mark.second_tier
@HSDP
def test_a_wrong_order_is_told_with_the_tree_that_adds_it(gt_world):
    """The twin, and what it says of the all-reduce."""
    with pytest.raises(LayoutDifference) as error:
        assert_simulated_parity(CONFIG, through_trees(gt_world), payload_order="execution")
    text = str(error.value)
    assert "and therefore bits are different" in text
    path = r"channel [0-3], tree, summed in the order of ranks( \d){4}\n"
    assert re.search(rf"graph: bucket .*, all_reduce, element \d+ of \d+, {path}", text)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=8, nodes=4)
def test_ddp_through_trees(gt_world):
    """D10, S9: a gradient by itself; the control is DDP with torch's own buckets."""
    parity = assert_simulated_parity(
        functools.partial(CONFIG, replicate=True), through_trees(gt_world)
    )
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
        given = [
            Contribution(rank=r, inputs=[graphs.numbers(320, seed=r)], op=op, factor=0.7)
            for r in range(8)
        ]
        return [shard for (shard,) in reduce_scatter(NetModel(8, 1, algorithm=algorithm), given)]

    same = all(map(torch.equal, reduced("pat"), reduced("ring")))
    assert same == (op == "premul_sum")


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=8)
def test_the_documentations_own_net(gt_world):
    """A net by the documented protocol: parity holds, its order shows, and messages and tables
    have its name.
    """
    own, example = {"__name__": "my_net"}, {"__name__": "test_nets"}
    for name, namespace in (("# my_net.py", own), ("# test_nets.py", example)):
        text = next(block for block in BLOCKS if block.startswith(name))
        exec(compile(text, name, "exec", dont_inherit=True), namespace)
    world = replace(gt_world, net=own["UpAndDown"](8))
    assert assert_simulated_parity(example["training"], world).control.outcome == "different"
    with pytest.raises(
        LayoutDifference, match=r"channel 0, up and down, summed in the order of ranks [07]"
    ):
        assert_simulated_parity(example["training"], world, payload_order="execution")
    assert row_of(world.net)["algorithm"] == "UpAndDown"


def test_a_table_tells_trees():
    nets = sweep_nets(8, nodes=[4], channels=[2], algorithm=["ring", "tree"])
    assert [row_of(net)["algorithm"] for net in nets] == ["ring", "tree"]


@pytest.mark.parametrize("op", ["sum", "product", "max", "min", "avg"])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "pat"])
def test_which_reductions_trees_and_pat_carry_out(algorithm, op):
    """NCCL has no PAT for averages, and trees for all-reduces alone."""
    net = NetModel(4, 1, algorithm=algorithm)
    found = [
        net.explain(collective, 0, 8, torch.float32, op=op).algorithm
        for collective in ("reduce_scatter", "all_reduce")
    ]
    scatters = "pat" if algorithm == "pat" and op != "avg" else "ring"
    assert found == [scatters, "tree" if algorithm == "tree" else "ring"]
