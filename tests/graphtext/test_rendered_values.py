"""Values as a line of graph text shows them."""

import ast
import math
import re

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer.graphtext import diff, render
from pytest_gtrainer.graphtext.parsing import unfaithful
from tests.graphtext.toy import at, line_of, name_inputs, small_graph, toy_graph

aten = torch.ops.aten


def test_a_whole_text():
    assert (
        render(toy_graph(layers=3), header={"torch": "2.13"})
        == """\
# gtrainer graph v2
# torch: 2.13
returns = value
if I:
  I.tokens: i64[2, 8]
if P:
  P.embed.weight: f32[8, 8]
for i in P.layers[0:3]:  # x3
  P.L.mlp.weight: f32[8, 8]
if fwd:
  with embed:
    _to_copy: f32[2, 8] = aten._to_copy(I.tokens, dtype=f32)
    mm: f32[2, 8] = aten.mm(_to_copy, P.embed.weight)
for i in fwd.layers[0]:
  with L.mlp:
    mm: f32[2, 8] = aten.mm(embed.mm, P.L.mlp.weight)
    relu: f32[2, 8] = aten.relu(mm)
  with L:
    add: f32[2, 8] = aten.add.Tensor(embed.mm, L.mlp.relu)
for i in fwd.layers[1:3]:  # x2
  with L.mlp:
    mm: f32[2, 8] = aten.mm(layers[i-1].add, P.L.mlp.weight)
    relu: f32[2, 8] = aten.relu(mm)
  with L:
    add: f32[2, 8] = aten.add.Tensor(layers[i-1].add, L.mlp.relu)
if fwd:
  with head:
    sum: f32[()] = aten.sum(layers[2].add)
if out:
  yield fwd.head.sum
"""
    )


def test_strides_are_shown_where_they_are_not_the_usual_ones():
    text = render(small_graph(lambda x: (x.t(), x + 1), torch.zeros(2, 3)))
    assert line_of(text, "t") == "t: f32[3, 2][1, 3] = aten.t(A[0])"
    assert line_of(text, "add") == "add: f32[2, 3] = aten.add.Tensor(A[0], 1)"


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 3), (2, 0)], ids=str)
def test_an_empty_tensor_shows_no_strides(shape):
    """It has no elements that could lie otherwise; a batch without tokens is such a tensor."""
    text = render(small_graph(lambda x: x + 1, torch.zeros(shape)))
    assert line_of(text, "add") == f"add: f32{list(shape)} = aten.add.Tensor(A[0], 1)"


def moved_to(*devices):
    """Return a graph that copies its input, on the first device, to each of the others."""
    graph, mode = fx.Graph(), FakeTensorMode()
    node = graph.placeholder("x")
    with mode:
        node.meta["val"] = torch.empty(2, device=devices[0])
    for device in devices[1:]:
        node = graph.call_function(
            torch.ops.aten._to_copy.default, (node,), {"device": torch.device(device)}
        )
        with mode:
            node.meta["val"] = torch.empty(2, device=device)
    graph.output((node,))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:3", "cuda:0")])
def test_a_second_device_of_one_type_shows(devices):
    """A copy to it is no copy in place; numbers are those of their use, on whichever rank."""
    gm = moved_to(*devices, devices[0])
    text = render(gm)
    lines = [line.strip() for line in text.splitlines() if "_to_copy" in line][:2]
    assert lines == [
        '_to_copy: f32[2] @ device("cuda:1") = aten._to_copy(A[0], device=device("cuda:1"))',
        '_to_copy_1: f32[2] = aten._to_copy(_to_copy, device=device("cuda"))',
    ]
    assert unfaithful(gm, text) is None
    assert "cuda:1" in diff(text, render(moved_to(devices[0], devices[0], devices[0])))


@pytest.mark.parametrize(
    "devices", [("cuda:3", "cuda:3"), ("cuda", "cuda:0"), ("cpu", "cuda:2"), ("cpu:0", "cpu")]
)
def test_the_index_of_an_only_device_is_left_out(devices):
    """It is that of the rank."""
    gm = moved_to(*devices)
    text = render(gm)
    assert not re.search(r":\d\"", text)
    assert unfaithful(gm, text) is None


def test_outputs_of_an_operator_are_taken_by_index():
    text = render(small_graph(lambda x: x.topk(2)[1] + 1, torch.zeros(8)))
    assert line_of(text, "topk") == "topk: (f32[2], i64[2]) = aten.topk(A[0], 2)"
    assert line_of(text, "add") == "add: i64[2] = aten.add.Tensor(topk[1], 1)"
    assert "getitem" not in text


def test_keywords_are_sorted_and_python_words_escaped():
    graph = small_graph(lambda x: x.to(torch.bfloat16), torch.zeros(2))
    (node,) = graph.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    node.kwargs = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    assert 'aten._to_copy(A[0], device=device("cpu"), dtype=bf16)' in render(graph)
    node.target, node.kwargs = aten.uniform_.default, {"from": 0.0, "to": 1.0}
    assert "aten.uniform_(A[0], from__kw=0.0, to=1.0)" in render(graph)


@pytest.mark.parametrize("value", [-0.0, math.inf, -math.inf, 1e-5, 0.1])
def test_floats_keep_their_bits(value):
    assert f"(A[0], {value!r})" in render(small_graph(lambda x: x * value, torch.zeros(2)))


def test_constants_show_content_and_no_name():
    """A tracer numbers constants through the whole graph; a change at its head must not show at its
    end.
    """
    small, large = torch.tensor([1, 2]), torch.arange(100)
    text = render(make_fx(lambda x: (x + small, x.sum() + large))(torch.zeros(2)))
    assert "const(i64[2], [1, 2])" in text
    assert "const(i64[100], 'sha256:" in text
    assert "_tensor_constant" not in text


def test_data_dependent_sizes_are_numbered_inside_their_layer():
    def forward(x):
        for layer in range(3):
            with at(f"layers.{layer}"):
                x = x + x.nonzero().float().sum()
        return x

    with torch.fx.traceback.preserve_node_meta():
        text = render(
            make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.zeros(4))
        )
    assert "nonzero: i64[L.u0, 1] = " in text
    assert "u1" not in text


def test_nested_graphs_are_told_once():
    def forward(x):
        for _ in range(2):
            x = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, [x])
        return x

    text = render(make_fx(forward, tracing_mode="symbolic")(torch.zeros(4)))
    assert text.count("def cond_graph_") == 2, "one body for each branch, not for each call"
    assert "cond: (f32[s0],) = hop.cond(gt, cond_graph_0, cond_graph_1, (A[0], sym_size))" in text
    assert (
        "cond_1: (f32[s0],) = hop.cond(gt_1, cond_graph_0, cond_graph_1, (cond[0], sym_size))"
        in text
    )


def test_module_names_that_are_not_python():
    graph = small_graph(lambda x: x.relu(), torch.zeros(2))
    name_inputs(graph, [], ["heads.en-de.class.weight"])
    assert 'P.heads["en-de"]["class"].weight: f32[2]' in render(graph)


def test_buckets_and_directions_are_shown():
    graph = small_graph(lambda x: x.relu().neg(), torch.zeros(2))
    relu, neg = [node for node in graph.graph.nodes if node.op == "call_function"]
    relu.meta["fsdp_bucket"] = {"plan_fqns": ["norm", "head"], "direction": "fwd"}
    neg.meta |= {"autograd_backward": True, "custom": {"module_fqn": "norm"}}
    text = render(graph)
    assert "with bucket(norm, head):" in text
    assert "neg: f32[2] = aten.neg(saved.bucket(norm, head).relu)" in text


def test_named_outputs():
    graph = toy_graph(layers=2)
    graph.graph.output_node().meta["gt_outputs"] = ("layers.1.mlp.weight",)
    assert "for i in out.layers[1]:\n  L.mlp.weight = fwd.head.sum\n" in render(graph)


def test_a_graph_without_types_or_modules_is_still_python():
    class Untyped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seq = torch.nn.Sequential(torch.nn.ReLU())
            self.register_buffer("rows", torch.ones(3, 2))

        def forward(self, x):
            return {"a": self.seq(x).view(-1) + self.rows[0], "b": [torch.relu(x)[0:1], None]}

    text = render(torch.fx.symbolic_trace(Untyped()))
    ast.parse(text)
    assert "_0: _ = module.seq[0](A[0])\n    view: _ | unowned = method.view(_0, -1)" in text
    assert "yield from {'a': fwd.seq[0].add, 'b': [fwd._.getitem, None]}" in text


def test_an_unknown_view_is_refused():
    with pytest.raises(ValueError, match="view 'flat': this version has full"):
        render(toy_graph(layers=1), "flat")


def test_operators_as_arguments_and_constants_without_a_spelling_are_told_apart():
    """A functionalised custom operator, a range: two graphs, two texts."""

    def text(argument):
        graph = fx.Graph()
        graph.output(
            graph.call_function(
                torch.ops.higher_order.out_dtype, (argument, graph.placeholder("x"))
            )
        )
        return render(fx.GraphModule({}, graph))

    arguments = [aten.mm.default, aten.add.Tensor, range(3), range(4)]
    assert len({text(argument) for argument in arguments}) == len(arguments)
    assert "out_dtype(aten.mm, " in text(aten.mm.default)


def test_a_large_conjugated_or_sparse_constant_has_a_digest():
    for constant in (torch.randn(20, dtype=torch.complex64).conj(), torch.eye(20).to_sparse()):
        graph = fx.Graph()
        graph.output(graph.get_attr("constant"))
        root = torch.nn.Module()
        root.register_buffer("constant", constant)
        assert "sha256:" in render(fx.GraphModule(root, graph))
