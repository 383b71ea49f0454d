"""Collectives in a graph that is replayed for all ranks."""

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer import NetModel
from pytest_gtrainer.worlds.simulated import CollectiveMismatch, NoModel
from pytest_gtrainer.worlds.simulated.collectives import Contribution, all_reduce
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.steps import contributions
from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank
from tests.worlds.simulated.graphs import (
    c10d,
    different,
    graph_of,
    interpreter_of,
    numbers,
    run,
    wait,
    world_group,
)

pytestmark = pytest.mark.gt_world("fake", size=4)


def same(actual, expected):
    assert type(actual) is type(expected)
    for own, wanted in (
        zip(actual, expected, strict=True) if type(actual) is PerRank else [(actual, expected)]
    ):
        assert torch.equal(own, wanted)


def test_all_gather(gt_world):
    x = different(4, 2, 3)
    same(run(lambda x: wait(c10d.all_gather_into_tensor(x, 4, world_group())), x), torch.cat(x))


def test_what_was_broadcast_stays_when_the_root_writes_on(gt_world):
    """S7: on the root, too, what it gets is another tensor than what it gives."""

    def step(x):
        given = x + 0
        sent = wait(c10d.broadcast(given, 2, world_group()))
        given.add_(1)
        return sent

    x = different(4, 2, 3)
    output = run(step, x)
    for rank in range(4):
        assert torch.equal(of_rank(output, rank), x[2]), (
            f"rank {rank} has what rank 2 wrote behind the broadcast"
        )


def test_tensors_beside_each_other_in_a_buffer_but_transposed():
    """Their memory may be taken as it lies only where its order is that of their elements."""
    buffer = torch.arange(2 * 3 * 3, dtype=torch.float32).view(2, 3, 3)
    given = [Contribution(rank=rank, inputs=[buffer[rank].t()]) for rank in range(2)]
    expected = buffer[0].t() + buffer[1].t()
    for (total,) in all_reduce(NetModel(1, 2), given):
        assert torch.equal(total, expected), (
            f"elements are summed in the order of memory: {total.tolist()}"
        )


def test_parts_of_buffers_of_their_own_are_not_taken_for_parts_of_one():
    """Each rank gives another part of its own buffer, as those do who gather in place and keep
    their shards there.
    """
    buffers = [torch.full((2, 3), float(rank)) for rank in (1, 2)]
    given = [Contribution(rank=rank, inputs=[buffer[rank]]) for rank, buffer in enumerate(buffers)]
    for (total,) in all_reduce(NetModel(1, 2), given):
        assert total.tolist() == [3.0] * 3, (
            f"1 + 2 is {total[0]}: rank 0's buffer was read for both ranks"
        )


def test_reductions_add_in_the_order_of_the_net(gt_world):
    """The interpreter knows nothing of order, the net everything."""
    net = NetModel(nodes=2, ranks_per_node=2)
    x = PerRank(value.bfloat16() for value in different(4, 32, 5))
    rows = torch.stack(list(x)).view(4, -1)
    shards, total = run(
        lambda x: (
            wait(c10d.reduce_scatter_tensor(x, "avg", 4, world_group())),
            wait(c10d.all_reduce(x, "sum", world_group())),
        ),
        x,
        net=net,
    )
    same(shards, PerRank(net.reduce_scatter(rows, "avg").view(4, 8, 5)))
    same(total, net.all_reduce(rows, "sum").view(32, 5))
    other = NetModel(nodes=1, ranks_per_node=4)
    assert not torch.equal(total, other.all_reduce(rows, "sum").view(32, 5))


def test_what_every_rank_gives_alike_is_reduced_too(gt_world):
    x = numbers(8)
    shards = run(lambda x: wait(c10d.reduce_scatter_tensor(x, "sum", 4, world_group())), x)
    same(shards, PerRank((x * 4).chunk(4)))


def test_broadcast(gt_world):
    x = different(4, 3)
    same(run(lambda x: wait(c10d.broadcast(x, 2, world_group())), x), x[2])


def test_all_to_all_with_splits_of_its_own_on_every_rank(gt_world):
    """Rank i sends i + j rows to rank j."""
    sends = PerRank([[rank + other for other in range(4)] for rank in range(4)])
    x = PerRank(numbers(sum(own), 2, seed=rank) for rank, own in enumerate(sends))

    def build(graph):
        given, splits = graph.placeholder("x"), graph.placeholder("splits")
        sent = graph.call_function(
            c10d.all_to_all_single.default, (given, splits, splits, world_group())
        )
        return graph.call_function(c10d.wait_tensor.default, (sent,))

    parts = [value.split(own) for value, own in zip(x, sends, strict=True)]
    expected = PerRank(torch.cat([parts[source][rank] for source in range(4)]) for rank in range(4))
    same(interpreter_of(graph_of(build)).run([x, sends]), expected)


def test_lists_of_tensors(gt_world):
    x, y = different(4, 4), different(4, 8)
    net = NetModel.of_world(4)
    (shard_x, shard_y), (all_x, all_y), (sum_x, sum_y) = run(
        lambda x, y: (
            [
                wait(own)
                for own in c10d.reduce_scatter_tensor_coalesced([x, y], "sum", 4, world_group())
            ],
            [wait(own) for own in c10d.all_gather_into_tensor_coalesced([x, y], 4, world_group())],
            [wait(own) for own in c10d.all_reduce_coalesced([x, y], "sum", world_group())],
        ),
        x,
        y,
    )
    for own, shard, gathered, total in ((x, shard_x, all_x, sum_x), (y, shard_y, all_y, sum_y)):
        same(shard, PerRank(net.reduce_scatter(torch.stack(list(own)), "sum")))
        same(gathered, torch.cat(list(own)))
        same(total, net.all_reduce(torch.stack(list(own)), "sum"))


def test_in_place_collectives_write_where_others_look(gt_world):
    """A view of what is reduced in place sees the sum."""
    x = different(4, 4)
    expected = NetModel.of_world(4).all_reduce(torch.stack(list(x)), "sum")

    def in_place(x):
        y = x * 1
        view = y.view(2, 2)
        wait(c10d.all_reduce_(y, "sum", world_group()))
        return view + 0

    result = run(in_place, x)
    for own in result:
        assert torch.equal(own, expected.view(2, 2)), (
            "a view of what was reduced in place does not show the sum"
        )


def test_an_input_that_is_reduced_in_place_has_the_sum_though_nothing_in_the_graph_reads_it(
    gt_world,
):
    """S7: a buffer, say, which the next step reads."""
    x = different(4, 4)
    expected = NetModel.of_world(4).all_reduce(torch.stack(list(x)), "sum")
    given = PerRank(own.clone() for own in x)
    run(lambda x: wait(c10d.all_reduce_(x, "sum", world_group())), given)
    assert all(torch.equal(own, expected) for own in given), "the ranks' inputs are not written to"


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_gather_into_a_buffer_fills_it_only_if_somebody_looks(gt_world, looked_at):
    """The buffers of all ranks would be the largest part of the memory."""
    x = different(4, 2)

    def into_buffer(x):
        buffer = torch.empty(8)
        gathered = wait(c10d.all_gather_into_tensor_out(x, 4, world_group(), out=buffer))
        return (gathered, buffer * 1) if looked_at else gathered

    result = run(into_buffer, x)
    if looked_at:
        for value in (value for rank in range(4) for value in of_rank(result, rank)):
            assert torch.equal(value, torch.cat(x))
    else:
        same(result, torch.cat(x))


def test_a_buffer_of_all_ranks_that_groups_fill_is_one_for_each(gt_world):
    """S7 for collectives: what one group writes, another must not see."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    name = mesh["shard"].get_group().group_name
    x = different(4, 2)

    def into_buffer(x):
        buffer = torch.empty(4)
        view = buffer.view(2, 2)
        wait(c10d.all_gather_into_tensor_out(x, 2, name, out=buffer))
        return view * 1

    result = run(into_buffer, x, meshes=[mesh["shard"]])
    same(result, PerRank(torch.stack([x[a], x[b]]) for a, b in ((0, 1), (0, 1), (2, 3), (2, 3))))


def test_shards_of_another_dimension(gt_world):
    operator = torch.ops._dtensor.shard_dim_alltoall.default
    for gathered, sharded, x in ((1, 0, different(4, 8, 2)), (0, 1, different(4, 2, 8))):
        dims = gathered, sharded, world_group()
        gm = graph_of(
            lambda graph, dims=dims: graph.call_function(operator, (graph.placeholder("x"), *dims))
        )
        shards = interpreter_of(gm).run([x])
        same(shards, PerRank(torch.cat(list(x), gathered).chunk(4, sharded)))
        whole = [shard.is_contiguous() for shard in shards]
        assert whole == [True] * 4, (
            "torch copies the shards out: of a strided one a sum has other bits"
        )


def test_subgroups_are_those_of_the_mesh(gt_world):
    """Every rank has its own group along a dimension; the graph names the first rank's."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    columns, rows = (mesh[name].get_group().group_name for name in mesh.mesh_dim_names)
    x = different(4, 3)
    by_row, by_column = run(
        lambda x: (
            wait(c10d.all_gather_into_tensor(x, 2, rows)),
            wait(c10d.all_gather_into_tensor(x, 2, columns)),
        ),
        x,
        meshes=[mesh["shard"]],
    )
    same(by_row, PerRank(torch.cat([x[a], x[b]]) for a, b in ((0, 1), (0, 1), (2, 3), (2, 3))))
    same(by_column, PerRank(torch.cat([x[a], x[b]]) for a, b in ((0, 2), (1, 3), (0, 2), (1, 3))))
    assert by_row[0] is by_row[1]


@pytest.mark.gt_world("fake", size=8)
def test_flattened_dimensions_are_groups_too(gt_world):
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    name = mesh["pp", "dp"]._flatten("pp_dp").get_group().group_name
    x = different(8, 1)
    gathered = run(lambda x: wait(c10d.all_gather_into_tensor(x, 4, name)), x, meshes=[mesh])
    same(
        gathered,
        PerRank(torch.cat([x[rank] for rank in range(parity, 8, 2)]) for parity in (0, 1) * 4),
    )


def test_groups_of_a_mesh_in_any_order_are_sorted(gt_world):
    """Torch sorts the ranks of a new group."""
    mesh = dist.DeviceMesh("cpu", torch.tensor([[3, 0], [1, 2]]), mesh_dim_names=("a", "b"))
    group = mesh["b"].get_group()
    x = different(4, 1)
    gathered = run(
        lambda x: wait(c10d.all_gather_into_tensor(x, 2, group.group_name)), x, meshes=[mesh]
    )
    same(gathered, PerRank(torch.cat([x[a], x[b]]) for a, b in ((0, 3), (1, 2), (1, 2), (0, 3))))
    assert dist.get_process_group_ranks(group) == [0, 3]


@pytest.mark.gt_world("fake", size=8)
def test_a_mesh_of_some_ranks_leaves_open_what_the_others_do(gt_world):
    mesh = dist.DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("a",))
    name = mesh.get_group().group_name
    with pytest.raises(
        ValueError,
        match=r"of ranks 0 1 2 3 is no dimension of the meshes given: .* covers all ranks",
    ):
        run(lambda x: wait(c10d.all_gather_into_tensor(x, 4, name)), different(8, 1), meshes=[mesh])


def test_a_group_that_is_no_dimension_is_refused_by_its_ranks(gt_world):
    mesh = dist.init_device_mesh("cpu", (4,))
    name = dist.new_group([0, 3]).group_name
    with pytest.raises(ValueError, match="of ranks 0 3 is no dimension of the meshes given"):
        run(lambda x: wait(c10d.all_gather_into_tensor(x, 2, name)), different(4, 1), meshes=[mesh])


def test_a_graph_with_groups_given_by_hand(gt_world):
    gm = graph_of(
        lambda graph: graph.call_function(
            c10d.all_gather_into_tensor.default, (graph.placeholder("x"), 2, "pairs")
        )
    )
    graph = RankGraph(gm, 0, 4, {"pairs": ((0, 3), (1, 2))})
    x = different(4, 1)
    same(
        Interpreter(graph, NetModel.of_world(4)).run([x]),
        PerRank(torch.cat([x[a], x[b]]) for a, b in ((0, 3), (1, 2), (1, 2), (0, 3))),
    )


def test_a_rank_has_its_own_group_along_a_dimension():
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    graph = RankGraph(
        graph_of(lambda graph: graph.placeholder("x")), 0, 4, {"5": rows, "7": columns}
    )
    assert graph.group_of(3, (0, 1)) == (2, 3)
    assert graph.group_of(3, (0, 2)) == (1, 3)


@pytest.mark.gt_world("fake", size=1)
def test_a_world_of_one(gt_world):
    x = numbers(4)
    gathered, shard, total = run(
        lambda x: (
            wait(c10d.all_gather_into_tensor(x, 1, world_group())),
            wait(c10d.reduce_scatter_tensor(x, "avg", 1, world_group())),
            wait(c10d.all_reduce(x, "sum", world_group())),
        ),
        x,
    )
    for value in (gathered, shard, total):
        assert torch.equal(value, x)


def call(operator, *arguments):
    return graph_of(
        lambda graph: graph.call_function(operator, (graph.placeholder("x"), *arguments))
    )


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (c10d.isend.default, (1, 0, "0")),
        (torch.ops.c10d.barrier.default, ("0", [0], -1)),
        (torch.ops.symm_mem.one_shot_all_reduce.default, ("sum", "0")),
    ],
    ids=["send", "c10d", "symmetric memory"],
)
def test_a_collective_without_a_model_is_refused_by_name(gt_world, operator, arguments):
    """S5: never passed through silently."""
    name = str(operator).replace(".", r"\.")
    with pytest.raises(
        NoModel,
        match=rf"{name} \(.*\) has no model in a simulated world, which has all_gather_into",
    ):
        interpreter_of(call(operator, *arguments))


def test_a_reduction_without_a_model_is_refused_by_name_and_place(gt_world):
    """S5."""
    with pytest.raises(NoModel, match="all_reduce with op 'bxor' has no model") as error:
        run(lambda x: wait(c10d.all_reduce(x, "bxor", world_group())), different(4, 1))
    assert error.value.__notes__ == ["in all_reduce (_c10d_functional.all_reduce.default)"]


@pytest.mark.parametrize(
    ("operator", "arguments", "inputs", "sentence"),
    [
        (
            c10d.all_reduce,
            ("sum",),
            [(2,), (2,), (3,), (2,)],
            r"rank 0 gives float32\[2\], rank 2 gives float32\[3\]",
        ),
        (
            c10d.all_gather_into_tensor,
            (2,),
            [(2,)] * 4,
            "the graph was traced for a group of 2, it has 4",
        ),
        (
            c10d.reduce_scatter_tensor,
            ("sum", 4),
            [(6,)] * 4,
            "6 rows do not divide over 4 ranks: pad them",
        ),
        (
            c10d.all_to_all_single,
            ([1, 1, 1, 1], [2, 1, 1, 0]),
            [(4,)] * 4,
            "rank 0 sends 2 rows to rank 0, which expects 1",
        ),
        (
            c10d.all_to_all_single,
            ([1, 2, 1, 0], [1, 1, 1, 1]),
            [(4,)] * 4,
            "rank 1 sends 1 row to rank 0, which expects 2",
        ),
        (
            c10d.all_to_all_single,
            ([1, 1, 1, 1], [1, 1, 1, 1]),
            [(4,), (4,), (4,), (5,)],
            r"rank 3 splits 5 rows into \[1, 1, 1, 1\] and receives \[1, 1, 1, 1\], in a group of "
            r"4 ranks",
        ),
        (
            c10d.all_to_all_single,
            ([1, 1, 1, 1], [1, 1, 1, 1]),
            [(4, 2), (4, 3), (4, 2), (4, 2)],
            r"rank 0 gives float32\[4, 2\], rank 1 gives float32\[4, 3\]",
        ),
    ],
    ids=["sizes", "group", "rows", "expected rows", "fewer rows", "splits", "widths"],
)
def test_ranks_that_disagree_are_an_error(gt_world, operator, arguments, inputs, sentence):
    """S5: of sizes, splits or the group; it names both ranks and the collective."""
    gm = call(operator.default, *arguments, world_group())
    with pytest.raises(CollectiveMismatch, match=sentence) as error:
        interpreter_of(gm).run([PerRank(map(torch.ones, inputs))])
    assert str(operator) in error.value.__notes__[0]


@pytest.mark.parametrize(
    "operator", [c10d.all_reduce, c10d.reduce_scatter_tensor, c10d.all_gather_into_tensor]
)
def test_ranks_that_give_other_dtypes_are_an_error(gt_world, operator):
    """S5: of one size, and yet torch would read the one's bytes as the other's numbers."""
    arguments = {c10d.all_reduce: ("sum",), c10d.reduce_scatter_tensor: ("sum", 4)}.get(
        operator, (4,)
    )
    given = PerRank(
        torch.ones(4, dtype=torch.bfloat16 if rank == 3 else torch.float32) for rank in range(4)
    )
    with pytest.raises(
        CollectiveMismatch, match=r"rank 0 gives float32\[4\], rank 3 gives bfloat16\[4\]"
    ):
        interpreter_of(call(operator.default, *arguments, world_group())).run([given])


@pytest.mark.parametrize("ranks", [(2, 3), (1, 5, 6), (7, 0)], ids=str)
def test_ranks_of_any_group_that_disagree_are_named(ranks):
    """Ranks are named by their numbers in the world, whichever group it is, whoever is odd."""

    def calls(odd, even):
        return [{"input": odd if rank == ranks[-1] else even} for rank in ranks]

    wide = calls(torch.ones(4, dtype=torch.float64), torch.ones(4))
    words = rf"rank {ranks[0]} gives float32\[4\], rank {ranks[-1]} gives float64\[4\]"
    with pytest.raises(CollectiveMismatch, match=words):
        contributions(wide, ranks)
    long = calls(torch.ones(5), torch.ones(4))
    words = rf"rank {ranks[0]} gives float32\[4\], rank {ranks[-1]} gives float32\[5\]"
    with pytest.raises(CollectiveMismatch, match=words):
        contributions(long, ranks)
    splits = {"input_split_sizes": [2] * len(ranks), "output_split_sizes": [2] * len(ranks)}
    rows = calls(torch.ones(1), torch.ones(2 * len(ranks)))
    words = f"rank {ranks[-1]} splits 1 rows into .*, in a group of {len(ranks)} ranks"
    with pytest.raises(CollectiveMismatch, match=words):
        contributions([call | splits for call in rows], ranks)
    assert [own.rank for own in contributions(calls(torch.ones(1), torch.ones(1)), ranks)] == [
        *ranks
    ]


def test_ranks_that_give_lists_of_different_lengths(gt_world):
    gm = call(c10d.all_reduce_coalesced.default, "sum", world_group())
    with pytest.raises(CollectiveMismatch, match="the ranks give lists of 0 and 1 tensors"):
        interpreter_of(gm).run([PerRank([[torch.ones(1)], [], [], []])])


def test_a_net_for_another_number_of_ranks_is_refused(gt_world):
    gm = call(c10d.all_gather_into_tensor.default, 4, world_group())
    with pytest.raises(ValueError, match="the net connects 8 ranks, the graph was traced for 4"):
        interpreter_of(gm, net=NetModel(1, 8))
