"""Uniform values, values of groups and ranks, and memory that ranks write to."""

import operator
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gtrainer import NetModel
from pytest_gtrainer.worlds.simulated import DependsOnRank
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.values import Sharings, at, of_rank
from tests.worlds.simulated.graphs import (
    Counted,
    c10d,
    different,
    interpreter_of,
    numbers,
    run,
    wait,
    world_group,
)

aten = torch.ops.aten
RANKS = 4


def replayed(gm, inputs):
    """Return the results of every rank by itself, from inputs of its own, and the inputs after
    that.
    """
    own = [[at(value, rank).clone() for value in inputs] for rank in range(RANKS)]
    return [(gm(*values), values) for values in own]


def assert_same(actual, expected, what):
    """Say which value of which rank is another than that of the rank by itself."""
    equal = actual.equal(expected)
    assert equal, (
        f"{what} is {actual.tolist()} in the interpreter, and {expected.tolist()} where the rank "
        f"runs alone"
    )


def alone(gm, inputs):
    """The interpreter for a graph without collectives, which needs no world."""
    return Interpreter(RankGraph(gm, 0, RANKS, {}), NetModel.of_world(RANKS)).run(inputs)


@pytest.mark.gt_world("fake", size=4)
def test_each_operator_runs_once_for_those_who_share_its_operands(gt_world):
    """S7: once for all ranks, once a group, or once a rank."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    name = mesh["shard"].get_group().group_name

    def step(weight, shard, x):
        by_all = weight.sin()
        gathered = wait(c10d.all_gather_into_tensor(shard, 2, name))
        by_group = gathered.cos()
        return x.tan() * by_all * by_group + gathered, by_all, by_group

    inputs = [numbers(4), different(4, 2), different(4, 4)]
    interpreter = interpreter_of(make_fx(step)(*(at(value, 0) for value in inputs)), mesh)
    with Counted() as counted:
        product, by_all, by_group = interpreter.run(inputs)
    counts = {name: counted.counts[name] for name in ("sin", "cos", "tan", "mul")}
    assert counts == {"sin": 1, "cos": 2, "tan": 4, "mul": 8}
    assert isinstance(by_all, torch.Tensor)
    assert by_group[0] is by_group[1] is not by_group[2]
    shards = inputs[1]
    gathered = [torch.cat(shards[:2])] * 2 + [torch.cat(shards[2:])] * 2
    for rank, own in enumerate(product):
        expected = inputs[2][rank].tan() * by_all * by_group[rank] + gathered[rank]
        assert_same(own, expected, f"the product of rank {rank}")


def test_ranks_that_are_given_the_same_tensor_share_its_results():
    a, b = numbers(3), numbers(3, seed=1)
    gm = make_fx(torch.sin)(a)
    with Counted() as counted:
        result = alone(gm, [PerRank([a, b, a, a])])
    assert counted.counts["sin"] == 2
    assert result[0] is result[2]


def test_what_a_rank_needs_inside_is_gone_before_the_next_one():
    """Memory is freed at the last use: of each rank's temporaries one is alive at a time."""
    temporaries, most = [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func in (aten.sin.default, aten.cos.default, aten.tan.default):
                temporaries.append(weakref.ref(result))
            most.append(sum(temporary() is not None for temporary in temporaries))
            return result

    gm = make_fx(lambda x: x.sin().cos().tan().sum())(torch.ones(3))
    with Watch():
        alone(gm, [different(RANKS, 3)])
    assert len(temporaries) == 3 * RANKS
    assert max(most) == 2  # an operator's operand and its result


class Payloads(TorchDispatchMode):
    """Counts the results of ``sin`` that are alive whenever ``cos`` runs."""

    def __init__(self):
        super().__init__()
        self._results, self.alive = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is aten.sin.default:
            self._results.append(weakref.ref(result))
        if func is aten.cos.default:
            self.note()
        return result

    def note(self):
        self.alive.append(sum(result() is not None for result in self._results))


def watched(function, net=None):
    """Watch a run of ``function`` on one tensor a rank."""
    interpreter = interpreter_of(make_fx(function)(torch.ones(3)), net=net)
    with Payloads() as payloads:
        if net is not None:
            net.payloads = payloads
        interpreter.run([different(4, 3)])
    return payloads.alive


@pytest.mark.gt_world("fake", size=4)
def test_what_was_reduced_is_gone_when_the_graph_goes_on(gt_world):
    assert watched(lambda x: wait(c10d.all_reduce(x.sin(), "sum", world_group())).cos()) == [0]


class WatchedNet:
    """Notes what is alive while it reduces."""

    size = 4

    def for_group(self, ranks):
        return self

    def all_reduce(self, inputs, op):
        self.payloads.note()
        return inputs.sum(0)


@pytest.mark.gt_world("fake", size=4)
@pytest.mark.parametrize(
    "between", [False, True], ids=["computed right before", "computed earlier"]
)
def test_while_ranks_reduce_there_is_one_copy_of_their_payloads(gt_world, between):
    def step(x):
        payload = x.sin()
        if between:
            torch.rand(1)  # a step of its own: the payloads wait as the ranks made them
        return wait(c10d.all_reduce(payload, "sum", world_group()))

    assert watched(step, net=WatchedNet()) == [0]


@pytest.mark.gt_world("fake", size=4)
def test_a_value_goes_rank_by_rank_where_it_is_used_last(gt_world):
    """One value less of those that all ranks made before a collective lives when the next rank goes
    on.
    """

    def step(x):
        y = x.sin()
        total = wait(c10d.all_reduce(x, "sum", world_group()))
        return (y * total).cos()

    assert watched(step) == [4, 3, 2, 1]


@pytest.mark.gt_world("fake", size=4)
def test_payloads_of_groups_are_copied_once(gt_world):
    """They are laid side by side in the order of their groups, which are ranks that are apart."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    name = mesh["replicate"].get_group().group_name
    x = different(4, 3)
    interpreter = interpreter_of(
        make_fx(lambda x: wait(c10d.all_reduce(x.sin(), "sum", name)))(x[0]), mesh
    )
    with Counted() as counted:
        sums = interpreter.run([x])
    assert counted.counts["copy_"] == 4
    for rank, own in enumerate(sums):
        assert_same(
            own,
            x[rank].sin() + x[(rank + 2) % 4].sin(),
            f"the sum of ranks {rank % 2} and {rank % 2 + 2}",
        )


@pytest.mark.gt_world("fake", size=4)
def test_a_wait_for_a_wait(gt_world):
    x = different(4, 3)
    expected = NetModel.of_world(4).all_reduce(torch.stack(list(x)), "sum")
    result = run(lambda x: wait(wait(c10d.all_reduce(x, "sum", world_group()))), x)
    assert_same(result, expected, "what two waits give")


def test_a_uniform_value_that_ranks_write_to_is_copied_first():
    """S7: with every view of it, and without its original."""
    table = torch.zeros(3)

    def step(table, x):
        mine = table + 0
        row = mine[1:]
        mine.add_(x)
        row.mul_(2)
        return mine, row + 0

    x = different(RANKS, 3)
    gm = make_fx(step)(table, x[0])
    mine, row = alone(gm, [table, x])
    for rank in range(RANKS):
        expected, expected_row = step(torch.zeros(3), x[rank])
        assert_same(mine[rank], expected, f"rank {rank}'s copy of the table")
        assert_same(row[rank], expected_row, f"rank {rank}'s view of the table")
    assert_same(table, torch.zeros(3), "the table that all ranks were given")


@pytest.mark.gt_world("fake", size=4)
def test_what_ranks_gathered_together_is_copied_too(gt_world):
    """S7: one tensor for a group is shared memory."""
    x = different(4, 1)

    def step(x):
        gathered = wait(c10d.all_gather_into_tensor(x, 4, world_group()))
        return gathered.add_(x)

    for rank, own in enumerate(run(step, x)):
        assert_same(own, torch.cat(x) + x[rank], f"what rank {rank} adds to the gathered tensor")


def test_what_python_writes_to_is_copied_first():
    """S7: ``table += x`` as Dynamo's graphs have it."""
    graph = fx.Graph()
    table, x = graph.placeholder("table"), graph.placeholder("x")
    mine = graph.call_function(aten.add.Tensor, (table, 0))
    graph.output(graph.call_function(operator.iadd, (mine, x)))
    given = different(RANKS, 3)
    sums = alone(fx.GraphModule(torch.nn.Module(), graph), [torch.zeros(3), given])
    for rank, own in enumerate(sums):
        assert_same(own, given[rank], f"rank {rank}'s sum")


def test_views_of_other_dtypes_are_copied_too():
    """S7: memory seen as numbers of another size, from bytes on that those do not divide."""

    def step(x):
        table = torch.zeros(6) + 1
        narrow, wide = table[1:], table.view(torch.float64)[1:]
        narrow.add_(x)
        return wide * 2

    x = different(RANKS, 5)
    for rank, own in enumerate(alone(make_fx(step)(x[0]), [x])):
        assert_same(own, step(x[rank]), f"rank {rank}'s bytes seen as float64")


def test_buffers_are_written_to_as_in_a_replay():
    """Each rank's own by itself; one of all ranks only alike."""

    def step(buffer, x):
        buffer.add_(x)

    own = PerRank(torch.zeros(2) for _ in range(RANKS))
    x = different(RANKS, 2)
    gm = make_fx(step)(torch.zeros(2), x[0])
    alone(gm, [own, x])
    for rank, buffer in enumerate(own):
        assert_same(buffer, x[rank], f"rank {rank}'s buffer")

    common = torch.zeros(2)
    alone(gm, [common, torch.ones(2)])
    assert_same(common, torch.ones(2), "the buffer of all ranks")


def test_a_buffer_of_all_ranks_that_each_writes_to_is_refused_by_name():
    """Its changes would be lost."""
    gm = make_fx(lambda buffer, x: buffer.add_(x))(torch.zeros(2), torch.zeros(2))
    gm.graph.find_nodes(op="placeholder")[0].meta["gt_input"] = {
        "kind": "buffer",
        "fqn": "moe.load",
    }
    with pytest.raises(
        DependsOnRank,
        match=r"buffer moe\.load is one tensor for several ranks, and each writes to it",
    ):
        alone(gm, [torch.zeros(2), different(RANKS, 2)])
    shared = torch.zeros(2)
    with pytest.raises(DependsOnRank, match=r"moe\.load"):
        alone(gm, [PerRank([shared] * RANKS), different(RANKS, 2)])


def test_numbers_that_compare_equal_are_no_shared_value():
    """Zeros of both signs, or a whole number and a truth value, would give ranks each other's
    results.
    """
    zeros = Sharings(4).of(PerRank([0.0, -0.0, -0.0, float("nan")]))
    assert zeros.classes[0] == (0,), f"rank 0's 0.0 is shared with -0.0: {zeros.classes}"
    truths = Sharings(4).of(PerRank([1, True, 1, 0]))
    assert truths.classes == ((0, 2), (1,), (3,)), (
        f"rank 1's True is shared with the number 1: {truths.classes}"
    )


def test_ranks_whose_memory_overlaps_behind_a_shorter_one_between():
    """S7: rank 0 reaches from the first number to the sixth, with a view inside that.

    Rank 1 begins at the sixth.
    """
    memory = torch.zeros(16)
    views = PerRank([memory[0:6:5], memory[5:7], memory[8:10], memory[10:12]])
    inside = PerRank([memory[1:3], *[torch.zeros(2) for _ in range(3)]])
    gm = make_fx(lambda x, y: x.add_(1) + y)(torch.zeros(2), torch.zeros(2))
    with pytest.raises(
        DependsOnRank, match="is one tensor for several ranks, and each writes to it"
    ):
        alone(gm, [views, inside])
    assert memory.eq(0).all(), "nobody has written to memory that two ranks share"
    apart = torch.zeros(16)
    alone(gm, [PerRank([apart[0:2], apart[2:4], apart[6:8], apart[4:6]]), torch.zeros(2)])
    assert apart.tolist() == [1.0] * 8 + [0.0] * 8, (
        "parts of one buffer that no two ranks share are written to"
    )


VIEWS = [
    (aten.slice.Tensor, (0, 1, 3)),
    (aten.view.default, ([2, 2],)),
    (aten.t.default, ()),
    (aten.select.int, (0, 1)),
    (aten.alias.default, ()),
    (aten.split.Tensor, (2,)),
]
PLAIN = [(aten.clone.default, ()), (aten.neg.default, ())]
WRITING = [aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default]


@st.composite
def programs(draw):
    """A graph of two inputs that makes views of views, copies, and writes to any of them."""
    graph = fx.Graph()
    tensors = [(graph.placeholder("a"), torch.zeros(4)), (graph.placeholder("b"), torch.zeros(4))]
    for _ in range(draw(st.integers(1, 12))):
        node, like = draw(st.sampled_from(tensors))
        if draw(st.booleans()):
            other = [entry for entry in tensors if entry[1].shape == like.shape]
            target = draw(st.sampled_from(WRITING))
            tensors.append(
                (graph.call_function(target, (node, draw(st.sampled_from(other))[0])), like)
            )
            continue
        target, args = draw(st.sampled_from(VIEWS + PLAIN))
        try:
            result = target(like, *args)
        except (RuntimeError, IndexError):
            continue
        made = graph.call_function(target, (node, *args))
        if target is aten.split.Tensor:
            tensors.append((graph.call_function(operator.getitem, (made, 0)), result[0]))
        else:
            tensors.append((made, result))
    kept = draw(
        st.lists(st.sampled_from(tensors), min_size=1, max_size=4)
    )  # the others die where they are used last
    graph.output(tuple(node for node, _ in kept))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.second_tier
@settings(max_examples=200)
@given(
    programs(), st.lists(st.sampled_from(["uniform", "per rank", "pairs"]), min_size=2, max_size=2)
)
def test_views_and_writes_of_any_order_are_those_of_a_rank_by_itself(gm, kinds):
    """S7: whatever shares memory on a rank, and nothing else, sees its writes."""
    inputs = []
    for seed, kind in enumerate(kinds):
        a, b = numbers(4, seed=10 + seed), numbers(4, seed=20 + seed)
        inputs.append(
            {"uniform": a, "pairs": PerRank([a, a, b, b]), "per rank": different(RANKS, 4)}[kind]
        )
    try:
        expected = replayed(gm, inputs)
    except RuntimeError:
        reject()  # a write to memory that overlaps with what is read
    try:
        actual = alone(gm, inputs)
    except DependsOnRank:
        return  # ranks write to what the caller gave to several of them
    for rank, (wanted, left) in enumerate(expected):
        for place, (own, by_itself) in enumerate(zip(of_rank(actual, rank), wanted, strict=True)):
            assert_same(
                own,
                by_itself,
                f"result {place} of rank {rank}, inputs {kinds}, of the graph{gm.code}",
            )
        for name, value, own in zip("ab", inputs, left, strict=True):
            assert_same(
                at(value, rank),
                own,
                f"input {name} ({kinds}) as the graph leaves it to rank {rank}{gm.code}",
            )


@pytest.mark.parametrize(
    ("inputs", "error", "sentence"),
    [
        ([], ValueError, "the graph takes 1 inputs, it got 0"),
        (
            [PerRank([torch.ones(3)] * 3)],
            ValueError,
            "input x_1 is given for 3 ranks, the world has 4",
        ),
        (
            [PerRank([torch.ones(3)] * 3 + [torch.ones(2)])],
            DependsOnRank,
            r"input x_1 of rank 3 is torch\.float32\[2\], the graph was traced with "
            r"torch\.float32\[3\]: one graph",
        ),
        ([torch.ones(3).double()], DependsOnRank, r"input x_1 of rank 0 is torch\.float64\[3\]"),
        ([2.0], DependsOnRank, "input x_1 of rank 0 is float"),
    ],
    ids=["number", "ranks", "uneven shards", "dtype", "no tensor"],
)
def test_inputs_that_the_graph_was_not_traced_for(inputs, error, sentence):
    gm = make_fx(lambda x: x.sin())(torch.ones(3))
    with pytest.raises(error, match=sentence):
        alone(gm, inputs)


def test_an_operator_that_fails_is_named_with_its_rank():
    """A block of generated code names the node, its module, and the rank."""

    def step(x, index):
        return x.sin().index_select(0, index) + 1

    gm = make_fx(step)(torch.ones(3), torch.tensor([0]))
    for node in gm.graph.nodes:
        node.meta["custom"] = {"module_fqn": "layers.3.moe"}
    index = PerRank([torch.tensor([0])] * 2 + [torch.tensor([5])] * 2)
    with pytest.raises(IndexError) as error:
        alone(gm, [numbers(3), index])
    assert error.value.__notes__ == [
        "in index_select (aten.index_select.default, layers.3.moe), for rank 2"
    ]
