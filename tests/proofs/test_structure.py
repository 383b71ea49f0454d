"""Two large graphs: only the parts that they do not share have to run."""

import gc

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import NetModel, prove
from pytest_gtrainer.proofs import inputs, structure
from pytest_gtrainer.proofs import prove as proving
from pytest_gtrainer.proofs.inputs import draw_inputs
from pytest_gtrainer.proofs.structure import prove_by_structure

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
X, W = torch.randn(4, 6), torch.randn(6, 6)
TOKENS = torch.tensor([0, 2, 1, 2])
NET = NetModel.of_world(4, nodes=2)


def layers(x, w, change=lambda x, w: x @ w):
    for layer in range(6):
        x = (change(x, w) if layer == 3 else x @ w).sin() + 0.0
    return x, x.sum()


def in_halves(x, w):
    return torch.cat([x[:, :3], x[:, 3:]], 1) @ w


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """Count the nodes of the graphs that run, and take all graphs for large ones."""
    sizes = []
    whole = proving.prove_programs

    def counted(programs, **options):
        sizes.append(max(len(program.gm.graph.nodes) for program in programs))
        return whole(programs, **options)

    monkeypatch.setattr(proving, "prove_programs", counted)
    monkeypatch.setattr(structure, "FEWEST_NODES", 1)
    return sizes


def graph(function, *inputs):
    return make_fx(lambda *given: function(*given))(*(inputs or (X, W)))


def test_a_local_change_runs_alone(ran):
    proof = prove(graph(lambda x, w: layers(x, w, in_halves)), graph(layers), inputs=(X, W))
    assert proof.kind == "identical"
    assert proof.compared == 3
    assert ran == [5]  # two slices and their join, of one input


def test_calls_of_one_operator_on_equal_values_run_never(ran):
    def twice(x, w):
        return layers(x, w)[0], layers(x, w)[1]

    for first, second in ((twice, layers), (layers, twice), (layers, layers)):
        proof = prove(graph(first), graph(second), inputs=(X, W))
        assert proof.kind == "identical"
    assert not ran


@torch.library.custom_op("gt_structure::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


scaled.register_fake(torch.empty_like)


@pytest.mark.parametrize("change", [in_halves, lambda x, w: x @ w], ids=["part", "nothing"])
def test_operators_that_no_run_meets_are_named(change):
    """Two calls of one operator are equal only if it depends on nothing but its arguments."""

    def after(function):
        return lambda x, w: layers(torch.ops.gt_structure.scaled(x), w, function)

    sides = graph(after(change)), graph(after(lambda x, w: x @ w))
    proof = prove(*sides, inputs=(X, W))
    assert proof.kind == "identical"
    (named,) = [line for line in proof.assumes if "gt_structure.scaled.default" in line]
    assert "depend on nothing but their arguments, and write to none of them" in named


def test_another_kind_is_found_by_a_run_of_all(ran):
    def reordered(x, w):
        return x[:, :3] @ w[:3] + x[:, 3:] @ w[3:]

    proof = prove(graph(lambda x, w: layers(x, w, reordered)), graph(layers), inputs=(X, W))
    assert proof.kind == "reordered"
    assert len(ran) == 2
    wrong = prove(graph(lambda x, w: layers(x, w, lambda x, w: 2 * x @ w)), graph(layers))
    assert wrong.kind == "another function"


def renamed(first, second):
    gm = graph(layers)
    gm.graph.output_node().meta["gt_outputs"] = [first, second]
    return gm


UNEQUAL = {
    "a zero of the other sign": lambda x, w: (layers(x, w)[0] + -0.0, x),
    "another number": lambda x, w: (layers(x, w)[0] + 1.0, x),
    "another input": lambda x, w: (layers(w[:4], w)[0] + 0.0, x),
    "another setting": lambda x, w: (layers(x, w)[0].add(0.0, alpha=2), x),
    "other results": lambda x, w: (x, layers(x, w)[0] + 0.0),
    "fewer results": lambda x, w: (layers(x, w)[0] + 0.0,),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_another_call_is_not_identical(name):
    expected = graph(lambda x, w: (layers(x, w)[0] + 0.0, x))
    proof = prove(graph(UNEQUAL[name]), expected, inputs=(X, W), at_least="identical")
    assert proof.kind == "unknown", str(proof)
    assert "not identical" in str(proof)


def test_results_of_other_names_are_not_identical():
    first, second = renamed("a", "b"), renamed("b", "a")
    assert prove(first, first, inputs=(X, W)).kind == "identical"
    assert prove(first, second, inputs=(X, W)).kind == "another function"


WHOLE = {
    "a write": (lambda x, w: (x.add_(1), x @ w)),
    "what is drawn": (lambda x, w: (x + torch.rand(4, 6), x @ w)),
}


def no_parts(parts):
    raise AssertionError("a part has run")


@pytest.mark.parametrize("name", WHOLE)
def test_graphs_with_effects_run_as_a_whole(name):
    gm = graph(WHOLE[name], X.clone(), W)
    assert prove_by_structure([gm, gm], no_parts) is None


def test_graphs_that_say_nothing_run_as_a_whole():
    gm = graph(lambda x, w: (x.argmax(-1), torch.ones(3)))
    assert prove_by_structure([gm, gm], no_parts) is None
    assert prove(gm, gm, inputs=(X, W)).kind == "unknown"


UNWRITTEN = {
    "empty": lambda x: torch.empty(4, 6),
    "empty_like": torch.empty_like,
    "new_empty": lambda x: x.new_empty((4, 6)),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_memory_that_nobody_wrote_equals_nothing(name):
    gm = graph(lambda x, w: (x + UNWRITTEN[name](x), x @ w))
    assert not prove(gm, gm, inputs=(X, W)).is_at_least("rounds elsewhere")


def test_whole_numbers_are_no_inputs_of_a_part(ran):
    """A proof holds for the tokens that are given, not for others."""
    actual = graph(lambda x, i: x.index_select(0, i).sin(), X, TOKENS)
    expected = graph(lambda x, i: x[i].sin(), X, TOKENS)
    assert prove(actual, expected, inputs=(X, TOKENS)).is_at_least("reordered")
    assert ran[-1] == len(expected.graph.nodes)


def gathering(many):
    """Return a graph that gathers once or twice, and computes before and after."""
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.zeros(4, 3)
    before = x
    for _ in range(8):
        before = made.call_function(aten.sin.default, (before,))
        before.meta["val"] = torch.zeros(4, 3)

    def gathered(value):
        rows = 4 * value.meta["val"].shape[0]
        launched = made.call_function(c10d.all_gather_into_tensor.default, (value, 4, "0"))
        waited = made.call_function(c10d.wait_tensor.default, (launched,))
        launched.meta["val"] = waited.meta["val"] = torch.zeros(rows, 3)
        return waited

    def cut(value, start, end):
        part = made.call_function(aten.slice.Tensor, (value, 0, start, end))
        part.meta["val"] = torch.zeros(end - start, 3)
        return part

    if many:
        halves = [gathered(cut(before, start, start + 2)) for start in (0, 2)]
        parts = [cut(halves[place % 2], place // 2 * 2, place // 2 * 2 + 2) for place in range(8)]
        whole = made.call_function(aten.cat.default, (parts,))
        whole.meta["val"] = torch.zeros(16, 3)
    else:
        whole = gathered(before)
    for _ in range(40):
        whole = made.call_function(aten.cos.default, (whole,))
        whole.meta["val"] = torch.zeros(16, 3)
    made.output((whole,))
    return fx.GraphModule(torch.nn.Module(), made)


def test_collectives_of_a_part_are_those_of_the_world(ran):
    actual, expected = gathering(True), gathering(False)
    proof = prove(actual, expected, world=NET)
    assert proof.kind == "identical"
    assert proof.compared == 4
    assert max(ran) < 20
    wrong = gathering(True)
    (join,) = wrong.graph.find_nodes(op="call_function", target=aten.cat.default)
    parts = list(join.args[0])
    join.args = ([*parts[1::-1], *parts[2:]],)
    assert prove(wrong, expected, world=NET).kind == "another function"
    assert not proof.assumes


@pytest.mark.parametrize("function", [layers, lambda x, w: (x.add_(1), x @ w)])
def test_the_collector_is_off_only_while_nodes_are_numbered(function, monkeypatch):
    was_on = []
    number = structure._number

    def watched(*args):
        was_on.append(gc.isenabled())
        return number(*args)

    monkeypatch.setattr(structure, "_number", watched)
    gm = graph(function, X.clone(), W)
    assert prove(gm, gm, inputs=(X, W)).kind == "identical"
    assert was_on[0] is False
    assert gc.isenabled()


def test_inputs_are_drawn_for_ranks_that_run(monkeypatch):
    drawn = []

    def counted(gm, seed):
        drawn.append(seed)
        return draw_inputs(gm, seed)

    monkeypatch.setattr(inputs, "draw_inputs", counted)
    same, other = graph(layers), graph(lambda x, w: (x.sin(), x.sum()))
    assert prove(same, same, world=NET).compared == 4 * 2
    assert drawn == [0]  # to say what was drawn
    assert prove(same, other, world=NET).kind == "another function"
    assert set(drawn) == {0, 1, 2, 3}
    with pytest.raises(IndexError, match="rank 4 of 4"):
        inputs.DrawnInputs(same, 4)[4]
