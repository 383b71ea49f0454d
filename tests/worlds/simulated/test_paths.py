"""The path of an element that differs, through the reductions of its rank."""

import pytest
import torch

from pytest_gtrainer import NetModel, Record, compare
from pytest_gtrainer.graph.layout import BucketLayout, Payload, Slot
from pytest_gtrainer.references.parity import paths_of_first

FOUR_NODES = NetModel(nodes=4, ranks_per_node=2, channels=2)
SLOTS = (Slot("a", 0, 16), Slot("b", 16, 48))
SHARDS, REPLICAS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))


def hybrid(*slots):
    """The two reductions of a gradient under hybrid sharding, as rank 0 has them."""
    scatter = Payload("reduce_scatter", torch.float32, SHARDS[0], "avg", slots)
    return BucketLayout((scatter, Payload("all_reduce", torch.float32, REPLICAS[0], "avg", slots)))


def group_of(rank, ranks):
    return next(group for group in (SHARDS if ranks in SHARDS else REPLICAS) if rank in group)


def records_that_differ_at(rank, parameter, row, column):
    records = [Record(world_size=8), Record(world_size=8)]
    for number, record in enumerate(records):
        for each in range(8):
            gradient = torch.zeros(3, 4)
            gradient[row, column] = number if each == rank else 0
            record.add(0, each, "gradient", parameter, gradient)
    return records


def lines_of(layouts, *where):
    one, other = records_that_differ_at(*where)
    return list(paths_of_first(FOUR_NODES, layouts, group_of, compare(one, other), one))


def test_a_rank_of_the_other_replica_goes_by_its_own_groups():
    """Rank 6 is member 2 of its shard group; channel 1 is the ring 1 0 3 2 5 4 7 6, restricted to
    the group's ranks.

    Of the all-reduce's 8 elements on that channel the last 4 start behind the second place, which
    is rank 6.
    """
    assert lines_of({"graph": hybrid(*SLOTS)}, 6, "b", 2, 1) == [
        "  graph: bucket 'a+b', reduce_scatter, element 13 of 16, channel 1, summed in the order "
        "of ranks 5 4 7 6",
        "      byte 0: a, 16 bytes",
        "    > byte 16: b, 48 bytes",
        "  graph: bucket 'a+b', all_reduce, element 13 of 16, channel 1, summed in the order of "
        "ranks 2 6",
        "      byte 0: a, 16 bytes",
        "    > byte 16: b, 48 bytes",
    ]


def test_a_rank_of_a_group_with_gaps_goes_by_its_place_there():
    """Rank 4 is member 2 of the even ranks: element 13 is the second of its shard, in the upper
    half of the ring.
    """
    groups = ((0, 2, 4, 6), (1, 3, 5, 7))
    layouts = {
        "graph": BucketLayout((Payload("reduce_scatter", torch.float32, groups[0], "avg", SLOTS),))
    }
    one, other = records_that_differ_at(4, "b", 2, 1)
    found = list(
        paths_of_first(
            FOUR_NODES, layouts, lambda rank, _: groups[rank % 2], compare(one, other), one
        )
    )
    net = FOUR_NODES.for_group(groups[0])
    expected = net.explain("reduce_scatter", 13, 16, torch.float32, 2, "avg")
    assert found[0].endswith(f"element 13 of 16, {expected}")
    assert str(expected) != str(net.explain("reduce_scatter", 13, 16, torch.float32, 0, "avg"))


def test_sides_that_place_it_otherwise_or_not_at_all():
    lines = lines_of(
        {"graph": hybrid(Slot("b", 0, 48)), "eager": hybrid(Slot("a", 0, 16))}, 0, "b", 0, 1
    )
    assert lines[0] == (
        "  graph: bucket 'b', reduce_scatter, element 1 of 12, channel 0, summed in the order of "
        "ranks 1 2 3 0"
    )
    assert lines[-1] == "  eager: no reduction of its layout holds b"


def test_a_replicated_gradient_is_reduced_by_itself():
    """D10: elements 4 to 7 start behind the second place of the ring."""
    assert lines_of({"graph": BucketLayout(())}, 3, "b", 1, 2) == [
        "  graph: reduced by itself, element 6 of 12, channel 0, summed in the order of ranks 2 3 "
        "4 5 6 7 0 1"
    ]


@pytest.mark.parametrize(("op", "algorithm"), [("avg", ""), ("sum", " pat,")])
def test_the_path_is_that_of_the_payloads_op(op, algorithm):
    """S9: NCCL averages on rings, where it may sum by PAT."""
    layouts = {
        "graph": BucketLayout((Payload("reduce_scatter", torch.float32, SHARDS[0], op, SLOTS),))
    }
    one, other = records_that_differ_at(0, "b", 0, 0)
    net = NetModel(nodes=8, ranks_per_node=1, algorithm="pat")
    path, *_ = paths_of_first(net, layouts, group_of, compare(one, other), one)
    assert f"element 4 of 16, channel 1,{algorithm} summed in the order of ranks" in path


def test_where_no_gradient_differs_there_is_no_path():
    one, other = Record(world_size=1), Record(world_size=1)
    one.add(0, 0, "loss", "loss", torch.zeros(()))
    other.add(0, 0, "loss", "loss", torch.ones(()))
    assert (
        list(
            paths_of_first(
                FOUR_NODES, {"graph": hybrid(*SLOTS)}, group_of, compare(one, other), one
            )
        )
        == []
    )
