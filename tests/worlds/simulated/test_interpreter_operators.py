"""Operators with something special: random numbers, sizes that depend on data, graphs in graphs,
compiled code.
"""

import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pytest_gtrainer import NetModel
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer.worlds.simulated import CollectiveMismatch, NoModel
from pytest_gtrainer.worlds.simulated.interpreter import (
    Interpreter,
    PerRank,
    RankGraph,
    RankRandomStates,
)
from tests.worlds.simulated.graphs import (
    c10d,
    different,
    graph_of,
    interpreter_of,
    numbers,
    wait,
    world_group,
)

aten = torch.ops.aten
RANKS = 4


def seeded(seeds):
    """Every rank as after ``torch.manual_seed`` with its seed."""
    return RankRandomStates([torch.Generator().manual_seed(seed).get_state() for seed in seeds])


def alone(gm, *, random=None):
    """The interpreter for a graph without collectives, which needs no world."""
    return Interpreter(RankGraph(gm, 0, RANKS, {}), NetModel.of_world(RANKS), random=random)


@pytest.mark.parametrize(
    "seeds", [(3, 3, 3), (5, 3, 3), (3, 5, 3), (3, 3, 5)], ids=lambda seeds: str(seeds)
)
def test_states_are_of_all_ranks_only_if_no_rank_has_another(seeds):
    states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
    assert RankRandomStates.of_ranks(states).uniform == (set(seeds) == {3})


def noisy(x):
    return torch.nn.functional.dropout(x, 0.5), torch.rand(2)


def drawn_by_itself(seed, x):
    torch.manual_seed(seed)
    return [*noisy(x), *noisy(x)]


def test_every_rank_draws_from_a_generator_of_its_own():
    """Two runs go on where the ranks are; the process's generator stays where it is."""
    x = different(RANKS, 8)
    seeds = [3, 3, 5, 7]
    interpreter = alone(make_fx(noisy)(x[0]), random=seeded(seeds))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    runs = [interpreter.run([x]), interpreter.run([x])]
    assert torch.equal(torch.get_rng_state(), before)
    for rank, seed in enumerate(seeds):
        drawn = [value[rank] for values in runs for value in values]
        assert all(map(torch.equal, drawn, drawn_by_itself(seed, x[rank]))), (
            f"rank {rank} has another rank's numbers"
        )


def test_ranks_that_start_alike_draw_alike_once():
    """S7: a draw is one value while states and operands are; all ranks start as the process."""
    x = numbers(8)
    gm = make_fx(noisy)(x)
    torch.manual_seed(11)
    interpreter = alone(gm)
    runs = [interpreter.run([x]), interpreter.run([x])]
    assert all(
        map(torch.equal, [value for values in runs for value in values], drawn_by_itself(11, x))
    )
    assert interpreter.random.uniform


def test_draws_of_different_ranks_differ():
    """The twin: with seeds of their own, the same operands give others."""
    noise, _ = alone(make_fx(noisy)(numbers(8)), random=seeded(range(4))).run([numbers(8)])
    assert not torch.equal(noise[0], noise[1])


def test_random_numbers_into_memory_of_all_ranks():
    """S7 for what draws and writes: the uniform buffer becomes one for each rank."""

    def step(x):
        buffer = x * 0
        view = buffer.view(2, 4)
        torch.ops.aten.normal_(buffer, 0.0, 1.0)
        return view + 0

    views = alone(make_fx(step)(numbers(8)), random=seeded(range(4))).run([numbers(8)])
    for rank, view in enumerate(views):
        torch.manual_seed(rank)
        assert torch.equal(view, torch.empty(8).normal_().view(2, 4))


def traced_with_sizes(function, *inputs):
    """A trace in which numbers read from tensors are symbols."""
    mode = new_fake_mode()
    fakes = [mode.from_tensor(value, static_shapes=True) for value in inputs]
    with mode:
        return make_fx(function)(*fakes)


@pytest.mark.gt_world("fake", size=4)
def test_splits_that_depend_on_data_are_each_ranks_own(gt_world):
    """Expert parallelism: counts travel, then rows."""

    def exchange(rows, counts):
        arriving = wait(c10d.all_to_all_single(counts, [1] * 4, [1] * 4, world_group()))
        sent, received = counts.tolist(), arriving.tolist()
        for size in (*sent, *received):
            torch._check(size >= 0)
        return wait(c10d.all_to_all_single(rows, received, sent, world_group())), rows.shape[
            0
        ] + received[0]

    counts = PerRank(map(torch.tensor, [[1, 1, 2, 0], [0, 4, 0, 0], [2, 0, 1, 1], [1, 2, 0, 1]]))
    rows = different(4, 4, 2)
    received, total = interpreter_of(traced_with_sizes(exchange, rows[0], counts[0])).run(
        [rows, counts]
    )
    parts = [own.split(sizes.tolist()) for own, sizes in zip(rows, counts, strict=True)]
    for rank in range(4):
        assert torch.equal(received[rank], torch.cat([parts[source][rank] for source in range(4)]))
    assert list(total) == [4 + int(counts[0][rank]) for rank in range(4)]


def branching(predicate, x):
    return torch.cond(predicate, lambda x: x.sin(), lambda x: x * 2, (x,))


def test_a_branch_is_each_ranks_own():
    """A graph in the graph that does not communicate is a plain operator."""
    predicates = PerRank(map(torch.tensor, [True, False, True, False]))
    x = different(RANKS, 3)
    result = alone(make_fx(branching)(predicates[0], x[0])).run([predicates, x])
    for rank, own in enumerate(result):
        assert torch.equal(own, x[rank].sin() if predicates[rank] else x[rank] * 2)


def test_a_branch_may_draw():
    def step(predicate, x):
        return torch.cond(predicate, lambda x: torch.rand_like(x), lambda x: x + 1, (x,))

    gm = make_fx(step)(torch.tensor(True), numbers(3))
    result = alone(gm, random=seeded(range(4))).run([torch.tensor(True), numbers(3)])
    for rank, own in enumerate(result):
        torch.manual_seed(rank)
        assert torch.equal(own, torch.rand(3))


def test_flex_attention():
    """A higher-order operator with score and mask graphs inside."""
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 16, 16, device="cpu")

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda score, *_: score * 2, block_mask=mask)

    q, k, v = (different(RANKS, 1, 2, 16, 8) for _ in range(3))
    gm = make_fx(attend)(q[0], k[0], v[0])
    for rank, own in enumerate(alone(gm).run([q, k, v])):
        assert torch.equal(own, gm(q[rank], k[rank], v[rank]))


def with_collective(graph):
    """A body that sums over the ranks."""
    x = graph.placeholder("x")
    total = graph.call_function(c10d.all_reduce.default, (x, "sum", world_group()))
    return (graph.call_function(c10d.wait_tensor.default, (total,)),)


def nested(*modules, target, arguments):
    """A graph of one input that calls graphs; ``arguments(x, *graphs)`` are those of the call."""
    root = torch.nn.Module()
    graph = fx.Graph()
    x = graph.placeholder("x")
    for index, module in enumerate(modules):
        root.add_module(f"body_{index}", module)
    bodies = [graph.get_attr(f"body_{index}") for index in range(len(modules))]
    called = graph.call_function(target, arguments(x, *bodies))
    graph.output(graph.call_function(operator.getitem, (called, 0)))
    return fx.GraphModule(root, graph)


@pytest.mark.gt_world("fake", size=4)
def test_collectives_in_called_graphs_are_carried_out(gt_world):
    """A module, an invoked subgraph, and the branch that all ranks take."""
    body, other = graph_of(with_collective), graph_of(lambda graph: (graph.placeholder("x"),))
    x = different(4, 3)
    total = NetModel.of_world(4).all_reduce(torch.stack(list(x)), "sum")
    invoked = nested(
        body, target=torch.ops.higher_order.invoke_subgraph, arguments=lambda x, f: (f, "f", x)
    )
    branch = nested(
        body,
        other,
        target=torch.ops.higher_order.cond,
        arguments=lambda x, f, g: (torch.tensor(True), f, g, (x,)),
    )
    graph = fx.Graph()
    called = graph.call_module("body", (graph.placeholder("x"),))
    graph.output(graph.call_function(operator.getitem, (called, 0)))
    for gm in (invoked, branch, fx.GraphModule(torch.nn.ModuleDict({"body": body}), graph)):
        assert torch.equal(interpreter_of(gm).run([x]), total)


@pytest.mark.gt_world("fake", size=4)
def test_ranks_that_take_different_branches_to_a_collective_are_an_error(gt_world):
    """S5: on real ranks some would wait forever."""
    bodies = graph_of(with_collective), graph_of(lambda graph: (graph.placeholder("x"),))
    gm = nested(
        *bodies, target=torch.ops.higher_order.cond, arguments=lambda x, f, g: (x, f, g, (x,))
    )
    with pytest.raises(
        CollectiveMismatch, match="the ranks disagree on the predicate of a cond with a collective"
    ):
        interpreter_of(gm).run([PerRank(map(torch.tensor, [True, True, False, True]))])


@pytest.mark.gt_world("fake", size=4)
def test_a_collective_in_a_graph_that_is_called_otherwise_is_refused(gt_world):
    """S5."""
    target = torch.ops.higher_order.while_loop
    gm = nested(graph_of(with_collective), target=target, arguments=lambda x, f: (f, f, (x,), ()))
    with pytest.raises(
        NoModel, match=r"while_loop \(while_loop\) calls a graph with a collective.*inline it"
    ):
        interpreter_of(gm)


def compiled(x, constants):
    """Stands for what Inductor leaves in a graph."""


compiled.__module__ = "torch._inductor.output_code"


@pytest.mark.parametrize(
    "target", [torch.ops.higher_order.inductor_compiled_code, compiled], ids=["wrapped", "bare"]
)
def test_compiled_code_is_refused(target):
    gm = graph_of(lambda graph: graph.call_function(target, (graph.placeholder("x"), [])))
    with pytest.raises(
        NoModel, match=r"calls code that Inductor compiled \(.*take the graph before it is compiled"
    ):
        alone(gm)


def test_what_is_no_operator_is_refused():
    root = torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2)})
    graph = fx.Graph()
    graph.output(graph.call_module("linear", (graph.placeholder("x"),)))
    with pytest.raises(NoModel, match="linear calls the module linear, a Linear: trace into it"):
        alone(fx.GraphModule(root, graph))
    method = graph_of(lambda graph: graph.call_method("sin", (graph.placeholder("x"),)))
    with pytest.raises(
        NoModel, match="sin calls the method 'sin': trace to operators, with make_fx"
    ):
        alone(method)


@pytest.mark.gt_world("fake", size=4)
def test_constants_of_the_graph_are_uniform(gt_world):
    table = torch.arange(3.0)
    x = different(4, 3)
    gm = make_fx(lambda x: wait(c10d.all_reduce(x * table, "sum", world_group())) + table)(x[0])
    expected = (
        NetModel.of_world(4).all_reduce(torch.stack([own * table for own in x]), "sum") + table
    )
    assert torch.equal(interpreter_of(gm).run([x]), expected)


@pytest.mark.gt_world("fake", size=4)
@pytest.mark.parametrize("mode", ["default", "custom_ops"])
def test_buckets_of_torchs_own_passes(gt_world, mode):
    """They bake in the rank, as the place of its part in a buffer for all: right for every rank."""
    from torch._inductor.fx_passes.bucketing import (
        merge_all_gather_bucket,
        merge_reduce_scatter_bucket,
    )

    def step(a, b, x, y):
        gathers = [c10d.all_gather_into_tensor(value, 4, world_group()) for value in (a, b)]
        scatters = [c10d.reduce_scatter_tensor(value, "sum", 4, world_group()) for value in (x, y)]
        return [wait(value) for value in (*gathers, *scatters)]

    inputs = [different(4, 2, 3), different(4, 1), different(4, 8), different(4, 12, 2)]
    gm = traced_with_sizes(step, *(value[0] for value in inputs))
    expected = interpreter_of(gm).run(inputs)
    for merge, target in (
        (merge_all_gather_bucket, c10d.all_gather_into_tensor.default),
        (merge_reduce_scatter_bucket, c10d.reduce_scatter_tensor.default),
    ):
        merge(gm.graph, gm.graph.find_nodes(op="call_function", target=target), mode=mode)
    gm.recompile()
    assert not gm.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    net = NetModel.of_world(4)
    actual = interpreter_of(gm).run(inputs)
    for value, wanted in zip(actual[:2], expected[:2], strict=True):
        assert torch.equal(value if isinstance(value, torch.Tensor) else value[3], wanted)
    pairs = zip(*inputs[2:], strict=True)
    bucket = torch.stack([torch.cat([x.view(4, -1), y.view(4, -1)], 1).flatten() for x, y in pairs])
    for own, wanted in zip(
        zip(*actual[2:], strict=True), net.reduce_scatter(bucket, "sum"), strict=True
    ):
        assert torch.equal(torch.cat([part.flatten() for part in own]), wanted)
