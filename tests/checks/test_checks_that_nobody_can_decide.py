"""A `never` or `count` that meets a node of which the graph does not say enough is an error that
names it.
"""

import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import assert_graph
from pytest_gtrainer.checks import CheckError, CheckFailure
from pytest_gtrainer.graphtext import parse

aten, hop = torch.ops.aten, torch.ops.higher_order


def error_of(gm, checks):
    with pytest.raises(CheckError) as error:
        assert_graph(gm, checks)
    return str(error.value)


def sin_of(x):
    return aten.sin.default(x)


def cos_of(x):
    return aten.cos.default(x)


def graph_with(*bodies, call):
    """A graph that calls ``call(graph, bodies, x)`` between a relu and a tanh."""
    graph, root = fx.Graph(), torch.nn.Module()
    x = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    x.meta["val"] = torch.empty(2)
    for place, body in enumerate(bodies):
        setattr(root, f"body_{place}", body)
    inside = call(graph, [f"body_{place}" for place in range(len(bodies))], x)
    inside.meta["val"] = (torch.empty(2),)
    last = graph.call_function(
        aten.tanh.default, (graph.call_function(operator.getitem, (inside, 0)),)
    )
    last.meta["val"] = torch.empty(2)
    graph.output(last)
    return fx.GraphModule(root, graph)


sin, cos = fx.symbolic_trace(sin_of), fx.symbolic_trace(cos_of)


def held(graph, names):
    return [graph.get_attr(name) for name in names]


CALLS = {
    "cond": lambda graph, names, x: graph.call_function(
        hop.cond, (True, *held(graph, names), (x,))
    ),
    "while_loop": lambda graph, names, x: graph.call_function(
        hop.while_loop, (*held(graph, names), (x,), ())
    ),
    "scan": lambda graph, names, x: graph.call_function(
        hop.scan, (held(graph, names)[-1], [x], [x], [])
    ),
    "invoke_subgraph": lambda graph, names, x: graph.call_function(
        hop.invoke_subgraph, (held(graph, names)[-1], "name", x)
    ),
    "module": lambda graph, names, x: graph.call_module(names[-1], (x,)),
}
NESTED = graph_with(cos, sin, call=CALLS["cond"])


@pytest.mark.parametrize("kind", ["never", "count 0", "count 1", "then relu\nnever"])
@pytest.mark.parametrize("body", [sin, NESTED], ids=["body", "nested"])
@pytest.mark.parametrize("call", CALLS)
def test_a_node_in_a_graph_that_is_called(call, body, kind):
    gm = graph_with(cos, body, call=CALLS[call])
    message = error_of(gm, f"{kind} aten.sin")
    assert "nobody can say whether this node matches\n     1  " in message
    assert "it calls a graph that has aten.sin: check that graph by itself" in message
    assert_graph(gm, f"{kind.replace('1', '0')} aten.exp")  # in none of the graphs
    with pytest.raises(CheckFailure, match="but one in a graph that it calls, has that operator"):
        assert_graph(gm, "then sin")
    assert_graph(body, "count 1 sin" if body is sin else "count 0 exp")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU())

    def forward(self, x):
        return self.up(x)


@fx.wrap
def not_traced(x):
    return torch.nn.functional.gelu(x)


class Smooth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.nn.functional.gelu(x)


LEAVES = {
    "module": (lambda graph, x: graph.call_module("leaf.up", (x,)), "module.leaf.up"),
    "own module": (lambda graph, x: graph.call_module("leaf", (x,)), "module.leaf"),
    "function": (lambda graph, x: graph.call_function(not_traced, (x,)), f"{__name__}.not_traced"),
}
if Smooth.apply.__module__ is not None:  # since 2.15 it is None, and torch.fx has no code for it
    LEAVES["autograd function"] = (
        lambda graph, x: graph.call_function(Smooth.apply, (x,)),
        "torch.autograd.function.apply",
    )


def graph_with_leaf(kind):
    graph, root = fx.Graph(), torch.nn.Module()
    root.leaf = Block()
    x = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
    leaf = LEAVES[kind][0](graph, x)
    graph.output(graph.call_function(aten.tanh.default, (leaf,)))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("is_nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_whose_inside_the_graph_does_not_show(leaf, is_nested):
    gm, path = graph_with_leaf(leaf), LEAVES[leaf][1]
    if is_nested:
        gm = graph_with(cos, gm, call=CALLS["cond"])
    for kind in ("never", "count 0", "count 1"):
        for node in ("gelu", "aten.gelu", "gelu in fwd", "linear", "gelu -> bf16", "gelu(_)"):
            message = error_of(gm, f"{kind} {node}")
            assert f"the graph does not show what the leaf {path}" in message
            assert "trace into it, or check for the leaf itself by this path" in message
    assert_graph(gm, "then tanh\nnever gelu\nthen output")  # not between these
    if is_nested:
        return
    assert_graph(gm, f"then {path}\nnext tanh\ncount 1 {path}\nnever gelu in fwd used only by sin")
    with pytest.raises(CheckFailure):
        assert_graph(gm, f"never {path}")
    with pytest.raises(CheckFailure):
        assert_graph(gm, f"count 2 {path}")
    with pytest.raises(CheckFailure, match="no node of the graph has that operator"):
        assert_graph(gm, "then gelu")


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_as_user_and_as_operand(leaf):
    """The leaf itself has another operator; what it calls may be the one that is asked for."""
    gm = graph_with_leaf(leaf)
    path = LEAVES[leaf][1]
    assert "it is used by" in error_of(gm, "never sin used by gelu")
    assert "expected gelu(...)" in error_of(gm, f"then {path}\nnever tanh(gelu(...))")
    with pytest.raises(CheckFailure):
        assert_graph(gm, f"never sin used by {path}")
    assert_graph(gm, f"then tanh({path}(_))")


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_a_graph_as_operand(call):
    gm = graph_with(cos, sin, call=CALLS[call])
    assert "expected sin(_)" in error_of(gm, "then relu\nnext *\nnever tanh(sin(_))")
    assert_graph(gm, "never tanh(exp(_))")


def test_functions_of_torch_and_of_python_are_no_leaves():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for function in (torch.relu, torch.nn.functional.gelu, operator.neg, abs, aten.sin):
        x = graph.call_function(function, (x,))
    graph.output(graph.call_method("tanh", (x,)))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert_graph(gm, "never linear\ncount 1 relu\ncount 0 mm")


def test_a_leaf_may_write_what_is_read_later():
    graph = fx.Graph()
    x, weight, buffer = map(graph.placeholder, ("x", "weight", "buffer"))
    graph.call_function(not_traced, (weight, buffer))
    graph.output(graph.call_function(torch.mm, (x, buffer)))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    names = "then not_traced\n"
    assert "wrote before" in error_of(gm, f"{names}never mm from A.1")
    assert_graph(gm, f"{names}then mm from A.2")


def test_only_calls_between_the_matches_count():
    gm = graph_with(sin, cos, call=CALLS["cond"])
    assert_graph(gm, "then hop.cond\nnever sin\nthen tanh\nstart\nnever sin\nthen relu")


def test_a_user_that_calls_a_graph_is_not_decided():
    gm = graph_with(cos, sin, call=CALLS["cond"])
    assert "it is used by cond at 1" in error_of(gm, "never relu used by sin")
    assert_graph(gm, "never relu used by exp\ncount 1 relu used by hop.cond")


@pytest.mark.parametrize("type_", ["f64", "f64[2]", "[2]"])
def test_a_type_in_a_graph_that_is_called(type_):
    body = fx.symbolic_trace(sin_of)
    for node in body.graph.nodes:
        node.meta["val"] = torch.empty(2, dtype=torch.float64)
    gm = graph_with(cos, body, call=CALLS["module"])
    if "f64" in type_:
        assert "it calls a graph that has aten.sin" in error_of(gm, f"never -> {type_}")
    assert_graph(gm, "never -> bf16\nnever sin -> f32\nnever -> f64[3]")


def test_an_operator_that_is_given_to_a_node():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(hop.out_dtype, (aten.mm.default, torch.int32, x, x)))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    for kind in ("never", "count 0", "count 1"):
        assert "it is given aten.mm to call" in error_of(gm, f"{kind} mm(_, _)")
        assert "it is given aten.mm to call" in error_of(gm, f"{kind} aten.mm.default")
    assert_graph(gm, "never relu")


TYPES = """\
s0 = size(4)
if I:
  I.x: f32[3, 5]
  I.y: f32[s0, 5]
if fwd:
  nonzero: i64[u0, 2] = aten.nonzero(I.x)
  topk: (f32[3, 1], i64[3, 1]) = aten.topk(I.x, 1)
  relu: f32[s0, 5] = aten.relu(I.y)
  add: f32[3, 5] = aten.add.Tensor(I.x, I.x)
if out:
  yield fwd._.add
  yield fwd._.relu
  yield fwd._.nonzero
  yield fwd._.topk[0]
"""


@pytest.fixture
def typed():
    gm = parse(TYPES)
    (add,) = (node for node in gm.graph.nodes if node.target is aten.add.Tensor)
    del add.meta["val"]
    return gm


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("add -> f32", "its value is not known, expected one tensor"),
        ("add -> [3, 5]", "its value is not known, expected one tensor"),
        ("topk -> f32", "its value is of type tuple, expected one tensor"),
        ("topk -> i64", "its value is of type tuple, expected one tensor"),
        ("topk -> i64[_, 1]", "its value is of type tuple, expected one tensor"),
        ("relu -> f32[3, 5]", "its shape is [s0, 5], expected [3, 5]"),
        ("relu -> [..., 7, 5]", "its shape is [s0, 5], expected [..., 7, 5]"),
        ("nonzero -> i64[0, _]", "its shape is [u0, 2], expected [0, _]"),
        ("-> f32[3, 5]", "its shape is [s0, 5], expected [3, 5]"),
    ],
)
@pytest.mark.parametrize("kind", ["never", "count 0", "count 1"])
def test_a_type_that_is_not_known(typed, kind, node, words):
    assert words in error_of(typed, f"{kind} {node}")


@pytest.mark.parametrize(
    "node",
    [
        "topk -> bf16",
        "topk -> f32[4, _]",
        "topk -> i64[3]",
        "relu -> bf16",
        "relu -> [_, 6]",
        "relu -> [5]",
        "relu -> bf16[3, 5]",
        "nonzero -> [_, 3]",
        "nonzero -> f32[3, 2]",
    ],
)
def test_what_is_certain_in_spite_of_it(typed, node):
    assert_graph(typed, f"never {node}\nstart\ncount 0 {node}")
    assert_graph(typed, "count 1 relu -> f32[_, 5]\ncount 1 nonzero -> [_, 2]\ncount 1 topk")


SYMBOLS = """\
s0 = size(4)
if I:
  I.x: f32[s0, 4]
  I.y: f32[4, s0]
if fwd:
  relu: f32[s0, 4] = aten.relu(I.x)
  tanh: f32[4, s0] = aten.tanh(I.y)
  t: f32[s0, 4][1, s0] = aten.t(I.y)
if out:
  yield fwd._.relu
  yield fwd._.tanh
  yield fwd._.t
"""


@pytest.mark.parametrize(
    "node",
    [
        "relu -> [8, 5]",
        "relu -> [8, ..., 5]",
        "relu -> [8, 4][4, 2]",
        "tanh -> [5, 8]",
        "tanh -> [..., 5, 8]",
        "tanh -> [4, 8][8, 2]",
        "tanh -> [5, 8][8, 1]",
        "t -> [8, 4][2, 8]",
        "t -> [8, 5][1, 8]",
    ],
)
def test_one_extent_or_stride_decides_whatever_the_symbols_beside_it_are(node):
    assert_graph(parse(SYMBOLS), f"never {node}\nstart\ncount 0 {node}")


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("relu -> [8, 4]", "its shape is [s0, 4], expected [8, 4]"),
        ("relu -> [8, ...]", "its shape is [s0, 4], expected [8, ...]"),
        ("tanh -> [4, 8]", "its shape is [4, s0], expected [4, 8]"),
        ("tanh -> [4, _][8, 1]", "its strides are [s0, 1], expected [8, 1]"),
        ("t -> [_, 4][1, 8]", "its strides are [1, s0], expected [1, 8]"),
    ],
)
def test_a_symbol_alone_decides_nothing(node, words):
    assert words in error_of(parse(SYMBOLS), f"never {node}")


def test_an_operator_without_results_has_no_type():
    text = (
        "if I:\n  I.x: b8[()]\nif fwd:\n  _assert_async: _ = aten._assert_async(I.x)\nif out:\n"
        "  yield I.x\n"
    )
    assert_graph(parse(text), "never -> f32\ncount 1 _assert_async")


def test_a_node_of_no_direction(gm):
    (launch,) = [node for node in gm.graph.nodes if "reduce_scatter" in node.name]
    del launch.meta["autograd_backward"]
    for kind in ("never", "count 0", "count 1"):
        for direction in ("fwd", "bwd"):
            text = error_of(gm, f"{kind} reduce_scatter_tensor in {direction}")
            assert "its direction is bwd by its bucket and fwd by its mark" in text
    assert_graph(gm, "never mm(_, _) in fwd -> bf16")


def test_a_group_whose_ranks_nobody_knows(gm):
    gm.meta["gt_groups"] = {}
    assert "expected the ranks [0, 1]" in error_of(gm, "never all_gather_into_tensor(_, 2, [0, 1])")


def test_a_number_that_is_a_symbol():
    def reshaped(x):
        return x.view(x.shape[0], 2, 3)

    gm = make_fx(reshaped, tracing_mode="symbolic")(torch.empty(4, 6))
    for kind in ("never", "count 0"):
        assert "its arguments: number 2: number 1" in error_of(gm, f"{kind} view(_, [4, 2, 3])")
    assert_graph(gm, "never view(_, [_, 3, 2])\ncount 1 view(_, [_, 2, 3])")


def copied_by_a_method(graph, weight, buffer):
    part = graph.call_function(operator.getitem, (weight, slice(2)))
    into = graph.call_function(operator.getitem, (buffer, slice(2)))
    graph.call_method("copy_", (into, part))


def copied_into_a_view(graph, weight, buffer):
    view = graph.call_method("view", (buffer, 4, 4))
    graph.call_function(operator.setitem, (view, slice(2), weight))


def added_by_an_operator(graph, weight, buffer):
    graph.call_function(operator.iadd, (graph.call_method("t", (buffer,)), weight))


def written_by_out(graph, weight, buffer):
    graph.call_function(torch.sin, (weight,), {"out": buffer})


def written_by_a_kernel(graph, weight, buffer):
    kernel = torch._higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper_mutation
    graph.call_function(
        kernel,
        (),
        {"kernel_idx": 0, "constant_args_idx": 0, "kwargs": {"x": weight, "out": buffer}},
    )


@pytest.mark.parametrize(
    "write",
    [
        copied_by_a_method,
        copied_into_a_view,
        added_by_an_operator,
        written_by_out,
        written_by_a_kernel,
    ],
)
@pytest.mark.parametrize("is_before", [True, False])
def test_what_methods_and_functions_write_has_no_schema(write, is_before):
    graph = fx.Graph()
    x, weight, buffer = map(graph.placeholder, ("x", "weight", "buffer"))
    if is_before:
        write(graph, weight, buffer)
    product = graph.call_function(torch.mm, (x, buffer))
    if not is_before:
        write(graph, weight, buffer)
    graph.output(product)
    gm = fx.GraphModule(torch.nn.Module(), graph)
    if not is_before:
        return assert_graph(gm, "never mm from A.1")
    with pytest.raises((CheckError, CheckFailure)) as error:
        assert_graph(gm, "never mm from A.1")
    if isinstance(error.value, CheckError):
        assert "what a method or function wrote before" in str(error.value)


@pytest.mark.parametrize(
    "check", ["never aten.relu", "count 0 aten.relu.default", "never aten.re*"]
)
@pytest.mark.parametrize("function", [lambda x: torch.relu(x), lambda x: x.relu()])
def test_an_operator_of_aten_in_a_graph_of_torch_functions(function, check):
    gm = fx.symbolic_trace(function)
    with pytest.raises(CheckError, match=r"it may call: write `relu` to ask for both"):
        assert_graph(gm, check)
    assert_graph(gm, "never aten.sin")
    assert_graph(gm, "never torch.tanh")
    with pytest.raises(CheckFailure):
        assert_graph(gm, "never relu")


def test_arithmetic_of_sizes_is_no_operator_of_aten():
    gm = fx.symbolic_trace(lambda x: x * 2)
    gm.graph.find_nodes(op="call_function", target=operator.mul)[0].meta["val"] = 6
    assert_graph(gm, "never aten.mul")
