"""Graphs of Dynamo, AOTAutograd and torch.export show alike what ours show: names, types, modules,
directions.
"""

import copy
import functools
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from pytest_gtrainer import (
    assert_graph,
    assert_same_layout,
    bucket_layout,
    graphtext,
    timeline,
)
from pytest_gtrainer._torch.passes import ALL_GATHER, WAIT
from pytest_gtrainer.graph.foreign import adopt, sorted_nodes
from pytest_gtrainer.graph.nodes import direction
from tests.graphtext.compiled import Block, stages


class Model(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.layers = nn.ModuleList([Block(bias=bias and i == 0, scaled=True) for i in range(2)])

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x)
        return x if mask is None else x * mask["row"]


def graphs_of(
    model: nn.Module, dtype: torch.dtype = torch.float32, rows: int = 4
) -> dict[str, fx.GraphModule]:
    """Trace the graphs of one training step."""
    return stages(
        model.to(dtype), torch.randn(rows, 8, dtype=dtype), {"row": torch.ones(8, dtype=dtype)}
    )


@functools.cache
def changed_graphs(**change) -> dict[str, fx.GraphModule]:
    """Graphs with another parameter, dtype or shape."""
    return graphs_of(Model(bias=True)) if "bias" in change else graphs_of(Model(), **change)


@pytest.fixture(scope="module")
def graphs() -> dict[str, fx.GraphModule]:
    return graphs_of(Model())


def test_a_graph_of_dynamo_names_inputs_and_types(graphs):
    """P1: parameters, buffers and arguments by their names."""
    text = graphtext.render(graphs["dynamo"])
    assert "  P.L.up.weight: f32[16, 8]\n" in text
    assert "  B.L.scale: f32[8]\n" in text
    assert "  I.x: f32[4, 8]\n" in text
    assert "  I.mask.row: f32[8]\n" in text
    assert "linear: f32[4, 16] = torch._C._nn.linear(I.x, P.L.up.weight, None)" in text
    assert "L['" not in text
    assert "A[" not in text
    assert ": _\n" not in text


@pytest.mark.parametrize("which", ["dynamo", "forward", "backward"])
def test_the_text_is_read_back_as_the_same_graph(graphs, which):
    text = graphtext.render(graphs[which], names=graphs["dynamo"])
    assert graphtext.render(graphtext.parse(text)) == text


def test_what_the_forward_keeps_has_one_name_in_both_graphs(graphs):
    forward, backward = (
        graphtext.render(graphs[which], names=graphs["dynamo"]) for which in ("forward", "backward")
    )
    assert "  L.up.mm = fwd.layers[0].up.mm\n" in forward
    assert "  I.kept.layers[0].up.mm: f32[4, 16]\n" in backward
    assert "  I.gradient.output_0: f32[4, 8]\n" in backward
    assert "  output_0 = fwd.layers[1].mul_1\n" in forward


def test_results_of_a_backward_are_named_after_what_they_are_gradients_of(graphs):
    text = graphtext.render(graphs["backward"], names=graphs["dynamo"])
    assert "for i in out.layers[0]:\n  L.up.weight = bwd.L.up.t_" in text
    assert "\n  x = None\n" in text  # no gradient was asked for


def test_without_names_descriptors_alone_name_nothing_wrongly(graphs):
    text = graphtext.render(graphs["forward"])
    assert "  A.L.up.mm_mat2: f32[16, 8]\n" in text
    assert "P." not in text


@pytest.mark.parametrize("change", [{"dtype": torch.bfloat16}, {"rows": 5}])
@pytest.mark.parametrize("which", ["dynamo", "forward", "backward"])
def test_another_dtype_or_shape_is_another_text(graphs, change, which):
    """P2: so its golden differs."""
    other = changed_graphs(**change)
    texts = [graphtext.render(each[which], names=each["dynamo"]) for each in (graphs, other)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("which", ["dynamo", "forward", "backward"])
def test_another_parameter_renumbers_nothing(graphs, which):
    """P2: only its own lines change."""
    other = changed_graphs(bias=True)
    lines = [
        {
            str(line)
            for line in graphtext.lines_of(
                graphtext.parse(graphtext.render(each[which], names=each["dynamo"]))
            )
        }
        for each in (graphs, other)
    ]
    changed = lines[0] ^ lines[1]
    assert changed
    assert not [line for line in changed if "layers.1" in line or "layers[1]" in line]


def test_nodes_are_named_and_the_graph_is_only_read(graphs):
    """P2: names of nodes do not show."""
    gm = copy.deepcopy(graphs["forward"])
    text = graphtext.render(gm, names=graphs["dynamo"])
    for node in gm.graph.nodes:
        node.name = f"n_{node.name}"
    before = [dict(node.meta) for node in gm.graph.nodes]
    assert graphtext.render(gm, names=graphs["dynamo"]) == text
    assert [dict(node.meta) for node in gm.graph.nodes] == before


def test_a_bare_graph_and_an_exported_program_render():
    """P1: a bare graph has its module's text; a program its parameters' names."""
    model = Model()
    program = torch.export.export(model, (torch.randn(4, 8),))
    text = graphtext.render(program)
    assert "P.L.up.weight: f32[16, 8]" in text
    assert "aten.linear(I.x, P.L.up.weight)" in text
    gm = fx.symbolic_trace(nn.ReLU())
    assert graphtext.render(gm.graph) == graphtext.render(gm)


class Writes(nn.Module):
    """To a buffer and to an argument."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, x, seen):
        seen.add_(1)
        return {"y": self.norm(x) * self.weight, "x": x}


def test_results_of_an_exported_program_are_named_by_its_signature():
    """P1: what is written to comes before what is returned, and another buffer would
    renumber it.
    """
    program = torch.export.export(Writes(), (torch.randn(4, 8), torch.zeros(1)))
    names = [
        "updated.norm.running_mean",
        "updated.norm.running_var",
        "updated.norm.num_batches_tracked",
    ]
    for functional, written in (
        (program, []),
        (program.run_decompositions(), [*names, "updated.seen"]),
    ):
        results = graphtext.render(functional).partition("if out:\n")[2].splitlines()
        assert [line.partition(" = ")[0].strip() for line in results] == [
            *written,
            "output_0",
            "output_1",
        ]
    text = graphtext.render(functional)
    assert "  updated.seen = fwd._.add\n" in text
    assert "  output_1 = I.x\n" in text
    assert graphtext.render(graphtext.parse(text)) == text


def test_gradients_of_an_exported_step_are_named_after_their_parameters():
    from torch.export.experimental import _export_forward_backward

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 4, bias=False)

        def forward(self, x):
            return self.up(x).sum(), x + 1

    made = _export_forward_backward(torch.export.export(Step(), (torch.randn(2, 8),)))
    results = graphtext.render(made).partition("if out:\n")[2].splitlines()
    assert [line.partition(" = ")[0].strip() for line in results] == [
        "loss",
        "output_0",
        "up.weight",
    ]
    assert adopt(made).graph.output_node().meta["gt_parameters"] == ("up.weight",)
    forward, _, backward = graphtext.render(made).partition(
        "if bwd:\n"
    )  # what is returned beside the loss is forward
    assert [
        part.count("aten.add.") + part.count("aten.full_like") for part in (forward, backward)
    ] == [1, 1]
    assert "  up.weight = bwd.up." in backward
    assert graphtext.render(graphtext.parse(forward + "if bwd:\n" + backward)) == graphtext.render(
        made
    )


def test_a_model_names_the_first_inputs_of_a_graph():
    from torch.fx.experimental.proxy_tensor import make_fx

    model = nn.Linear(8, 4)

    def step(weight, bias, x):
        return torch.func.functional_call(model, {"weight": weight, "bias": bias}, (x,))

    gm = make_fx(step, tracing_mode="fake")(*model.parameters(), torch.randn(2, 8))
    text = graphtext.render(gm, names=model)
    assert "P.weight: f32[4, 8]" in text
    assert "P.bias: f32[4]" in text
    with pytest.raises(ValueError, match=r"has shape \[4, 8\], weight of the model \[3, 8\]"):
        graphtext.render(gm, names=nn.Linear(8, 3))
    with pytest.raises(
        ValueError, match=r"names has 'w', which is no input of the graph; these are bias_1,"
    ):
        graphtext.render(gm, names={"w": "weight"})


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (["loss", "weight", "bias"], ["output_0", "weight", "bias"]),
        (["weight", "bias"], ["weight", "bias"]),
        (
            ["loss", "weight", None],
            ["output_0", "weight", "bias"],
        ),  # a parameter that the loss does not reach
        (["loss", "bias", "weight"], []),
        (["loss", "weight"], []),
        (["weight"], []),
        (["loss", None, None], []),
        (["bias", "loss", "loss"], []),
    ],
)
def test_a_model_names_the_last_results_if_they_can_be_its_gradients(returned, names):
    """Each of the backward, and of the shape of its parameter."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model = nn.Linear(8, 4)

    def step(weight, bias, x):
        loss = torch.func.functional_call(model, {"weight": weight, "bias": bias}, (x,)).sum()
        gradients = dict(
            zip(("weight", "bias"), torch.autograd.grad(loss, (weight, bias)), strict=True)
        )
        return [{"loss": loss, **gradients}.get(name) for name in returned]

    gm = make_fx(step, tracing_mode="fake")(*model.parameters(), torch.randn(2, 8))
    assert (
        "gt_outputs" not in adopt(gm, model).graph.output_node().meta
    )  # no node is of the backward
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["autograd_backward"] = True
    meta = adopt(gm, model).graph.output_node().meta
    assert list(meta.get("gt_outputs", ())) == names
    assert list(meta.get("gt_parameters", ())) == names[-2:]


def test_checks_know_modules_of_any_graph(graphs):
    assert_graph(graphs["dynamo"], "count 2 linear in layers.1\nthen relu in layers.0")


def test_gradient_of_a_custom_function_is_of_the_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x, mask):
            return Twice.apply(x * self.weight) * mask["row"]

    graphs = graphs_of(Uses())
    text = graphtext.render(graphs["backward"], names=graphs["dynamo"])
    assert "fwd" not in text.replace("fwd_", "")


def test_what_is_no_graph_is_refused_by_name():
    with pytest.raises(
        TypeError, match=r"3 is of type int, not a graph: give a GraphModule, an fx\.Graph, or"
    ):
        graphtext.render(3)


@pytest.mark.gt_world("fake", size=2)
def test_collectives_in_a_graph_of_dynamo_are_read(gt_world):
    """Dynamo calls an operator without its overload."""
    from torch.distributed import _functional_collectives as collectives

    found = []

    def backend(gm, inputs):
        found.append(gm)
        return gm

    def step(weight, x):
        return (
            collectives.wait_tensor(
                collectives.all_gather_tensor(weight, 0, torch.distributed.group.WORLD)
            )
            * x
        )

    torch.compiler.reset()
    torch.compile(step, backend=backend)(nn.Parameter(torch.ones(4)), torch.ones(8))
    payloads = bucket_layout(found[0]).payloads
    assert [(payload.parameters, payload.ranks) for payload in payloads] == [(("weight",), (0, 1))]
    text = graphtext.render(found[0])
    assert "_c10d_functional.all_gather_into_tensor(P.weight, 2, " in text
    assert graphtext.render(graphtext.parse(text)) == text


@pytest.mark.gt_world("fake", size=2)
def test_parameters_that_a_module_holds_are_told(gt_world):
    """B6: of a graph that has them as attributes, not as inputs."""
    graph, model, values = fx.Graph(), nn.Sequential(nn.Linear(4, 2)), []
    for name in ("0.weight", "0.bias"):
        held = graph.get_attr(name)
        held.meta["val"] = model.get_parameter(name)
        values.append(graph.call_function(torch.ops.aten.view.default, (held, [-1])))
        values[-1].meta["val"] = held.meta["val"].detach().view(-1)
    joined = graph.call_function(torch.ops.aten.cat.default, (values,))
    joined.meta["val"] = torch.empty(10)
    gather = graph.call_function(ALL_GATHER, (joined, 2, dist.group.WORLD.group_name))
    wait = graph.call_function(WAIT, (gather,))
    gather.meta["val"] = wait.meta["val"] = torch.empty(20)
    graph.output((wait,))
    payloads = bucket_layout(fx.GraphModule(model, graph)).payloads
    places = [
        (slot.parameter, slot.offset, slot.nbytes) for payload in payloads for slot in payload.slots
    ]
    assert places == [("0.weight", 0, 32), ("0.bias", 32, 8)]


def test_a_body_that_forward_and_backward_call_is_of_the_forward():
    """A checkpoint has a recomputed region; a body that only the backward calls is its own."""
    body = fx.Graph()
    body.output((body.call_function(torch.ops.aten.sin.default, (body.placeholder("x"),)),))
    graph = fx.Graph()
    x = graph.placeholder("x")
    holder, again = graph.get_attr("body"), graph.get_attr("body")
    region = torch.ops.higher_order.invoke_subgraph
    calls = [
        graph.call_function(region, (holder, "region", x)),
        graph.call_function(region, (), {"subgraph": again, "identifier": "region", "x": x}),
    ]
    graph.output(tuple(calls))
    for node in [x, *calls, *body.nodes]:
        node.meta["example_value"] = torch.empty(2)
    gm = fx.GraphModule({"body": fx.GraphModule({}, body)}, graph)
    for directions, expected in (
        (("fwd", "fwd"), "fwd"),
        (("fwd", "bwd"), "fwd"),
        (("bwd", "bwd"), "bwd"),
    ):
        for call, of_call in zip(calls, directions, strict=True):
            call.meta["autograd_backward"] = of_call == "bwd"
        results = {
            direction(node) for node in adopt(gm).body.graph.nodes if node.op == "call_function"
        }
        assert results == {expected}, directions


def test_parameters_of_two_models_that_are_not_called_keep_their_models_name():
    """Only the place where Dynamo found them names the models: no operator is in a module of
    theirs.
    """
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    graph = stages(
        lambda one, other, x: x @ one.weight + x @ other.weight, one, other, torch.ones(2, 8)
    )["dynamo"]
    given = [
        node.meta["gt_input"]["fqn"] for node in adopt(graph).graph.find_nodes(op="placeholder")
    ]
    assert sorted(given) == ["one.weight", "other.weight", "x"]


@pytest.mark.gt_world("fake", size=2)
def test_a_backward_tells_the_sums_of_parameters_that_it_does_not_take(gt_world):
    """It takes weights, whose values it needs, and no bias."""
    from torch.distributed import _functional_collectives as collectives

    class Linear(torch.autograd.Function):
        """Whose gradients are summed, as under data parallelism without shards."""

        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return x @ weight.t() + bias

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            group = torch.distributed.group.WORLD
            summed = [
                collectives.all_reduce(each, "avg", group)
                for each in (gradient.t() @ x, gradient.sum(0))
            ]
            return gradient @ weight, *map(collectives.wait_tensor, summed)

    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))

    def step(x):
        for layer in model:
            x = Linear.apply(x, layer.weight, layer.bias)
        return x

    found = stages(step, torch.randn(3, 8))
    text = graphtext.render(found["backward"], names=found["dynamo"])
    assert "weight: f32[2, 4]" in text
    assert "bias: " not in text  # among what it takes
    payloads = bucket_layout(adopt(found["backward"], found["dynamo"])).payloads
    assert sorted(payload.parameters[0].split(".")[-1] for payload in payloads) == [
        "bias",
        "bias",
        "weight",
        "weight",
    ]


def test_an_empty_name_is_a_name():
    found = []
    torch.compiler.reset()
    torch.compile(lambda d: d[""] + 1, backend=lambda gm, _: found.append(gm) or gm)(
        {"": torch.ones(2)}
    )
    assert "I.d" in graphtext.render(found[0])


@pytest.mark.gt_world("fake", size=4)
def test_names_are_given_to_every_reader_of_graphs(gt_world):
    """A trainer's own tracer leaves such a graph: flat inputs, gathered parameters. It has no
    names.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    names, group = ("one", "other"), dist.group.WORLD.group_name
    model = nn.Sequential(OrderedDict((name, nn.Linear(8, 2, bias=False)) for name in names))

    def step(first, second, x):
        for shard in (first, second):
            whole = WAIT(ALL_GATHER(shard, 4, group))
            x = torch.mm(x, whole.t())
        return x

    gm = make_fx(step, tracing_mode="fake")(*model.parameters(), torch.randn(2, 8))
    layout = bucket_layout(gm, names=model)
    assert [payload.parameters for payload in layout.payloads] == [
        ("one.weight",),
        ("other.weight",),
    ]
    assert_same_layout(gm, layout, names=model)
    swapped = nn.Sequential(OrderedDict(once=model[0], other=model[1]))
    with pytest.raises(AssertionError, match=r"no all_gather of one.weight"):
        assert_same_layout(gm, layout, names=swapped)
    assert_graph(gm, "then all_gather_into_tensor(P.other.weight, _, _)", names=model)
    assert_graph(gm, "then all_gather_into_tensor(P.one.weight, _, _)", names=model)
    assert any("P.one.weight" in str(line) for line in graphtext.lines_of(gm, names=model))
    assert (
        timeline(gm, names=model).spans == timeline(gm).spans
    )  # labels name modules of nodes, which it has not
    with pytest.raises(
        ValueError, match=r"'P.other.weight' is neither a captured node nor a graph input"
    ):
        assert_graph(gm, "then all_gather_into_tensor(P.other.weight, _, _)")


def test_names_of_a_model_say_what_is_a_parameter_and_what_a_buffer():
    """Two of each; what is left are inputs by number."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    graph = fx.Graph()
    state = [*model.named_parameters(), *model.named_buffers(), ("0", torch.ones(3)), ("1", 2)]
    for place, (_, value) in enumerate(state):
        graph.placeholder(f"arg{place}").meta["val"] = value
    graph.output(())
    adopted = adopt(fx.GraphModule({}, graph), names=model)
    kinds: dict[str, list[str]] = {}
    for node in adopted.graph.find_nodes(op="placeholder"):
        kinds.setdefault(node.meta["gt_input"]["kind"], []).append(node.meta["gt_input"]["fqn"])
    assert kinds == {
        "parameter": ["0.weight", "0.bias", "1.weight", "1.bias"],
        "buffer": ["0.running_mean", "0.running_var", "0.num_batches_tracked"],
        "input": ["0", "1"],
    }


def test_a_model_of_more_parameters_than_the_graph_has_inputs_is_refused():
    gm = fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(
        ValueError,
        match="the model has 2 parameters and buffers, the graph 1 inputs: give a mapping",
    ):
        graphtext.render(gm, names=nn.Linear(8, 3))


def test_nodes_are_sorted_behind_their_operands_and_a_cycle_is_named():
    gm = fx.symbolic_trace(lambda x: ((x + 1) * 2, x - 3))
    x, add, mul, sub, output = gm.graph.nodes
    assert sorted_nodes([mul, sub, x, output, add]) == [x, add, mul, sub, output]
    add.args = (mul, 1)
    with pytest.raises(ValueError, match=r"the graph has a cycle, in which (add|mul) is"):
        sorted_nodes(gm.graph.nodes)


class PlusNumbers(nn.Module):
    def __init__(self, *numbers: float):
        super().__init__()
        self.numbers = numbers

    def forward(self, x):
        return x + torch.tensor(self.numbers)


@pytest.mark.parametrize("shown", [(1.0, 2.0), (1.0,) * 20])
def test_the_text_of_an_exported_program_shows_the_numbers_of_its_code(shown):
    programs = [
        torch.export.export(PlusNumbers(*numbers), (torch.ones(len(shown)),))
        for numbers in (shown, (*shown[:-1], 3.0))
    ]
    texts = [graphtext.render(program) for program in programs]
    assert texts[0] != texts[1]
    assert "custom(constant=" in texts[0]
    assert graphtext.render(graphtext.parse(texts[0])) == texts[0]


@pytest.mark.parametrize("name", ["__eq__", "__rsub__", "__invert__"])
def test_methods_that_are_operators_of_python_are_read_back(name):
    graph = fx.Graph()
    x = graph.placeholder("x")
    operands = (x,) if name == "__invert__" else (x, 2)
    graph.output(graph.call_method(name, operands))
    gm = fx.GraphModule({}, graph)
    again = graphtext.parse(graphtext.render(gm))
    assert torch.equal(again(torch.arange(4)), gm(torch.arange(4)))


@pytest.mark.parametrize("name", ["__iadd__", "__setitem__", "__reduce__", "__len__"])
def test_methods_that_are_no_operators_are_not_read_back(name):
    graph = fx.Graph()
    graph.output(graph.call_method(name, (graph.placeholder("x"),)))
    text = graphtext.render(fx.GraphModule({}, graph))
    with pytest.raises(graphtext.TextError, match=f"`{name}` is no operator of a tensor"):
        graphtext.parse(text)
