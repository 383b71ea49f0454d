"""A part of a graph computes what it computes in the whole one, from the same values."""

import operator

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import graphtext
from pytest_gtrainer.attack.extract import computed, extract, without_dead_code

aten = torch.ops.aten


class Recorder(fx.Interpreter):
    """Keeps the value of every node."""

    def run_node(self, n):
        value = super().run_node(n)
        self.values[n.name] = value
        return value

    def recorded(self, *inputs):
        self.values = {}
        self.run(*inputs)
        return self.values


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def program(x, y):
    first, second = (x @ y).split(2)
    values, places = first.topk(2)
    table = torch.arange(4.0).reshape(2, 2)
    return values * table, places, second.sum(0), (first - second).exp()


INPUTS = torch.arange(12.0).reshape(4, 3) / 7, torch.arange(9.0).reshape(3, 3) / 5


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=40, deadline=None)
def test_any_part_computes_the_same(data):
    gm = traced(program, *INPUTS)
    nodes = computed(gm)
    kept = data.draw(st.lists(st.sampled_from(nodes), min_size=1, unique=True))
    part = extract(gm, kept)
    part.graph.lint()
    whole = Recorder(gm).recorded(*INPUTS)
    given_names = [node.name for node in part.graph.find_nodes(op="placeholder")]
    found = Recorder(part).recorded(*[whole[name] for name in given_names])
    shared = {node.name for node in kept}
    assert shared <= set(found)
    for name in shared:
        for one, other in zip(flat(found[name]), flat(whole[name]), strict=True):
            assert torch.equal(one, other)


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


def test_what_is_no_tensor_is_kept():
    """A split's tuple can be no input: who keeps its item keeps the split."""
    gm = traced(program, *INPUTS)
    [item] = [node for node in gm.graph.nodes if node.name == "getitem_1"]
    part = extract(gm, [item])
    assert [node.name for node in computed(part)] == ["split", "getitem_1"]
    assert [node.name for node in part.graph.find_nodes(op="placeholder")] == ["mm"]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("kept", ["tensor", "next"])
def test_what_holds_tuples_in_tuples_is_kept_as_a_whole(depth, kept):
    def nested(x):
        value = x + 1
        for _ in range(depth):
            value = (x, value)
        return value

    graph = fx.Graph()
    value, inputs = torch.arange(3.0), (torch.arange(3.0),)
    node = graph.placeholder("x")
    node.meta["val"] = value
    node, value = graph.call_function(nested, (node,)), nested(value)
    node.meta["val"] = value
    for _ in range(depth):
        node, value = graph.call_function(operator.getitem, (node, 1)), value[1]
        node.meta["val"] = value
    last = graph.call_function(aten.exp.default, (node,))
    last.meta["val"] = value.exp()
    graph.output((last, node))
    gm = fx.GraphModule({}, graph)
    part = extract(gm, [node if kept == "tensor" else last])
    part.graph.lint()
    if kept == "tensor":
        assert torch.equal(part(*inputs)[0], inputs[0] + 1)
        assert len(computed(part)) == depth + 1
    else:  # the tensor can be an input, so nothing before it is needed
        assert torch.equal(part(*inputs)[0], inputs[0].exp())
        assert len(computed(part)) == 1


def test_inputs_stay_in_front_and_names_do_not_collide():
    def function(mm, y):
        return ((mm @ y) * mm, y)

    gm = traced(function, torch.ones(2, 2), torch.ones(2, 2))
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), ("mm", "y"), strict=True):
        node.meta["gt_input"] = {"kind": "input", "fqn": name}
    [product] = [node for node in gm.graph.nodes if node.target is aten.mul.Tensor]
    text = graphtext.render(extract(gm, [product]))
    assert "I.mm: f32[2, 2]\n" in text
    assert "I.mm_1: f32[2, 2]\n" in text or "I.mm_2: f32[2, 2]\n" in text


def test_writes_stay_where_a_result_needs_them():
    def function(x):
        y = x.clone()
        y.add_(1)
        z = x * 2
        return y, z

    gm = traced(function, torch.ones(2))
    first = gm.graph.output_node().all_input_nodes[:1]
    part = without_dead_code(extract(gm, computed(gm), first))
    assert torch.equal(part(torch.ones(2))[0], torch.full((2,), 2.0))
    assert not [node for node in part.graph.nodes if node.target is aten.mul.Tensor]


def test_attributes_come_along():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(3.0))

        def forward(self, x):
            return (x * self.table).sum(0) + self.table

    gm = fx.symbolic_trace(Model())
    for node in computed(gm):
        node.meta["val"] = torch.empty(3)
    [last] = computed(gm)[-1:]
    part = extract(gm, [last])
    assert torch.equal(part(torch.ones(3))[0], torch.ones(3) + torch.arange(3.0))


def test_a_graph_of_nothing_returns_nothing():
    gm = traced(lambda x: x + 1, torch.ones(2))
    assert extract(gm, []).graph.output_node().args == ((),)


@pytest.mark.parametrize("value", [3, 2.0])
def test_numbers_can_be_inputs(value):
    gm = traced(lambda x: x + 1, torch.ones(2))
    [add] = computed(gm)
    add.meta["val"] = value
    copy = fx.Graph()
    assert extract(gm, [add]).graph.output_node().all_input_nodes
    assert not copy.nodes
