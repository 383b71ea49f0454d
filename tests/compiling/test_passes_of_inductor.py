"""A user's pass of Inductor, which takes a bare fx.Graph, wherever a pass of ours does."""

import functools

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    TrainConfig,
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_graph,
    bind_options,
    bisect_passes,
    trace_step,
    train_graph,
)
from pytest_gtrainer.passes.canonicalize import eliminate_dead_code_pass
from pytest_gtrainer.testing.running import run_pass_file
from tests.compiling.test_recorder import DIV, Rescale


class Named(CustomGraphPass):
    """``Rescale`` with an id for caches."""

    def __init__(self, by):
        self.by = by

    def __call__(self, graph):
        Rescale(self.by)(graph)

    def uuid(self):
        return f"by {self.by}"


def rescale(graph, *, by=2.0):
    Rescale(by)(graph)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return torch.relu(self.up(x))


def step(model, x):
    return model(x).square().sum()


def traced():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 16)
    return model, x, trace_step(model, step, (x,))


@pytest.mark.parametrize("a_pass", [Rescale(2.0), Named(2.0), rescale], ids=["an object", "with uuid", "a function"])
def test_it_runs_in_a_pipeline(a_pass):
    _, _, found = traced()
    gm = apply_graph_passes(
        found.gm, found.example_inputs, [bind_options(a_pass), bind_options(eliminate_dead_code_pass)]
    )
    assert_graph(gm, "then aten.relu as r\nnext aten.mul(r, 2.0)\nnext aten.div")
    assert not found.gm.graph.find_nodes(op="call_function", target=DIV)


def test_its_options_and_its_id_tell_it_from_others():
    bound = [bind_options(Named(2.0)), bind_options(Named(3.0)), bind_options(rescale, by=2.0), bind_options(rescale)]
    assert len({each.fingerprint for each in bound}) == 4
    assert bind_options(Named(2.0)) == bound[0]
    assert str(bound[2]) == "rescale(by=2.0)"
    with pytest.raises(TypeError, match="rescale has no option with; its options are by"):
        bind_options(rescale, **{"with": 1})


def test_bisection_names_the_one_that_changes_a_bit():
    model, x, found = traced()
    passes = [bind_options(Rescale(2.0)), bind_options(rescale, by=3.0)]
    assert str(bisect_passes(found, passes, (model, x))).startswith("introduced by pass 2 of 2, rescale(by=3.0)")
    assert bisect_passes(found, passes[:1], (model, x)).outcome == "equal"


def test_what_it_leaves_unsorted_is_sorted_as_inductor_does():
    def unsorted(graph):
        [relu] = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        next(iter(graph.nodes)).append(relu)

    _, _, found = traced()
    gm = apply_graph_passes(found.gm, found.example_inputs, [bind_options(unsorted)])
    assert_graph(gm, "then aten.mm\nthen aten.relu")


def test_a_late_node_stands_right_behind_its_operand():
    """Before a write, where Inductor has it: at the end it would read what the write left."""

    def step(x):
        y = x * 3
        total = x + 1
        x.mul_(5)
        return total + y

    def reads_late(graph):
        add = next(node for node in graph.nodes if node.target is torch.ops.aten.add.Tensor)
        with graph.inserting_after(add):
            doubled = graph.call_function(torch.ops.aten.mul.Tensor, (add.args[0], 2))
        add.update_arg(1, doubled)

    gm = make_fx(step)(torch.ones(2))
    made = apply_graph_passes(gm, (), [bind_options(reads_late)])
    assert made(torch.ones(2)).tolist() == [6.0, 6.0]


def test_a_graph_that_is_returned_instead_is_refused():
    def another(graph):
        return torch.fx.Graph()

    with pytest.raises(TypeError, match="another returns another graph than it was given, which Inductor would drop"):
        apply_graph_passes(make_fx(lambda x: x * 2)(torch.ones(2)), (), [bind_options(another)])


def test_a_backend_that_gives_the_forward_is_a_pass():
    def backend(gm, example_inputs):
        Rescale(2.0)(gm.graph)
        gm.recompile()
        return gm.forward

    _, _, found = traced()
    gm = apply_graph_passes(found.gm, found.example_inputs, [bind_options(backend)])
    assert gm.graph.find_nodes(op="call_function", target=DIV)
    with pytest.raises(TypeError, match="a pass returns a GraphModule, this one returned a function"):
        apply_graph_passes(found.gm, found.example_inputs, [bind_options(lambda gm, inputs: lambda *given: given)])


@pytest.mark.parametrize("a_pass", [Rescale(2.0), Named(2.0), rescale], ids=["an object", "with uuid", "a function"])
def test_it_stands_in_a_pass_file(tmp_path, a_pass):
    file = tmp_path / "a.fxgraph"
    head = "# gtrainer graph v2\n# passes: fuse\n# values: same\n# check: then aten.relu\n# check: next aten.mul\n"
    file.write_text(
        f"{head}if I:\n  I.x: f32[64]\nif fwd:\n  relu: f32[64] = aten.relu(I.x)\nif out:\n  yield fwd._.relu\n"
    )
    run_pass_file(file, passes={"fuse": a_pass})
    with pytest.raises(AssertionError):
        run_pass_file(file, passes={"fuse": functools.partial(rescale, by=3.0)})


@pytest.mark.gt_world("simulated", size=2, mesh={"fsdp": 2})
def test_training_takes_it(gt_world):
    def config(mesh):
        def model():
            torch.manual_seed(0)
            return Model()

        batch = lambda number, rank: (torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * number + rank)),)  # noqa: E731
        return TrainConfig(model=model, step=step, batch=batch, bucket_plan=["up"], mesh=mesh)

    plain, right, wrong = (
        train_graph(config, world=gt_world, passes=[bind_options(each) for each in passes])
        for passes in ([], [Named(2.0)], [Rescale(3.0)])
    )
    assert_bitwise_equal(right, plain)
    assert_bitwise_different(wrong, plain)
