"""The nets against what NCCL's kernels do, restated in ``nccl``: bit for bit, on every rank."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch

from pytest_gtrainer import NetModel
from pytest_gtrainer.worlds.simulated.trees import pat_delta, pat_order, tree_sum
from tests.worlds.simulated import nccl

COLLECTIVES = ["reduce_scatter", "all_reduce"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = [1, 7, 16, 65, 333]


def numbers(rows, columns, dtype):
    """Return numbers of many sizes: a sum in another order has other bits in most elements."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 8).to(dtype)


def rings_of(net):
    """Return the rings by channel, of a group's own ranks in their order."""
    size, per = net.nodes * net.ranks_per_node, net.ranks_per_node
    rail = [
        [node * per + (channel - hop) % per for node in range(net.nodes) for hop in range(per)]
        for channel in range(net.channels or 4)
    ]
    members = list(net.members or range(size))
    return [[members.index(rank) for rank in ring if rank in members] for ring in net.rings or rail]


def chains_of(net):
    """Return by channel and node the group's ranks in the order of the ring, from its entry to the
    node.
    """
    per, members = net.ranks_per_node, list(net.members or range(net.nodes * net.ranks_per_node))
    chains = []
    for listed in rings_of(net):
        ring = listed[listed.index(0) :] + listed[: listed.index(0)]
        nodes = [members[rank] // per for rank in ring]
        while len(set(nodes)) > 1 and nodes[0] == nodes[-1]:
            ring, nodes = ring[1:] + ring[:1], nodes[1:] + nodes[:1]
        by_node = {
            node: [rank for rank, own in zip(ring, nodes, strict=True) if own == node]
            for node in nodes
        }
        chains.append(sorted(by_node.values(), key=min))
    return chains


def differing(net, collective, length, dtype, op, algorithm="ring"):
    """Count the elements of all ranks that differ from the results of NCCL's kernels."""
    inputs = numbers(net.size, length * (net.size if collective == "reduce_scatter" else 1), dtype)
    theirs = nccl.reduced(
        collective,
        algorithm,
        inputs,
        op,
        net=net,
        rings=rings_of(net),
        chains=chains_of(net),
        protocol=net.protocol,
        chunk_bytes=net.chunk_bytes,
    )
    ours = getattr(net, collective)(inputs, op)
    return int((ours.expand_as(theirs) != theirs).sum())


def shuffled_rings(size, channels, seed):
    rng = random.Random(seed)
    return [rng.sample(range(size), size) for _ in range(channels)]


NETS = [
    NetModel(2, 1, channels=3),
    NetModel(1, 8, channels=2),
    NetModel(2, 4),
    NetModel(3, 2, channels=5),
    NetModel(2, 4).for_group((1, 2, 5, 7)),
    NetModel(2, 4).for_group((6, 1, 3)),
    NetModel(1, 5, rings=shuffled_rings(5, 3, seed=1)),
    NetModel(2, 4, rings=shuffled_rings(8, 2, seed=2)),
    NetModel(2, 4, rings=shuffled_rings(8, 2, seed=3)).for_group((7, 4, 3, 0, 2)),
]


@pytest.mark.second_tier("contiguous", "cells-reduce_scatter")
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("partition", ["contiguous", "cells"])
def test_rings_add_as_nccl_does(collective, partition):
    """S9: rings begin anywhere, groups have any order, chunks loop; all lengths, dtypes and ops."""
    found = {
        (net, length, dtype, op, chunk): differing(
            replace(net, partition=partition, chunk_bytes=chunk), collective, length, dtype, op
        )
        for net in NETS
        for length in LENGTHS
        for dtype in DTYPES
        for op in ("sum", "avg")
        for chunk in (None, 32)
    }
    assert {case: elements for case, elements in found.items() if elements} == {}, (
        f"of {len(found)} comparisons"
    )


@pytest.mark.second_tier
@pytest.mark.parametrize("protocol", ["Simple", "LL", "LL128"])
@pytest.mark.parametrize("partition", ["contiguous", "cells"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_chunks_and_cells_of_each_protocol(collective, partition, protocol):
    """S9: payloads of a few bytes to several loops of LL's chunks, with and without a rest."""
    net = NetModel(2, 2, channels=3, partition=partition, protocol=protocol)
    lengths = [40, 4096, 24_577, 100_000]
    found = {
        length: differing(net, collective, length, torch.bfloat16, "sum") for length in lengths
    }
    assert not any(found.values()), found


@pytest.mark.second_tier
@pytest.mark.parametrize("protocol", nccl.CHUNK_BYTES)
def test_a_loop_of_each_protocol_and_a_little_more(protocol):
    """S9: all_reduce.h:23, with NCCL's own lengths of chunks."""
    net, loop = NetModel(3, 1, channels=1, protocol=protocol), 3 * nccl.CHUNK_BYTES[protocol] // 2
    assert differing(net, "all_reduce", loop + 1001, torch.bfloat16, "sum") == 0


def test_every_channel_has_the_cells_that_nccl_gives_it():
    """S9: the first and the last element of each channel's part, from less than a cell to many.

    LL's are smaller.
    """
    found = []
    for ranks, channels, protocol, dtype, collective in itertools.product(
        (2, 3, 8), (1, 3, 4), ("Simple", "LL"), (torch.float32, torch.bfloat16), COLLECTIVES
    ):
        net = NetModel(1, ranks, channels=channels, partition="cells", protocol=protocol)
        for count in (1, 3_000, 24_577, 100_003):
            theirs = nccl.cells(count, dtype.itemsize, ranks, channels, collective, protocol)
            for channel, (begin, length) in enumerate(theirs):
                for offset in (begin, begin + length - 1):
                    ours = net.explain(collective, offset, count, dtype).channel
                    if ours != channel:
                        found.append(
                            f"{collective} of {count} {dtype}, {protocol}, {ranks} ranks: {offset} "
                            f"in {ours}"
                        )
    assert not found, f"{len(found)} elements go through another channel than NCCL's, {found[0]}"


def test_a_cell_more_than_the_channels_hold():
    """Two bytes of traffic above a whole number of cells: the last channel takes the cell that is
    left.
    """
    net = NetModel(1, 3, channels=3, partition="cells")
    inputs = torch.randint(0, 9, (3, 3 * 16384 + 1), dtype=torch.int8)
    theirs = nccl.reduced(
        "all_reduce", "ring", inputs, "sum", net=net, rings=rings_of(net), chains=None
    )
    assert nccl.cells(3 * 16384 + 1, 1, 3, 3, "all_reduce", "Simple")[-1] == (32768, 16385)
    assert torch.equal(net.all_reduce(inputs, "sum").expand_as(theirs), theirs)
    assert net.explain("all_reduce", 3 * 16384, 3 * 16384 + 1, torch.int8).channel == 2


TREES = [
    NetModel(nodes, per, channels=channels, algorithm="tree")
    for nodes, per, channels in [
        (1, 4, 2),
        (2, 1, 1),
        (2, 8, 4),
        (3, 3, 2),
        (4, 1, 3),
        (5, 2, 4),
        (7, 1, 2),
        (16, 2, 2),
    ]
] + [
    NetModel(4, 4, algorithm="tree").for_group((1, 5, 9, 13)),
    NetModel(4, 4, algorithm="tree").for_group((14, 1, 2, 3, 9, 8)),
    NetModel(2, 4, rings=shuffled_rings(8, 2, seed=5), algorithm="tree"),
]


@pytest.mark.parametrize("net", TREES, ids=lambda net: f"{net.nodes}x{net.ranks_per_node}")
def test_trees_add_as_nccl_does(net):
    """S9: double binary trees over nodes, chains inside; groups of one rank or some of a node."""
    for length in LENGTHS:
        for dtype in DTYPES:
            for op in ("sum", "avg"):
                assert differing(net, "all_reduce", length, dtype, op, "tree") == 0, (
                    length,
                    dtype,
                    op,
                )


def test_pat_adds_as_nccl_does():
    """S9: 2 to 32 ranks on as many nodes.

    Shards so small that NCCL aggregates more of them, and large ones.
    """
    found = {}
    for size in [*range(2, 18), 32]:
        net = NetModel(size, 1, channels=2, algorithm="pat")
        for length in (1, 3000) if size < 32 else (1, 20_000):
            found[size, length] = differing(
                net, "reduce_scatter", length, torch.bfloat16, "sum", "pat"
            )
    assert not any(found.values()), found


def test_what_pat_aggregates_and_in_which_order():
    """S9: for parts of any size; and 64 ranks with large parts, along three dimensions below."""
    for ranks in range(2, 40):
        for size in (1, 100, 5000, 16_384, 32_768, 70_000, 10**6):
            theirs = nccl.Pat(nccl.pat_chunk_bytes(size * ranks), size, 0, ranks).agg_delta
            assert pat_delta(size, ranks) == theirs, (ranks, size)
    inputs, out, wires = (
        numbers(64, 64, torch.bfloat16),
        torch.empty(64, 1, dtype=torch.bfloat16),
        nccl.Wires(),
    )
    pats = [nccl.Pat(1 << 16, 1 << 17, rank, 64) for rank in range(64)]
    wires.run(
        nccl.pat_reduce_scatter(wires, pat, inputs[pat.rank], out[pat.rank], 1, (0, 1), "sum")
        for pat in pats
    )
    order = pat_order(64, pats[0].agg_delta)
    for to in range(64):
        ours = tree_sum(
            order,
            lambda distance, to=to: inputs[(to - distance) % 64, to],
            "sum",
            "premultiply",
            64,
        )
        assert ours == out[to, 0]


@pytest.mark.parametrize("op", ["avg", "premul_sum"])
def test_pat_leaves_to_rings_what_multiplies(op):
    """enqueue.cc:2009: an average is a PreMulSum; and with two ranks on a node there is no PAT at
    all.
    """
    inputs, pat = numbers(8, 8 * 40, torch.bfloat16), NetModel(8, 1, algorithm="pat")
    ring = replace(pat, algorithm="ring")
    assert torch.equal(pat.reduce_scatter(inputs, op), ring.reduce_scatter(inputs, op))
    assert not torch.equal(pat.reduce_scatter(inputs, "sum"), ring.reduce_scatter(inputs, "sum"))
    two = NetModel(4, 2, algorithm="pat")
    assert torch.equal(
        two.reduce_scatter(inputs, "sum"),
        replace(two, algorithm="ring").reduce_scatter(inputs, "sum"),
    )
    assert (
        two.for_group((0, 3, 5)).explain("reduce_scatter", 0, 8, torch.float32).algorithm == "pat"
    )


@pytest.mark.parametrize("algorithm", ["tree", "pat"])
def test_the_path_is_that_of_the_sum(algorithm):
    """Added by hand in the order that ``explain`` gives, every element has the same bits."""
    net = NetModel(6, 2 if algorithm == "tree" else 1, algorithm=algorithm)
    if algorithm == "tree":
        net = net.for_group((11, 0, 3, 4, 9, 7, 2))
    members = list(net.members or range(net.size))
    collective = "all_reduce" if algorithm == "tree" else "reduce_scatter"
    inputs = numbers(net.size, 50 if algorithm == "tree" else 50 * net.size, torch.bfloat16)
    sums = getattr(net, collective)(inputs, "sum").view(-1)

    def added(order, offset):
        terms = [
            added(t, offset) if isinstance(t, tuple) else inputs[members.index(t), offset]
            for t in order
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    for offset in range(sums.numel()):
        path = net.explain(collective, offset % 50, 50, torch.bfloat16, offset // 50)
        assert path.algorithm == algorithm
        assert added(path.ranks, offset) == sums[offset], (offset, str(path))


@pytest.mark.parametrize("op", ["sum", "product", "max", "min", "avg", "premul_sum"])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "pat"])
def test_every_op_combines_along_the_path(algorithm, op):
    """Rank by rank as ``explain`` says: an average scales every input once, or divides the end.

    A sum does neither.
    """
    combine = nccl.OPS.get(op, torch.add)
    for net in (
        NetModel(3, 1, channels=2, algorithm=algorithm),
        NetModel(3, 2, channels=3, algorithm=algorithm),
    ):
        for average in ("premultiply", "divide"):
            net, inputs = (
                replace(net, average=average),
                numbers(net.size, 6 * net.size, torch.bfloat16),
            )
            factor = torch.tensor(1 / net.size, dtype=torch.bfloat16)
            scaled = inputs * factor if op == "avg" and average == "premultiply" else inputs
            for collective, count in (("reduce_scatter", 6), ("all_reduce", 6 * net.size)):
                ours = getattr(net, collective)(inputs, op).view(-1)

                def along(order, offset, scaled=scaled):
                    terms = [
                        along(t, offset) if isinstance(t, tuple) else scaled[t, offset]
                        for t in order
                    ]
                    return functools.reduce(combine, terms)

                for offset in range(6 * net.size):
                    path = net.explain(
                        collective, offset % count, count, torch.bfloat16, offset // count, op
                    )
                    total = along(path.ranks, offset)
                    theirs = total / net.size if op == "avg" and average == "divide" else total
                    assert ours[offset] == theirs, (
                        f"{op} ({average}) by {collective}, element {offset}: {path}"
                    )


def test_pieces_dealt_in_turn_are_as_long_as_what_goes_around_at_once():
    """Before 2.20.3: a ring all-reduce takes a chunk for each rank in turn, a tree or a
    reduce-scatter one chunk.
    """
    for algorithm, collective, ranks_at_once in (
        ("ring", "all_reduce", 4),
        ("tree", "all_reduce", 1),
        ("ring", "reduce_scatter", 1),
    ):
        net = NetModel(
            2, 2, channels=3, algorithm=algorithm, partition="round-robin", chunk_bytes=32
        )
        channels = [net.explain(collective, at, 100, torch.float32).channel for at in range(100)]
        assert channels == [at // (8 * ranks_at_once) % 3 for at in range(100)], (
            f"{collective} by {algorithm}"
        )


def test_a_group_has_trees_of_its_own_and_not_those_that_were_given():
    """Trees from a log are of the whole world: among a group's ranks NCCL builds others, over the
    nodes they lie on.
    """
    net = NetModel(2, 2, channels=1, algorithm="tree", trees=[[[1], [2], [3], []]])
    group = net.for_group((3, 1))
    assert net.explain("all_reduce", 0, 8, torch.float32).ranks == (3, 2, 1, 0), (
        "the world's is the one given"
    )
    assert set(group.explain("all_reduce", 0, 8, torch.float32).ranks) == {1, 3}
    inputs = numbers(2, 16, torch.float32)
    assert torch.equal(group.all_reduce(inputs, "sum"), inputs[0] + inputs[1]), (
        "the group's two ranks, and no other"
    )


def test_algorithms_differ():
    """The twin: what is compared with NCCL's trees could have differed, and so could the second
    tree from the first.
    """
    inputs, tree = numbers(8, 256, torch.bfloat16), NetModel(4, 2, algorithm="tree")
    assert not torch.equal(
        tree.all_reduce(inputs, "sum"), replace(tree, algorithm="ring").all_reduce(inputs, "sum")
    )
    assert tree.explain("all_reduce", 0, 256, torch.float32) != tree.explain(
        "all_reduce", 255, 256, torch.float32
    )
    assert torch.equal(
        tree.reduce_scatter(inputs, "sum"),
        replace(tree, algorithm="ring").reduce_scatter(inputs, "sum"),
    )


def test_a_tree_reads_as_a_sentence():
    path = NetModel(2, 4, channels=2, algorithm="tree").explain("all_reduce", 0, 8, torch.float32)
    assert str(path) == (
        "channel 0, tree, summed in the order of ranks 1 2 3 0 (5 6 7 4), "
        "where what stands in brackets arrives as one sum"
    )
