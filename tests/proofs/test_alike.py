"""One rank stands for all: it finds most equalities, and each holds on all ranks."""

import copy
import random
import sys

import pytest
import torch
from torch import fx

from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import NetModel, prove
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.terms import Terms
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.proofs import structure
from pytest_gtrainer.proofs.alike import OneRankForAll, differ_only_in_floats
from pytest_gtrainer.proofs.programs import GraphProgram
from pytest_gtrainer.proofs.prove import first_difference
from pytest_gtrainer.references.graph import GraphRun

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
SIZE = 4
NET = NetModel.of_world(SIZE, nodes=2)
STRICT, IN_FIELD = (lambda: Terms(strict=True)), (lambda: Field(casts="opaque"))


def wait(graph, launched):
    return graph.call_function(c10d.wait_tensor.default, (launched,))


def gathered(graph, x):
    return wait(graph, graph.call_function(c10d.all_gather_into_tensor.default, (x, SIZE, "0")))


def scattered(graph, x):
    return wait(
        graph, graph.call_function(c10d.reduce_scatter_tensor.default, (x, "sum", SIZE, "0"))
    )


def reduced(graph, x):
    return wait(graph, graph.call_function(c10d.all_reduce.default, (x, "sum", "0")))


def rows(graph, x, start):
    return graph.call_function(aten.slice.Tensor, (x, 0, start, start + 4))


# Every value has four rows, so that steps fit each other in any order.
STEPS = {
    "gathers, and takes a rank's rows": lambda graph, x, rank: rows(
        graph, gathered(graph, x), 4 * rank
    ),
    "repeats, and scatters": lambda graph, x, rank: scattered(
        graph, graph.call_function(aten.repeat.default, (x, [SIZE, 1]))
    ),
    "gathers, and scatters": lambda graph, x, rank: scattered(graph, gathered(graph, x)),
    "reduces": lambda graph, x, rank: reduced(graph, x),
    "scales": lambda graph, x, rank: graph.call_function(aten.mul.Tensor, (x, rank + 2)),
    "squares": lambda graph, x, rank: graph.call_function(aten.mul.Tensor, (x, x)),
    "turns around": lambda graph, x, rank: graph.call_function(aten.flip.default, (x, [0])),
    "rotates": lambda graph, x, rank: graph.call_function(aten.roll.default, (x, [rank + 1], [0])),
}


def graph_of(steps):
    """Return the graph of steps, each a name, an input, and a rank: they add up to one result."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "xy"]
    for node in inputs:
        node.meta["val"] = torch.zeros(4, 3)
    values = list(inputs)
    for name, place, rank in steps:
        values.append(STEPS[name](graph, values[place % len(values)], rank))
    total = values[-1]
    for value in values[:-1]:
        total = graph.call_function(aten.add.Tensor, (total, value))
    graph.output((total,))
    return fx.GraphModule(torch.nn.Module(), graph)


def programs_of(*graphs):
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(4, 3, generator=generator) for _ in "xy"] for _ in range(SIZE)]
    return [GraphProgram(gm, inputs, NET, by_place=False) for gm in graphs]


def are_equal(programs, arithmetic):
    runs = [program.run(arithmetic()) for program in programs]
    return first_difference(runs[0].results, runs[1].results) is None


@pytest.mark.second_tier("60")
@pytest.mark.parametrize("pairs", [20, 60])
def test_what_one_rank_finds_equal_is_equal_on_all(pairs):
    """Pairs of programs: the same, with one step that differs, and with steps in another order."""
    drawn = random.Random(0)
    found = {"equal": 0, "different": 0}
    for _ in range(pairs):
        steps = []
        for _ in range(drawn.randint(2, 5)):
            steps.append((drawn.choice(list(STEPS)), drawn.randrange(8), drawn.randrange(SIZE)))
        other = list(steps)
        change = drawn.choice(["nothing", "a rank", "a step", "an input"])
        place = drawn.randrange(len(steps))
        name, operand, rank = steps[place]
        if change == "a rank":
            other[place] = name, operand, (rank + 1) % SIZE
        elif change == "a step":
            other[place] = drawn.choice(list(STEPS)), operand, rank
        elif change == "an input":
            other[place] = name, operand + 1, rank
        programs = programs_of(graph_of(steps), graph_of(other))
        for arithmetic in (STRICT, IN_FIELD):
            by_one = are_equal([OneRankForAll(program) for program in programs], arithmetic)
            by_all = are_equal(programs, arithmetic)
            assert not by_one or by_all, (steps, other)
            assert by_one or steps != other
            found["equal" if by_one else "different"] += 1
    assert min(found.values()) >= pairs // 2, found


@pytest.mark.parametrize("change", ["another rank", "another order", "one rank only"])
def test_a_mistake_between_ranks_is_seen(change):
    right = [("gathers, and takes a rank's rows", 0, 1), ("repeats, and scatters", 1, 0)]
    wrong = list(right)
    if change == "another rank":
        wrong[0] = "gathers, and takes a rank's rows", 0, 3
    elif change == "another order":
        wrong[1] = "reduces", 1, 0  # the same sum, added in another order
    else:
        wrong[1] = "gathers, and scatters", 1, 0  # which is right for one rank of a world of one
    programs = [OneRankForAll(each) for each in programs_of(graph_of(right), graph_of(wrong))]
    assert not are_equal(programs, STRICT)
    assert are_equal([programs[0], programs[0]], STRICT)


def test_a_pad_on_the_last_rank_alone_is_seen():
    """Rank 0 gets equal rows of both programs; only the last rank gets the wrong ones."""

    def gm_of(wrong):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.zeros(4, 3)
        whole = gathered(graph, x)
        if wrong:
            zeros = graph.call_function(aten.full.default, ([4, 3], 0.0))
            whole = graph.call_function(aten.slice_scatter.default, (whole, zeros, 0, 12, 16))
        graph.output((scattered(graph, whole),))
        return fx.GraphModule(torch.nn.Module(), graph)

    inputs = [[torch.randn(4, 3)] for _ in range(SIZE)]
    programs = [GraphProgram(gm_of(wrong), inputs, NET, by_place=False) for wrong in (True, False)]
    alike = [OneRankForAll(program) for program in programs]
    for arithmetic in (STRICT, IN_FIELD):
        assert not are_equal(alike, arithmetic)
        assert are_equal([alike[1], copy.copy(alike[1])], arithmetic)
    proof = prove(gm_of(True), gm_of(False), world=NET)
    assert proof.kind == "another function"
    assert proof.first.rank == 3


def test_ranks_with_other_whole_numbers_are_not_alike():
    floats = [torch.zeros(2), torch.tensor([1, 2])]
    assert differ_only_in_floats([floats, [torch.ones(2), torch.tensor([1, 2])]])
    assert not differ_only_in_floats([floats, [torch.ones(2), torch.tensor([1, 3])]])
    assert not differ_only_in_floats([floats, [torch.ones(3), torch.tensor([1, 2])]])
    for other in (torch.ones(3, 2).t(), torch.ones(2, 3).double(), torch.ones(2, 3, 1)):
        assert not differ_only_in_floats([[torch.ones(2, 3)], [torch.ones(2, 3)], [other]])
    assert not differ_only_in_floats([[1.0], [2.0]])
    assert not differ_only_in_floats([[0.0], [-0.0]])
    assert not differ_only_in_floats([[1.0], [torch.ones(())]])


def test_known_numbers_that_ranks_exchange_take_all_ranks():
    """One rank knows its own alone."""
    graph = fx.Graph()
    x, places = graph.placeholder("x"), graph.placeholder("places")
    x.meta["val"] = torch.zeros(4, 3)
    places.meta["val"] = torch.zeros(4, dtype=torch.int64)
    whole = graph.call_function(aten.slice.Tensor, (gathered(graph, places), 0, 4, 8))
    graph.output((graph.call_function(aten.index.Tensor, (x, [whole])),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    wrong = copy.deepcopy(gm)
    (sliced,) = wrong.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    sliced.args = (sliced.args[0], 0, 8, 12)
    wrong.recompile()

    def same(rank):
        return torch.full((4, 3), float(rank)), torch.tensor([0, 1, 2, 3])

    def own(rank):
        return torch.full((4, 3), float(rank)), torch.tensor([0, 1, 2, rank])

    inputs = [same(rank) for rank in range(SIZE)]
    with pytest.raises(NoMeaning, match="ranks exchange known numbers in all_gather"):
        OneRankForAll(GraphProgram(gm, inputs, NET, by_place=False)).run(STRICT())
    assert prove(gm, copy.deepcopy(gm), inputs=same, world=NET).kind == "identical"
    proof = prove(wrong, gm, inputs=own, world=NET)
    assert proof.kind == "another function", str(proof)


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
def test_of_a_real_step_one_rank_is_enough(gt_mesh):
    """Both kinds of result count: gathered weights, and gradients that are scattered."""
    run = GraphRun(llama3_training(gt_mesh, "bf16_fp32"))
    actual, expected = run.rewritten(reshard_after_forward=True).traced.gm, run.traced.gm
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in actual.graph.find_nodes(op="placeholder"):
        shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
        is_float = dtype.is_floating_point
        drawn = torch.randn(shape, generator=generator) if is_float else torch.ones(shape)
        inputs.append(drawn.to(dtype))
    programs = [GraphProgram(gm, [inputs], NET, by_place=False) for gm in (actual, expected)]
    assert are_equal([OneRankForAll(program) for program in programs], STRICT)
    proof = prove(actual, expected, world=NET)
    assert proof.kind == "identical"
    assert proof.compared % SIZE == 0

    scatter = c10d.reduce_scatter_tensor.default
    averaged = copy.deepcopy(actual)
    first = averaged.graph.find_nodes(op="call_function", target=scatter)[0]
    first.args = (first.args[0], "max", *first.args[2:])
    assert first.args != actual.graph.find_nodes(op="call_function", target=scatter)[0].args
    programs[0] = GraphProgram(averaged, [inputs], NET, by_place=False)
    assert not are_equal([OneRankForAll(program) for program in programs], STRICT)


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
def test_a_counter_is_drawn(gt_mesh, monkeypatch):
    """A buffer that is no index of anything may hold any number."""
    monkeypatch.setattr(structure, "FEWEST_NODES", sys.maxsize)  # so it runs
    gm = GraphRun(deepseek_v3_training(gt_mesh, "bf16_fp32")).traced.gm
    proof = prove(gm, gm, world=NET)
    assert proof.kind == "identical", str(proof)
    assert any("tokens_per_expert in" in each for each in proof.assumes)


@pytest.mark.parametrize("inputs", [None, lambda rank: (torch.randn(4, 3), torch.randn(4, 3))])
def test_digits_that_one_graph_alone_loses_are_no_proof_where_ranks_are_alike(inputs):
    """One rank has run for all, and float64 numbers are those of one rank, too."""

    def of(loses, scale=3.0):
        graph = fx.Graph()
        x, y = (graph.placeholder(name) for name in "xy")
        for node in (x, y):
            node.meta["val"] = torch.zeros(4, 3)
        mean = graph.call_function(aten.mul.Tensor, (reduced(graph, x), scale))
        if loses:
            for shift in (2.0**23, -(2.0**23)):
                mean = graph.call_function(aten.add.Tensor, (mean, shift))
        parts = scattered(graph, gathered(graph, graph.call_function(aten.mul.Tensor, (mean, y))))
        graph.output((parts,))
        return fx.GraphModule(torch.nn.Module(), graph)

    torch.manual_seed(0)
    for actual, expected in ((of(True), of(False)), (of(False), of(True))):
        proof = prove(actual, expected, world=NET, inputs=inputs)
        assert proof.kind == "unknown"
        assert "program alone loses digits of output_0" in proof.reason
    assert prove(of(True), of(True), world=NET, inputs=inputs).kind == "identical"
    assert prove(of(False), of(False, 2.0), world=NET, inputs=inputs).kind == "another function"
