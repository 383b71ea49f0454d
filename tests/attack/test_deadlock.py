"""Ranks that would wait for ever are named, in a cycle; right programs of any order are not."""

import contextlib
import operator
import random
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    Collective,
    Deadlock,
    OrderByLuck,
    Receive,
    Send,
    assert_no_deadlock,
    graphtext,
)
from pytest_gtrainer.attack.deadlock import _end, _in_elements, _message, _Reader
from pytest_gtrainer.attack.queues import (
    RECEIVE,
    SEND,
    Launch,
    Mismatch,
    Operation,
    Queues,
    Wait,
    orders_by_luck,
    rings_of_luck,
)

functional = torch.ops._c10d_functional


def collective(ranks, kind="all_reduce", payload=""):
    return Launch((Operation(kind, ranks, payload),), f"group {list(ranks)}")


def message(sender, receiver, kind):
    queue = f"messages of {sorted((sender, receiver))}"
    return Launch((Operation(kind, (sender, receiver)),), queue)


@st.composite
def right_programs(draw):
    """Programs whose ranks start everything in one order, each with waits at places of its own."""
    size = draw(st.integers(2, 5))
    dice = random.Random(draw(st.integers(0, 2**16)))
    schedules = {rank: [] for rank in range(size)}
    for _ in range(draw(st.integers(1, 12))):
        if dice.random() < 0.5:
            ranks = tuple(sorted(dice.sample(range(size), dice.randint(2, size))))
            for rank in ranks:
                schedules[rank].append(collective(ranks))
        else:
            sender, receiver = dice.sample(range(size), 2)
            schedules[sender].append(message(sender, receiver, SEND))
            schedules[receiver].append(message(sender, receiver, RECEIVE))
    for schedule in schedules.values():
        with_waits = []
        waiting = []
        for step in schedule:
            waiting.append(len(with_waits))
            with_waits.append(step)
            dice.shuffle(waiting)
            while waiting and dice.random() < 0.6:
                with_waits.append(Wait(waiting.pop()))
        schedule[:] = with_waits
    return schedules


@hypothesis.given(right_programs())
@hypothesis.settings(deadline=None)
def test_one_order_never_stands_still(schedules):
    assert Queues(schedules).run() == ""
    assert list(orders_by_luck(schedules)) == []
    assert list(rings_of_luck(schedules)) == []


@hypothesis.given(right_programs(), st.data())
@hypothesis.settings(deadline=None)
def test_a_call_that_one_rank_leaves_out_is_told(schedules, data):
    """The twin: whoever misses it waits for ever, or meets another call."""
    rank = data.draw(st.sampled_from([rank for rank, steps in schedules.items() if steps]))
    places = [at for at, step in enumerate(schedules[rank]) if isinstance(step, Launch)]
    gone = data.draw(st.sampled_from(places))
    shorter = []
    for at, step in enumerate(schedules[rank]):
        if at == gone or step == Wait(gone):
            continue
        if isinstance(step, Wait) and step.launch > gone:
            before = sum(1 for each in schedules[rank][: step.launch] if each == Wait(gone))
            step = Wait(step.launch - 1 - before)
        shorter.append(step)
    schedules[rank] = shorter
    with contextlib.suppress(Mismatch):
        assert Queues(schedules).run() != ""


def test_a_ring_that_receives_first():
    schedules = {}
    for rank in range(3):
        received = message((rank - 1) % 3, rank, RECEIVE)
        sent = message(rank, (rank + 1) % 3, SEND)
        schedules[rank] = [received, Wait(0), sent, Wait(2)]
    assert Queues(schedules).run().splitlines() == [
        "rank 0 waits in recv from 2, which rank 2 has not reached",
        "rank 2 waits in recv from 1, which rank 1 has not reached",
        "rank 1 waits in recv from 0, which rank 0 has not reached",
    ]


def test_messages_of_a_batch_run_together():
    """Both ranks of a pair send first: alone they wait, in a batch they do not."""
    alone = {0: [], 1: []}
    batch = {}
    for rank in (0, 1):
        other = 1 - rank
        ends = Operation(SEND, (rank, other)), Operation(RECEIVE, (other, rank))
        queue = "messages of [0, 1]"
        alone[rank] = [Launch((end,), queue) for end in ends]
        batch[rank] = [Launch(ends, queue)]
    assert "waits in send to" in Queues(alone).run()
    assert Queues(batch).run() == ""


def test_who_leads_into_a_cycle_is_no_part_of_it():
    first, second = collective((1, 2)), collective((1, 2), "broadcast")
    everyone = collective((0, 1, 2))
    schedules = {
        0: [everyone, Wait(0)],
        1: [message(2, 1, RECEIVE), Wait(0), everyone],
        2: [message(1, 2, RECEIVE), Wait(0), everyone],
    }
    assert first != second
    assert Queues(schedules).run().splitlines() == [
        "rank 1 waits in recv from 2, which rank 2 has not reached",
        "rank 2 waits in recv from 1, which rank 1 has not reached",
    ]


def test_a_rank_that_has_ended():
    schedules = {0: [collective((0, 1)), Wait(0)], 1: []}
    assert Queues(schedules).run().splitlines() == [
        "rank 0 waits in all_reduce of [0, 1], which rank 1 has not reached",
        "rank 1 has ended",
    ]


def test_a_launch_that_nobody_waits_for_has_to_run_too():
    assert "rank 1 has ended" in Queues({0: [collective((0, 1))], 1: []}).run()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (collective((0, 1), "all_gather"), "all_gather of [0, 1]"),
        (collective((0, 1), payload="sum bfloat16[4]"), "with sum bfloat16[4]"),
    ],
)
def test_other_collectives_of_one_group(other, says):
    with pytest.raises(Mismatch, match="rank 0 calls all_reduce of") as failure:
        Queues({0: [collective((0, 1))], 1: [other]}).run()
    assert says in str(failure.value)


def test_orders_that_luck_keeps():
    one, two = collective((0, 1)), Launch((Operation("all_gather", (0, 1)),), "another group")
    schedules = {0: [one, two, Wait(0), Wait(1)], 1: [two, one, Wait(0), Wait(1)]}
    assert Queues(schedules).run() == ""
    [line] = orders_by_luck(schedules)
    assert line == (
        "rank 0 starts all_reduce of [0, 1] before all_gather of [0, 1], rank 1 after it, and "
        "nobody waits between them"
    )
    waited = {0: [one, Wait(0), two, Wait(2)], 1: [two, Wait(0), one, Wait(2)]}
    assert "waits in" in Queues(waited).run(), "with waits it is no luck but a deadlock"


def stage(*calls, group="pp", where="layers.0"):
    """A graph of messages and collectives, each waited for at once."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    for kind, *arguments in calls:
        node = graph.call_function(getattr(functional, kind).default, (x, *arguments, group))
        node.meta.update(val=torch.empty(4), custom={"module_fqn": where})
        x = graph.call_function(functional.wait_tensor.default, (node,))
        x.meta["val"] = torch.empty(4)
    graph.output((x,))
    return fx.GraphModule({}, graph)


GROUPS = {"pp": [[0, 1]]}
TWO_BY_TWO = {"shard": [[0, 1], [2, 3]], "replicate": [[0, 2], [1, 3]]}


def test_graphs_of_two_stages():
    """pytorch#189454's kind: a receive that was hoisted above a send."""
    right = {0: stage(("isend", 1, 0), ("irecv", 1, 0)), 1: stage(("irecv", 0, 0), ("isend", 0, 0))}
    assert assert_no_deadlock(right, groups=GROUPS) == ()
    wrong = {**right, 0: stage(("irecv", 1, 0), ("isend", 1, 0))}
    with pytest.raises(Deadlock) as failure:
        assert_no_deadlock(wrong, groups=GROUPS)
    assert str(failure.value).splitlines()[:2] == [
        "ranks wait for each other",
        "rank 0 waits in recv from 1 (irecv_default of layers.0), which rank 1 has not reached",
    ]


def counting_and_exchanging(counts_first):
    """A graph that adds a count over one group, and exchanges rows over another."""
    graph = fx.Graph()
    count, rows = graph.placeholder("count"), graph.placeholder("rows")
    count.meta["val"], rows.meta["val"] = torch.empty(1), torch.empty(4, 3)
    calls = [
        (functional.all_to_all_single.default, (rows, [2, 2], [2, 2], "shard")),
        (functional.all_reduce.default, (count, "sum", "replicate")),
    ]
    for target, arguments in reversed(calls) if counts_first else calls:
        started = graph.call_function(target, arguments)
        graph.call_function(functional.wait_tensor.default, (started,))
    graph.output(())
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("counting", [(1, 2), (0, 3)])
def test_ranks_that_come_to_another_group_first(counting):
    """torchrec#4149: some ranks wait for a count, the others for rows, and nobody goes on."""
    graphs = {rank: counting_and_exchanging(rank in counting) for rank in range(4)}
    with pytest.raises(Deadlock) as failure:
        assert_no_deadlock(graphs, groups=TWO_BY_TWO)
    said = str(failure.value).splitlines()
    assert said[0] == "ranks wait for each other"
    for line in said[1:5]:
        waits_for_count = int(line.split()[1]) in counting
        assert ("waits in all_reduce of" if waits_for_count else "waits in all_to_all of") in line


@pytest.mark.parametrize("counting", [(), (0,), (3,), (0, 2), (1, 3), (0, 1), (0, 1, 2), range(4)])
def test_ranks_of_another_order_that_others_come_to(counting):
    """Somebody waits in each group, and the others have nothing to wait for before it."""
    graphs = {rank: counting_and_exchanging(rank in counting) for rank in range(4)}
    assert assert_no_deadlock(graphs, groups=TWO_BY_TWO) == ()


def test_graphs_of_one_rank_run_one_after_the_other():
    forward, backward = stage(("isend", 1, 0)), stage(("irecv", 1, 0))
    others = [stage(("irecv", 0, 0)), stage(("isend", 0, 0))]
    assert_no_deadlock({0: [forward, backward], 1: others}, groups=GROUPS)
    with pytest.raises(Deadlock, match="ranks wait for each other"):
        assert_no_deadlock({0: [backward, forward], 1: others}, groups=GROUPS)


def test_batches_in_graphs():
    def exchange(rank):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4)
        arguments = ["isend", "irecv"], [1 - rank, 1 - rank], [0, 0], [x, x], "pp"
        node = graph.call_function(functional.batch_p2p_ops.default, arguments)
        item = graph.call_function(operator.getitem, (node, 1))
        graph.output((graph.call_function(functional.wait_tensor.default, (item,)),))
        return fx.GraphModule({}, graph)

    assert_no_deadlock({0: exchange(0), 1: exchange(1)}, groups=GROUPS)
    with pytest.raises(Deadlock, match="rank 1 has ended"):
        assert_no_deadlock({0: exchange(0), 1: stage()}, groups=GROUPS)


def carrying(sends, *messages, batched=False):
    """A graph of sends or receives, each of a tag, a dtype and a shape, alone or as one batch."""
    kind = "isend" if sends else "irecv"
    graph = fx.Graph()
    tensors = []
    for place, (_, dtype, shape) in enumerate(messages):
        tensors.append(graph.placeholder(f"x{place}"))
        tensors[-1].meta["val"] = torch.empty(shape, dtype=dtype)
    tags, peer, count = [tag for tag, *_ in messages], 1 if sends else 0, len(messages)
    if batched:
        arguments = [kind] * count, [peer] * count, tags, tensors, "pp"
        graph.call_function(functional.batch_p2p_ops.default, arguments)
    else:
        for tensor, tag in zip(tensors, tags, strict=True):
            started = graph.call_function(
                getattr(functional, kind).default, (tensor, peer, tag, "pp")
            )
            graph.call_function(functional.wait_tensor.default, (started,))
    graph.output(())
    return fx.GraphModule({}, graph)


FIRST, SECOND = (0, torch.float32, (2, 3)), (1, torch.bfloat16, (4,))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("received", "says"),
    [
        ((SECOND, FIRST), r"with tag 0 float32\[6\].* with tag 1 bfloat16\[4\]"),
        ((FIRST, (2, *SECOND[1:])), r"with tag 1 bfloat16\[4\].* with tag 2 bfloat16\[4\]"),
        ((FIRST, (1, torch.float32, (4,))), r"with tag 1 bfloat16.* with tag 1 float32\[4\]"),
        ((FIRST, (1, torch.bfloat16, (5,))), r"with tag 1 bfloat16.* with tag 1 bfloat16\[5\]"),
    ],
    ids=["order", "tag", "dtype", "size"],
)
def test_both_ends_of_a_message_have_to_fit(batched, received, says):
    sender = carrying(True, FIRST, SECOND, batched=batched)
    right = carrying(False, (0, torch.float32, (3, 2)), SECOND, batched=batched)
    assert assert_no_deadlock({0: sender, 1: right}, groups=GROUPS) == ()
    graphs = {0: sender, 1: carrying(False, *received, batched=batched)}
    with pytest.raises(Deadlock, match=rf"rank 0 calls send to 1 {says}"):
        assert_no_deadlock(graphs, groups=GROUPS)


def test_a_message_whose_size_no_graph_shows_fits():
    receiver = carrying(False, SECOND)
    (buffer,) = receiver.graph.find_nodes(op="placeholder")
    del buffer.meta["val"]
    assert assert_no_deadlock({0: carrying(True, FIRST), 1: receiver}, groups=GROUPS) == ()


def test_other_dtypes_of_one_collective():
    one, other = stage(("all_reduce", "sum")), stage(("all_reduce", "avg"))
    assert_no_deadlock({0: one, 1: one}, groups=GROUPS)
    with pytest.raises(Deadlock, match=r"with sum float32\[4\].*with avg float32\[4\]"):
        assert_no_deadlock({0: one, 1: other}, groups=GROUPS)


def test_groups_in_opposite_order_are_a_warning():
    groups = {"pp": [[0, 1]], "cp": [[0, 1]]}

    def both(first, second):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4)
        started = []
        for group in (first, second):
            started.append(graph.call_function(functional.all_reduce.default, (x, "sum", group)))
        waited = [graph.call_function(functional.wait_tensor.default, (one,)) for one in started]
        graph.output(tuple(waited))
        return fx.GraphModule({}, graph)

    with pytest.warns(OrderByLuck, match="rank 0 starts all_reduce"):
        [line] = assert_no_deadlock({0: both("pp", "cp"), 1: both("cp", "pp")}, groups=groups)
    assert "nobody waits between them" in line


@torch.library.custom_op("attack_tests::send", mutates_args=())
def send(x: torch.Tensor, to: int) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("attack_tests::receive", mutates_args=())
def receive(x: torch.Tensor, source: int) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("attack_tests::meet", mutates_args=())
def meet(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


COMMUNICATIONS = {
    "attack_tests::send": lambda node, rank: Send(node.args[1]),
    "attack_tests::receive": lambda node, rank: Receive(node.args[1]),
    "attack_tests::meet": lambda node, rank: Collective((0, 1)),
}


def of_ours(*calls):
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name, *arguments in calls:
        operator = getattr(torch.ops.attack_tests, name).default
        x = graph.call_function(operator, (x, *arguments))
    graph.output((x,))
    return fx.GraphModule({}, graph)


def test_operators_of_ones_own():
    one, other = of_ours(("send", 1), ("meet",)), of_ours(("receive", 0), ("meet",))
    assert_no_deadlock({0: one, 1: other}, communications=COMMUNICATIONS)
    with pytest.raises(Deadlock, match="rank 0 waits in send to 1"):
        assert_no_deadlock(
            {0: one, 1: of_ours(("meet",), ("receive", 0))}, communications=COMMUNICATIONS
        )


@pytest.mark.parametrize(
    ("graphs", "options", "says"),
    [
        ({0: of_ours(("send", 1))}, {}, "no graph communicates"),
        ({0: stage(("all_reduce", "sum"))}, {}, "nobody knows the ranks of group 'pp'"),
        ({2: stage(("all_reduce", "sum"))}, {"groups": GROUPS}, "rank 2 is in no group of 'pp'"),
        (stage(("all_reduce", "sum")), {}, "one graph for all ranks needs a world"),
        (
            {0: of_ours(("send", 1))},
            {"communications": {"attack_tests::send": lambda node, rank: 1}},
            "a communication is Send, Receive or Collective; not 1",
        ),
    ],
)
def test_bad_input(graphs, options, says):
    with pytest.raises(ValueError, match=says):
        assert_no_deadlock(graphs, **options)


def test_a_rank_without_a_graph():
    with pytest.raises(Deadlock, match=r"rank 0 calls all_reduce of .* and rank 1 has no graph"):
        assert_no_deadlock({0: stage(("all_reduce", "sum"))}, groups=GROUPS)


@pytest.mark.gt_world("fake", size=4)
def test_one_graph_for_all_ranks_of_a_world(gt_mesh):
    text = """dp = group(range(0, 4))
if I:
  I.x: f32[4]
if fwd:
  with loss:
    all_reduce: f32[4] = _c10d_functional.all_reduce(I.x, "sum", dp)
    wait_tensor: f32[4] = _c10d_functional.wait_tensor(all_reduce)
if out:
  yield fwd.loss.wait_tensor
"""
    assert assert_no_deadlock(graphtext.parse(text)) == ()


def graph_of(*lines):
    """A graph of the calls that these functions add, of one input."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    for line in lines:
        line(graph, x)
    graph.output((x,))
    return fx.GraphModule({}, graph)


def call(target, *args):
    def add(graph, x):
        node = graph.call_function(target, tuple(x if each == "x" else each for each in args))
        node.meta["val"] = torch.empty(4)
        return node

    return add


def viewed_wait(group):
    def add(graph, x):
        started = graph.call_function(functional.all_reduce.default, (x, "sum", group))
        view = graph.call_function(torch.ops.aten.view.default, (started, [4]))
        graph.call_function(functional.wait_tensor.default, (view,))

    return add


PAIRS = {"a": [[0, 1], [2]], "b": [[1, 2], [0]], "c": [[0, 2], [1]]}


def blocking(group):
    return call(torch.ops._dtensor.shard_dim_alltoall.default, "x", 0, 0, group)


@pytest.mark.parametrize("kind", [viewed_wait, blocking], ids=["a view of it", "it blocks"])
def test_waits_of_every_form_are_seen(kind):
    """A ring of three pairs, each rank in another order."""
    orders = {0: "ac", 1: "ba", 2: "cb"}
    graphs = {rank: graph_of(*map(kind, order)) for rank, order in orders.items()}
    with pytest.raises(Deadlock, match="ranks wait for each other"):
        assert_no_deadlock(graphs, groups=PAIRS)
    right = {rank: graph_of(*map(kind, sorted(order))) for rank, order in orders.items()}
    assert assert_no_deadlock(right, groups=PAIRS) == ()


def test_groups_of_the_same_ranks_are_two():
    """Each rank calls its all-reduce on another communicator."""
    groups = {"pp": [[0, 1]], "cp": [[0, 1]]}
    one, other = stage(("all_reduce", "sum")), stage(("all_reduce", "sum"), group="cp")
    with pytest.raises(Deadlock, match="ranks wait for each other"):
        assert_no_deadlock({0: one, 1: other}, groups=groups)


def test_roots_and_sizes_of_a_broadcast_are_compared():
    one, other = stage(("broadcast", 0)), stage(("broadcast", 1))
    assert_no_deadlock({0: one, 1: one}, groups=GROUPS)
    with pytest.raises(Deadlock, match=r"with root 0 .*with root 1"):
        assert_no_deadlock({0: one, 1: other}, groups=GROUPS)


def in_place(kind, rows, root):
    """Return what c10d's operator is given; ``wide`` rows for each rank of a scatter or gather."""
    each = [["wide", "wide"]]
    arguments = {
        "broadcast_": ([rows], "pp", root, 0),
        "reduce_": ([rows], "pp", "sum", root, 0),
        "gather_": (each, [rows], "pp", root),
        "scatter_": ([rows], each, "pp", root),
    }
    graph = fx.Graph()
    inputs = {}
    for name, size in (("few", 2), ("wide", 4)):
        inputs[name] = graph.placeholder(name)
        inputs[name].meta["val"] = torch.empty(size, device="meta")
    given = torch.utils._pytree.tree_map(lambda each: inputs.get(each, each), arguments[kind])
    graph.call_function(getattr(torch.ops.c10d, kind).default, given)
    graph.output(())
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("kind", ["broadcast_", "reduce_", "gather_", "scatter_"])
def test_roots_and_sizes_of_operators_in_place_are_compared(kind):
    one = in_place(kind, "few", 0)
    assert_no_deadlock({0: one, 1: one}, groups=GROUPS)
    with pytest.raises(Deadlock, match=r"root 0 .*root 1 "):
        assert_no_deadlock({0: one, 1: in_place(kind, "few", 1)}, groups=GROUPS)
    with pytest.raises(Deadlock, match=r"root 0 float32\[2\] .*root 0 float32\[4\]"):
        assert_no_deadlock({0: one, 1: in_place(kind, "wide", 0)}, groups=GROUPS)


REDUCING = {
    "all_reduce": lambda x, op: dist.all_reduce(x, op=op),
    "all_reduce_coalesced": lambda x, op: dist.all_reduce_coalesced([x, x], op=op),
    "reduce": lambda x, op: dist.reduce(x, 0, op=op),
    "reduce_scatter_tensor": lambda x, op: dist.reduce_scatter_tensor(x[:2].clone(), x, op=op),
}


@pytest.mark.gt_world("fake", size=2)
@pytest.mark.parametrize("call", REDUCING)
def test_reductions_of_operators_in_place_are_compared(gt_world, call):
    """They are boxed objects, which have the number of their kind."""

    def traced(op):
        return make_fx(lambda x: (REDUCING[call](x, op), x * 1)[1])(torch.ones(4))

    ops = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG
    one, *others = map(traced, ops)
    assert_no_deadlock({0: one, 1: traced(ops[0])})
    for name, other in zip(("max", "avg"), others, strict=True):
        with pytest.raises(Deadlock, match=rf"with sum .*with {name}"):
            assert_no_deadlock({0: one, 1: other})


def test_a_batch_of_what_is_no_message():
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    arguments = ["gather"], [1], [0], [rows], "pp"
    graph.call_function(functional.batch_p2p_ops.default, arguments)
    graph.output(())
    odd = fx.GraphModule({}, graph)
    with pytest.raises(ValueError, match="has the operation 'gather': a message is an isend or an"):
        assert_no_deadlock({0: odd, 1: odd}, groups=GROUPS)


@pytest.mark.parametrize("short", range(4))
def test_a_batch_whose_lists_have_other_lengths(short):
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    arguments = [["isend"] * 2, [1] * 2, [0] * 2, [rows] * 2]
    arguments[short] = arguments[short][:1]
    graph.call_function(functional.batch_p2p_ops.default, (*arguments, "pp"))
    graph.output(())
    odd = fx.GraphModule({}, graph)
    lengths = ["2"] * 4
    lengths[short] = "1"
    with pytest.raises(ValueError, match=f"lists of {', '.join(lengths)} elements: each message"):
        assert_no_deadlock({0: odd, 1: odd}, groups=GROUPS)


@pytest.mark.parametrize(
    ("graphs", "options", "says"),
    [
        ([stage()], {}, "which rank runs which of these graphs"),
        (
            {0: of_ours(("send", 1))},
            {"communications": {"attack_tests.send": lambda node, rank: Send(1)}},
            "no graph calls attack_tests.send",
        ),
        ({0: stage(("all_reduce", "sum"))}, {"groups": {"pp": [0, 1]}}, "give the ranks of every"),
        (
            {0: stage(("all_reduce", "sum")), 1: stage(("all_reduce", "sum"))},
            {"groups": GROUPS | {"nope": [[0, 1]]}},
            "no graph communicates in 'nope' of groups=; the groups of these graphs are 'pp'",
        ),
        ({0: stage(("isend", 5, 0))}, {"groups": GROUPS}, "names rank 5 of a group of 2"),
        ({0: stage(("isend", 0, 0))}, {"groups": GROUPS}, "rank 0 has a message with itself"),
    ],
)
def test_more_bad_input(graphs, options, says):
    with pytest.raises(ValueError, match=says):
        assert_no_deadlock(graphs, **options)


def exchange_rows(sent, received, columns=3):
    """An all-to-all of rows, by how many go to each rank, and how many come from each."""

    def add(graph, x):
        x.meta["val"] = torch.empty(8, columns)
        arguments = x, received, sent, "ep"
        started = graph.call_function(functional.all_to_all_single.default, arguments)
        graph.call_function(functional.wait_tensor.default, (started,))

    return graph_of(add)


def exchange_in_place(sent, received):
    """An exchange as ``dist.all_to_all`` traces it: lists of tensors to send and to fill."""

    def add(graph, x):
        lists = []
        for counts in (received, sent):
            lists.append([])
            for count in counts:
                node = graph.call_function(torch.ops.aten.new_empty.default, (x, [count]))
                node.meta["val"] = torch.empty(count)
                lists[-1].append(node)
        graph.call_function(torch.ops.c10d.alltoall_.default, (*lists, "ep"))

    return graph_of(add)


EXCHANGES = {"ep": [[0, 1], [2, 3]]}


@pytest.mark.parametrize("make", [exchange_rows, exchange_in_place])
@pytest.mark.parametrize("first", [0, 2], ids=["first group", "second group"])
def test_splits_of_an_all_to_all_have_to_fit(make, first):
    right = {first: make([1, 3], [1, 2]), first + 1: make([2, 4], [3, 4])}
    assert assert_no_deadlock(right, groups=EXCHANGES) == ()
    wrong = {**right, first + 1: make([2, 4], [2, 4])}
    says = (
        rf"rank {first} sends \d elements to rank {first + 1} in .*where rank {first + 1} expects"
    )
    with pytest.raises(Deadlock, match=says):
        assert_no_deadlock(wrong, groups=EXCHANGES)
    # The last rank sends to the first.
    wrong = {**right, first + 1: make([5, 4], [3, 4])}
    with pytest.raises(Deadlock, match=f"rank {first + 1} sends .* to rank {first} in "):
        assert_no_deadlock(wrong, groups=EXCHANGES)


def test_rows_of_an_all_to_all_have_to_be_equally_long():
    """The number of rows is right, their lengths are not."""
    graphs = {0: exchange_rows([1, 3], [1, 2]), 1: exchange_rows([2, 4], [3, 4], columns=4)}
    with pytest.raises(Deadlock, match=r"sends 9 elements to rank 1 .* rank 1 expects 12"):
        assert_no_deadlock(graphs, groups=EXCHANGES)


def test_even_splits_are_compared_and_those_of_a_tensor_are_not():
    even = exchange_rows([], [])
    assert assert_no_deadlock({0: even, 1: even}, groups=EXCHANGES) == ()
    with pytest.raises(Deadlock, match=r"rank 0 sends 12 elements to rank 1 .* expects 9"):
        assert_no_deadlock({0: even, 1: exchange_rows([4, 4], [3, 5])}, groups=EXCHANGES)
    gm = exchange_rows([4, 4], [3, 5])
    (place,) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(place):
        size = gm.graph.call_function(torch.ops.aten.item.default, (place,))
    (started,) = gm.graph.find_nodes(
        op="call_function", target=functional.all_to_all_single.default
    )
    started.args = (place, [size, size], [4, 4], "ep")
    assert assert_no_deadlock({0: even, 1: gm}, groups=EXCHANGES) == ()


def test_splits_for_another_number_of_ranks():
    with pytest.raises(ValueError, match="has 3 splits for a group of 2 ranks"):
        assert_no_deadlock({0: exchange_rows([1, 2, 5], [4, 4])}, groups=EXCHANGES)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("all_gather_into_tensor", ()),
        ("all_gather_into_tensor_coalesced", ()),
        ("reduce_scatter_tensor", ("sum",)),
        ("reduce_scatter_tensor_coalesced", ("sum",)),
    ],
)
def test_a_group_size_of_another_group(name, given, size):
    """Real ranks raise there, or the others wait."""

    def add(size):
        def added(graph, x):
            sent = [x] if "coalesced" in name else x
            graph.call_function(getattr(functional, name).default, (sent, *given, size, "pp"))

        return graph_of(added)

    assert_no_deadlock({0: add(2), 1: add(2)}, groups=GROUPS)
    for graphs in ({0: add(size), 1: add(size)}, {0: add(2), 1: add(size)}):
        with pytest.raises(ValueError, match=f"has group_size {size}, and its group has 2 ranks"):
            assert_no_deadlock(graphs, groups=GROUPS)


@pytest.mark.parametrize("root", [-1, 2, 7])
@pytest.mark.parametrize("kind", ["broadcast", "broadcast_", "reduce_", "gather_", "scatter_"])
def test_a_root_outside_of_the_group(kind, root):
    def made(root):
        if kind == "broadcast":
            return graph_of(call(functional.broadcast.default, "x", root, "pp"))
        return in_place(kind, "few", root)

    assert_no_deadlock({0: made(1), 1: made(1)}, groups=GROUPS)
    with pytest.raises(ValueError, match=f"has the root {root} in a group of 2 ranks: roots are"):
        assert_no_deadlock({0: made(root), 1: made(root)}, groups=GROUPS)


def of_sizes(target, arguments, sizes, **options):
    """A graph of one call, whose tensors have these numbers of elements."""
    graph = fx.Graph()
    inputs = {}
    for name, size in sizes.items():
        inputs[name] = graph.placeholder(name)
        inputs[name].meta["val"] = torch.empty(size, device="meta")
    filled = torch.utils._pytree.tree_map(
        lambda each: inputs.get(each, each), (tuple(arguments), options)
    )
    graph.call_function(target.default, *filled)
    graph.output(())
    return fx.GraphModule({}, graph)


c10d = torch.ops.c10d


@pytest.mark.parametrize(
    ("target", "arguments", "options"),
    [
        (c10d._allgather_base_, ["whole", "part", "pp"], {}),
        (c10d.allgather_into_tensor_coalesced_, [["whole"] * 2, ["part"] * 2, "pp"], {}),
        (functional.all_gather_into_tensor_out, ["part", 2, "pp"], {"out": "whole"}),
        (c10d._reduce_scatter_base_, ["part", "whole", "pp", "sum"], {}),
        (c10d.reduce_scatter_tensor_coalesced_, [["part"] * 2, ["whole"] * 2, "pp", "sum"], {}),
        (functional.reduce_scatter_tensor_out, ["whole", "sum", 2, "pp"], {"out": "part"}),
    ],
    ids=lambda each: str(getattr(each, "__name__", "")),
)
def test_sizes_of_an_operator_in_place_are_of_its_group(target, arguments, options):
    right = of_sizes(target, arguments, {"part": 3, "whole": 6}, **options)
    assert_no_deadlock({0: right, 1: right}, groups=GROUPS)
    wrong = of_sizes(target, arguments, {"part": 3, "whole": 9}, **options)
    says = "has 9 elements of all ranks and 3 of each, and its group has 2 ranks"
    with pytest.raises(ValueError, match=says):
        assert_no_deadlock({0: right, 1: wrong}, groups=GROUPS)


@pytest.mark.parametrize(
    "call",
    [
        lambda many: (c10d.allgather_, [[["part"] * many], ["part"], "pp"]),
        lambda many: (c10d.reduce_scatter_, [["part"], [["part"] * many], "pp", "sum"]),
        lambda many: (c10d.gather_, [[["part"] * many], ["part"], "pp", 0]),
        lambda many: (c10d.scatter_, [["part"], [["part"] * many], "pp", 0]),
    ],
    ids=["all_gather", "reduce_scatter", "gather", "scatter"],
)
def test_a_list_has_a_tensor_for_each_rank_of_the_group(call):
    right = of_sizes(*call(2), {"part": 3})
    assert_no_deadlock({0: right, 1: right}, groups=GROUPS)
    target, *_ = call(0)
    empty = of_sizes(*call(0), {"part": 3})
    if target in (c10d.gather_, c10d.scatter_):
        assert_no_deadlock({0: right, 1: empty}, groups=GROUPS)
    else:
        with pytest.raises(ValueError, match="a list of 0 tensors, and its group has 2 ranks"):
            assert_no_deadlock({0: right, 1: empty}, groups=GROUPS)
    for many, words in ((1, "1 tensor"), (3, "3 tensors")):
        wrong = of_sizes(*call(many), {"part": 3})
        with pytest.raises(ValueError, match=f"a list of {words}, and its group has 2 ranks"):
            assert_no_deadlock({0: right, 1: wrong}, groups=GROUPS)


@pytest.mark.parametrize(
    ("target", "sent"),
    [("reduce_scatter_tensor", "whole"), ("reduce_scatter_tensor_coalesced", ["whole"])],
)
@pytest.mark.parametrize(("shape", "rows"), [([3], 3), ([3, 2], 3), ([1, 4], 1), ([], 1)])
def test_rows_that_ranks_cannot_share(target, sent, shape, rows):
    """Torch divides the rows, however many elements there are."""
    arguments = getattr(functional, target), [sent, "sum", 2, "pp"]
    right, wrong = (of_sizes(*arguments, {"whole": size}) for size in ([2, 3], shape))
    assert_no_deadlock({0: right, 1: right}, groups=GROUPS)
    with pytest.raises(ValueError, match=f"has {rows} rows? of all ranks, and 2 ranks get as many"):
        assert_no_deadlock({0: wrong, 1: wrong}, groups=GROUPS)


def test_an_older_operator_names_its_root_among_all_ranks():
    older = torch.ops.c10d_functional
    arguments = older.broadcast, ["part", 3, "", [2, 3], 2]
    graphs = dict.fromkeys((2, 3), of_sizes(*arguments, {"part": 4}))
    assert_no_deadlock(graphs)
    other = of_sizes(older.broadcast, ["part", 2, "", [2, 3], 2], {"part": 4})
    with pytest.raises(Deadlock, match=r"root 3 .*root 2 "):
        assert_no_deadlock(graphs | {3: other})


def test_lists_of_unequal_length():
    target = c10d.allgather_into_tensor_coalesced_
    wrong = of_sizes(target, [["whole"], ["part"] * 2, "pp"], {"part": 3, "whole": 6})
    with pytest.raises(ValueError, match="has 2 tensors of each rank, and 1 of all ranks"):
        assert_no_deadlock({0: wrong, 1: wrong}, groups=GROUPS)


def test_a_value_may_be_waited_for_twice():
    """``funcol.wait_tensor(funcol.all_reduce(x, ...))`` leaves two waits in a chain."""

    def add(graph, x):
        node = graph.call_function(functional.all_reduce.default, (x, "sum", "pp"))
        for _ in range(3):
            node = graph.call_function(functional.wait_tensor.default, (node,))

    gm = graph_of(add)
    assert assert_no_deadlock({0: gm, 1: gm}, groups=GROUPS) == ()
    with pytest.raises(Deadlock, match="rank 1 has ended"):
        assert_no_deadlock({0: gm, 1: graph_of(call(torch.relu, "x"))}, groups=GROUPS)


class Called(torch.nn.Module):
    def __init__(self, *inner):
        super().__init__()
        for number, graph in enumerate(inner):
            self.add_module(f"inner{number}", graph)


def calling(inner, *before, target=None):
    """A graph that calls another one: as a module, or by a higher-order operator."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    if target is None:
        made = graph.call_module("inner0", (x,))
    else:
        made = graph.call_function(target, (graph.get_attr("inner0"), *before, x))
    graph.output((made,))
    return fx.GraphModule(Called(inner), graph)


@pytest.mark.parametrize(
    ("target", "before"),
    [
        (None, ()),
        (torch.ops.higher_order.invoke_subgraph, ("name",)),
        (torch.ops.higher_order.tag_activation_checkpoint, ()),
    ],
)
def test_what_communicates_inside_of_a_node_is_read_where_it_is_called(target, before):
    first, second = ("irecv", 1, 0), ("isend", 1, 0)
    wrong = calling(stage(first, second), *before, target=target)
    right = calling(stage(second, first), *before, target=target)
    other = stage(("irecv", 0, 0), ("isend", 0, 0))
    assert assert_no_deadlock({0: right, 1: other}, groups=GROUPS) == ()
    with pytest.raises(Deadlock, match="rank 0 waits in recv from 1"):
        assert_no_deadlock({0: wrong, 1: other}, groups=GROUPS)


def started_inside(waits):
    """A graph that returns a collective that it has started, and its caller, which may wait."""
    inner = fx.Graph()
    x = inner.placeholder("x")
    launch = inner.call_function(functional.all_reduce.default, (x, "sum", "pp"))
    inner.output((x, launch))
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_module("inner0", (x,))
    item = graph.call_function(operator.getitem, (made, 1))
    later = graph.call_function(functional.all_reduce.default, (x, "avg", "cp"))
    if waits:
        with graph.inserting_before(later):
            graph.call_function(functional.wait_tensor.default, (item,))
    graph.call_function(functional.wait_tensor.default, (later,))
    graph.output((x,))
    return fx.GraphModule(Called(fx.GraphModule({}, inner)), graph)


def test_what_is_started_inside_is_waited_for_outside():
    groups = {"pp": [[0, 1]], "cp": [[0, 1]]}
    other = fx.Graph()
    x = other.placeholder("x")
    for reduction, group in (("avg", "cp"), ("sum", "pp")):
        made = other.call_function(functional.all_reduce.default, (x, reduction, group))
        other.call_function(functional.wait_tensor.default, (made,))
    other.output((x,))
    other = fx.GraphModule({}, other)
    with pytest.raises(Deadlock, match="ranks wait for each other"):
        assert_no_deadlock({0: started_inside(True), 1: other}, groups=groups)
    with pytest.warns(OrderByLuck, match="nobody waits between them"):
        assert_no_deadlock({0: started_inside(False), 1: other}, groups=groups)


def test_what_may_run_inside_of_a_node_is_refused():
    """No graph shows which branch runs."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    bodies = [graph.get_attr("inner0"), graph.get_attr("inner1")]
    made = graph.call_function(torch.ops.higher_order.cond, (x, *bodies, (x,)))
    graph.output((made,))
    inner = stage(("all_reduce", "sum"))
    gm = fx.GraphModule(Called(inner, inner), graph)
    with pytest.raises(ValueError, match="no graph shows which branch runs, or how often"):
        assert_no_deadlock({0: gm, 1: gm}, groups=GROUPS)


def ring_of(ranks, waits=()):
    """Each rank starts its group with the next rank, and the one with the rank before behind it."""
    schedules = {}
    for rank in range(ranks):
        after, before = (rank, (rank + 1) % ranks), ((rank - 1) % ranks, rank)
        steps = []
        for members in (after, before):
            operation = Operation("all_gather", tuple(sorted(members)))
            steps.append(Launch((operation,), f"group {sorted(members)}", f"node{rank}"))
            if rank in waits:
                steps.append(Wait(len(steps) - 1))
        if rank not in waits:
            steps += [Wait(0), Wait(1)]
        schedules[rank] = steps
    return schedules


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_a_ring_that_luck_keeps(ranks):
    """No two ranks differ in the order of anything that both of them start."""
    schedules = ring_of(ranks)
    assert Queues(schedules).run() == ""
    assert list(orders_by_luck(schedules)) == []
    [line] = rings_of_luck(schedules)
    assert line.endswith(": a ring, and nobody waits between them")
    for rank in range(ranks):
        assert f"rank {rank} starts all_gather of" in line
    assert "(node0) before all_gather" in line


def test_a_rank_that_waits_is_a_part_of_a_ring():
    """One of three; if all wait it is a deadlock, and if the last rank turns round nothing."""
    [line] = rings_of_luck(ring_of(3, waits=(1,)))
    assert "rank 1" not in line
    assert "rank 0 starts" in line
    assert "waits in" in Queues(ring_of(3, waits=(0, 1, 2))).run()
    turned = ring_of(3)
    turned[2] = [turned[2][1], turned[2][0], Wait(0), Wait(1)]
    assert list(rings_of_luck(turned)) == []


def test_a_ring_of_messages_is_a_warning_and_a_batch_is_none():
    """Each rank sends to the next one before it receives from the one before."""

    def exchange(rank, batched):
        to, source = (rank + 1) % 3, (rank - 1) % 3
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4)
        if batched:
            arguments = ["isend", "irecv"], [to, source], [0, 0], [x, x], "cp"
            made = graph.call_function(functional.batch_p2p_ops.default, arguments)
            started = [graph.call_function(operator.getitem, (made, at)) for at in range(2)]
        else:
            started = [
                graph.call_function(functional.isend.default, (x, to, 0, "cp")),
                graph.call_function(functional.irecv.default, (x, source, 0, "cp")),
            ]
        waited = [graph.call_function(functional.wait_tensor.default, (one,)) for one in started]
        graph.output(tuple(waited))
        return fx.GraphModule({}, graph)

    groups = {"cp": [[0, 1, 2]]}
    with pytest.warns(OrderByLuck, match="a ring, and nobody waits between them"):
        [line] = assert_no_deadlock(
            {rank: exchange(rank, False) for rank in range(3)}, groups=groups
        )
    assert "rank 0 starts send to 1 (isend_default) before recv from 2 (irecv_default)" in line
    assert (
        assert_no_deadlock({rank: exchange(rank, True) for rank in range(3)}, groups=groups) == ()
    )


def cut_behind_its_launch(first, second, name="p", view=False):
    """Two graphs: an all-reduce is started in one, and waited for in the next, before another."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    started = graph.call_function(functional.all_reduce.default, (x, "sum", first), name="p")
    later = fx.Graph()
    x, waited = later.placeholder("x"), later.placeholder(name)
    if view:
        waited = later.call_function(torch.ops.aten.view.default, (waited, [4]))
    later.call_function(functional.wait_tensor.default, (waited,))
    made = later.call_function(functional.all_reduce.default, (x, "sum", second))
    later.call_function(functional.wait_tensor.default, (made,))
    for each in (graph, later):
        for node in each.nodes:
            node.meta["val"] = torch.empty(4)
    graph.output((started,))
    later.output(())
    return [fx.GraphModule({}, graph), fx.GraphModule({}, later)]


@pytest.mark.parametrize("view", [False, True])
def test_a_launch_of_one_graph_is_waited_for_in_the_next(view):
    """Q6: the same program as in one graph, a ring of three pairs."""
    orders = {0: "ac", 1: "ba", 2: "cb"}
    graphs = {rank: cut_behind_its_launch(*order, view=view) for rank, order in orders.items()}
    with pytest.raises(Deadlock, match=r"rank 0 waits in all_reduce of \[0, 1\] \(p\)"):
        assert_no_deadlock(graphs, groups=PAIRS)
    right = {rank: cut_behind_its_launch(*sorted(order)) for rank, order in orders.items()}
    assert assert_no_deadlock(right, groups=PAIRS) == ()
    # A graph alone waits for what is there, as a backward does.
    alone = {rank: right[rank][1] for rank in (0, 2)}
    assert assert_no_deadlock(alone, groups={"c": PAIRS["c"]}) == ()


def test_an_input_that_may_be_an_earlier_launch_is_refused():
    """Q6: under another name."""
    graphs = {rank: cut_behind_its_launch("pp", "pp", name="y") for rank in range(2)}
    with pytest.raises(ValueError, match="waits for its input y, and one before it returns p"):
        assert_no_deadlock(graphs, groups=GROUPS)


@pytest.mark.parametrize("ranks", [[[0, 1, 1]], [[0, 1], [1, 2]]])
def test_a_rank_that_is_twice_in_a_group_is_refused(ranks):
    gm = stage(("all_reduce", "sum"))
    with pytest.raises(ValueError, match="a rank is there twice"):
        assert_no_deadlock({0: gm, 1: gm}, groups={"pp": ranks})


def test_a_graph_that_runs_again_hands_over_what_it_has_started_last():
    first, later = cut_behind_its_launch("a", "b")
    steps = _Reader(PAIRS, {}, [0, 1]).schedule(1, [first, later, first, later])
    waits = [step.launch for step in steps if isinstance(step, Wait)]
    launches = [place for place, step in enumerate(steps) if isinstance(step, Launch)]
    assert waits == launches == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("splits", "shape", "count", "elements"),
    [
        (None, (6, 4), 2, (12, 12)),
        ([], (6, 4), 3, (8, 8, 8)),
        (None, (5,), 2, (None, None)),
        ([1, 5], (6, 4), 2, (4, 20)),
        ([1, 5], (6,), 2, (1, 5)),
        ([0, 6], (6, 2, 3), 2, (0, 36)),
        ([1], (6, 4), 2, (4,)),
    ],
)
def test_splits_of_rows_are_counted_in_elements(splits, shape, count, elements):
    node = fx.Graph().placeholder("x")
    assert _in_elements(splits, node, count) == tuple(None for _ in elements)
    node.meta["val"] = torch.empty(shape)
    assert _in_elements(splits, node, count) == elements
    assert _in_elements([node, *splits[1:]] if splits else node, node, count)[0] is None


@pytest.mark.parametrize(
    ("kind", "place", "end"),
    [
        ("isend", 0, Send(5)),
        ("send", 1, Send(3)),
        ("irecv", 1, Receive(3)),
        ("recv_", 0, Receive(5)),
        ("isend", -1, None),
        ("irecv", 2, None),
    ],
)
def test_the_other_end_of_a_message_is_counted_in_its_group(kind, place, end):
    node = fx.Graph().placeholder("x")
    if end is not None:
        assert _end(kind, place, (5, 3), node) == end
        return
    words = f"x names rank {place} of a group of 2: ranks of messages are counted in their group"
    with pytest.raises(ValueError, match=f"^{words}$"):
        _end(kind, place, (5, 3), node)


@pytest.mark.parametrize(
    ("end", "tag", "value", "expected"),
    [
        (Send(3), None, None, Operation("send", (1, 3))),
        (Receive(3), None, None, Operation("recv", (3, 1))),
        (Send(0), 7, torch.empty(2, 3), Operation("send", (1, 0), "tag 7 float32[6]")),
        (Send(1), None, None, "rank 1 has a message with itself: Send(to=1)"),
        (Receive(1), None, None, "rank 1 has a message with itself: Receive(source=1)"),
        (5, None, None, "a communication is Send, Receive or Collective; not 5"),
    ],
)
def test_a_message_is_an_operation_of_both_ranks(end, tag, value, expected):
    if isinstance(expected, Operation):
        assert _message(end, 1, tag, value) == expected
        return
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        _message(end, 1, tag, value)


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ([[0, 1], [2, 3]], None),
        ([range(2), (2, 3)], None),
        ([[0, 1], [1, 2]], "groups={'a': [[0, 1], [1, 2]]}: a rank is there twice"),
        (
            [0, 1],
            "groups={'a': [0, 1]}: give the ranks of every group of that name, [[0, 1], ...]",
        ),
        ([[2, 3]], "rank 1 is in no group of 'a': [[2, 3]]"),
        (None, "nobody knows the ranks of group 'a' (p): say them, groups={'a': [[0, 1], ...]}"),
    ],
)
def test_the_ranks_of_a_group_are_those_that_are_given(partition, words):
    [first, _] = cut_behind_its_launch("a", "b")
    [launch] = [node for node in first.graph.nodes if node.op == "call_function"]
    reader = _Reader({} if partition is None else {"a": partition}, {}, [1])
    if words is None:
        assert reader._ranks_of(launch, 1) == (0, 1)
        assert reader.groups == {"a"}
        return
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        reader._ranks_of(launch, 1)


def test_inputs_of_a_body_are_its_last_operands():
    """Numbers among the operands stand before tensors, and are no nodes."""
    body = fx.Graph()
    _, x = body.placeholder("number"), body.placeholder("x")
    body.call_function(functional.wait_tensor.default, (x,))
    body.output(())
    graph = fx.Graph()
    x = graph.placeholder("x")
    started = graph.call_function(functional.all_reduce.default, (x, "sum", "a"))
    graph.call_module("body", (3, started))
    graph.output(())
    gm = fx.GraphModule({"body": fx.GraphModule({}, body)}, graph)
    launch, wait = _Reader(PAIRS, {}, [0, 1]).schedule(1, [gm])
    assert (launch.operations[0].ranks, wait) == ((0, 1), Wait(0))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Collective([3, 1]), (Operation("neg.default", (1, 3)), "aten::neg (1, 3)")),
        (Send(2), (Operation("send", (1, 2)), "messages of [1, 2] in aten")),
        (Receive(0), (Operation("recv", (0, 1)), "messages of [0, 1] in aten")),
        (Collective([2, 3]), "rank 1 is none of the ranks of its aten::neg: [2, 3]"),
        ("x", "a communication is Send, Receive or Collective; not 'x'"),
    ],
)
def test_an_operator_of_ones_own_is_what_the_caller_says(given, expected):
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),))
    asked = []
    reader = _Reader({}, {"aten::neg": lambda *both: asked.append(both) or given}, [1])
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            reader._declared(node, 1)
    else:
        launch = reader._declared(node, 1)
        operation, queue = expected
        assert (launch.operations[0].ranks, launch.queue) == (operation.ranks, queue)
        assert launch.where == "neg_default"
    assert (asked, reader.used) == ([(node, 1)], {"aten::neg"})
    assert _Reader({}, {}, [1])._declared(node, 1) is None
