"""A node that a pass has changed is named, also if its value is made elsewhere, too.

Of ``sum(x) / 4`` a mean in place of the sum makes what the division should.
"""

import copy

import pytest
import torch
from torch import nn

from pytest_gtrainer import prove, trace_step

aten = torch.ops.aten
EXPECTED = "where aten.sum.dim_IntList(mul, [0]) is expected"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, x):
        return ((x * self.weight).sum(0) / 4).square()


@pytest.fixture(scope="module")
def gm():
    return trace_step(Model(), lambda model, x: model(x).sum(), (torch.randn(4, 6),)).gm


def changed(gm, target, *args):
    """Return a copy in which the first sum is another call of the product."""
    gm = copy.deepcopy(gm)
    (node, *_) = gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    node.target, node.args = target, (node.args[0], *args)
    gm.recompile()
    return gm


@pytest.mark.parametrize(
    ("target", "args"),
    [(aten.mean.dim, ([0],)), (aten.select.int, (0, 1)), (aten.amax.default, ([0],))],
    ids=["mean", "select", "amax"],
)
def test_a_value_that_is_made_elsewhere(gm, target, args):
    proof = prove(changed(gm, target, *args), gm)
    assert proof.kind == "another function"
    assert proof.origin == f"node sum_1 ({target}), {EXPECTED}"


def test_a_value_that_nobody_else_makes_is_named_with_its_element(gm):
    proof = prove(changed(gm, aten.prod.dim_int, 0), gm)
    assert proof.origin == "node sum_1 (aten.prod.dim_int), element [0]"


def test_a_change_that_nothing_new_is_computed_from():
    """All values are made by the expected graph, at other places."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 6)
    first = graph.call_function(aten.sum.dim_IntList, (x, [0]))
    second = graph.call_function(aten.amax.default, (x, [0]))
    chosen = graph.call_function(aten.select.int, (first, 0, 0))
    graph.output((chosen, first, second))
    expected = torch.fx.GraphModule({}, graph)
    actual = copy.deepcopy(expected)
    (node,) = actual.graph.find_nodes(op="call_function", target=aten.select.int)
    node.args = (node.args[0], 0, 1)
    actual.recompile()
    origin = prove(actual, expected).origin
    assert origin == "node select_int (aten.select.int), where aten.select.int(" + (
        "sum_dim_int_list, 0, 0) is expected"
    )


def test_graphs_of_other_names_are_not_compared_by_name(gm):
    """Names that two traces share by chance say nothing."""
    actual = changed(gm, aten.mean.dim, [0])
    for node in actual.graph.nodes:
        if node.op == "call_function":
            node.name = f"{node.name}_of_another_trace"
    actual.recompile()
    assert prove(actual, gm).origin.startswith("node div_of_another_trace (")


def test_graphs_that_share_few_nodes_are_not_compared_by_name():
    """The division stands in both alike, by chance; only half of the nodes do."""

    def graph_of(*calls):
        graph = torch.fx.Graph()
        values = {"x": graph.placeholder("x")}
        values["x"].meta["val"] = torch.empty(4, 6)
        for name, target, operand, *more in calls:
            values[name] = graph.create_node(
                "call_function", target, (values[operand], *more), name=name
            )
        graph.output((values["div"],))
        return torch.fx.GraphModule({}, graph)

    division = "div", aten.div.Tensor, "total", 4
    expected = graph_of(
        ("first", aten.neg.default, "x"),
        ("second", aten.exp.default, "first"),
        ("total", aten.sum.dim_IntList, "second", [0]),
        division,
    )
    actual = graph_of(
        ("first", aten.clone.default, "x"),
        ("second", aten.clone.default, "first"),
        ("total", aten.select.int, "x", 0, 0),
        division,
    )
    assert prove(actual, expected).origin == "node div (aten.div.Tensor), element [0]"


def written(make_write):
    """Return a graph that sums a buffer which is written to before; all its sums are results."""
    graph = torch.fx.Graph()
    x, buffer = graph.placeholder("x"), graph.placeholder("buffer")
    for node in (x, buffer):
        node.meta["val"] = torch.empty(4, 6)
    sine = graph.call_function(aten.sin.default, (x,))
    make_write(graph, buffer, x, sine)
    total = graph.call_function(aten.sum.dim_IntList, (buffer, [0]), name="total")
    others = [graph.call_function(aten.sum.dim_IntList, (each, [0])) for each in (x, sine)]
    graph.output((total, sine, *others))
    return torch.fx.GraphModule({}, graph)


def copy_sine(graph, buffer, x, sine):
    graph.call_function(aten.copy_.default, (buffer, sine))


def copy_input(graph, buffer, x, sine):
    graph.call_function(aten.copy_.default, (buffer, x))


def copy_input_to_a_view(graph, buffer, x, sine):
    rows = graph.call_function(aten.view.default, (buffer, [4, 6]))
    graph.call_function(aten.copy_.default, (rows, x), name="copy__default")


def copy_twice(graph, buffer, x, sine):
    copy_sine(graph, buffer, x, sine)
    graph.call_function(aten.copy_.default, (buffer, x), name="again")


@pytest.mark.parametrize(
    ("write", "origin"),
    [
        (copy_input, "node copy__default (aten.copy_.default), where aten.copy_.default(buffer, "),
        (
            copy_input_to_a_view,
            "node copy__default (aten.copy_.default), where aten.copy_.default(",
        ),
        (copy_twice, "node again (aten.copy_.default)"),
    ],
)
def test_a_changed_write_is_named_and_not_the_node_that_reads_it(write, origin):
    """The sum stands in both graphs alike."""
    assert prove(written(write), written(copy_sine)).origin.startswith(origin)


def test_a_write_that_is_gone_blames_no_node():
    assert "total" not in prove(written(copy_sine), written(copy_twice)).origin
