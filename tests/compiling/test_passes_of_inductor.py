"""A user's pass of Inductor, which takes a bare fx.Graph, wherever a pass of ours does."""

import functools
import importlib
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    TrainConfig,
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_graph,
    bind_options,
    bisect_passes,
    construct_default_graph_passes,
    facts,
    inductor_options,
    trace_step,
    train_graph,
)
from pytest_gtrainer.bisect import PassWitness
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass, eliminate_dead_code_pass
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


@torch.library.custom_op("gtrainer_tests::scaled_twice", mutates_args=())
def scaled_twice(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * 0.5 * by


@scaled_twice.register_fake
def _(x, by):
    return torch.empty_like(x)


class Fuse(CustomGraphPass):
    """Fuse two products into one operator, by Inductor's pattern matcher."""

    def __init__(self, by=4.0):
        self.by, self.patterns = by, PatternMatcherPass()
        given = [torch.ones(3, 5)]
        register_replacement(
            lambda x: x * 0.5 * 4.0,
            lambda x: scaled_twice(x, self.by),
            given,
            fwd_only,
            [self.patterns],
        )

    def __call__(self, graph):
        self.patterns.apply(graph)

    def uuid(self):
        return f"fuse by {self.by}"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return torch.relu(self.up(x)) * 0.5 * 4.0


def step(model, x):
    return model(x).square().sum()


def traced():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 16)
    return model, x, trace_step(model, step, (x,))


@pytest.mark.parametrize(
    "a_pass", [Rescale(2.0), Named(2.0), rescale], ids=["an object", "with uuid", "a function"]
)
def test_it_runs_in_a_pipeline(a_pass):
    _, _, found = traced()
    gm = apply_graph_passes(
        found.gm,
        found.example_inputs,
        [bind_options(a_pass), bind_options(eliminate_dead_code_pass)],
    )
    assert_graph(gm, "then aten.relu as r\nnext aten.mul(r, 2.0)\nnext aten.div")
    assert not found.gm.graph.find_nodes(op="call_function", target=DIV)


def test_its_options_and_its_id_tell_it_from_others():
    bound = [
        bind_options(Named(2.0)),
        bind_options(Named(3.0)),
        bind_options(rescale, by=2.0),
        bind_options(rescale),
    ]
    assert len({each.fingerprint for each in bound}) == 4
    assert bind_options(Named(2.0)) == bound[0]
    assert str(bound[2]) == "rescale(by=2.0)"
    with pytest.raises(TypeError, match="rescale has no option with; its options are by"):
        bind_options(rescale, **{"with": 1})


def test_bisection_names_the_one_that_changes_a_bit():
    model, x, found = traced()
    passes = [bind_options(Rescale(2.0)), bind_options(rescale, by=3.0)]
    assert str(bisect_passes(found, passes, (model, x))).startswith(
        "introduced by pass 2 of 2, rescale(by=3.0)"
    )
    assert bisect_passes(found, passes[:1], (model, x)).outcome == "equal"


def by_three(graph: fx.Graph) -> None:
    Rescale(3.0)(graph)


FUSED = "gtrainer_tests.scaled_twice"


@pytest.mark.parametrize(
    ("wrong", "name", "made"),
    [
        (by_three, "by_three()", "aten.mul.Tensor"),
        (Named(3.0), "Named(uuid='by 3.0')", "aten.mul.Tensor"),
        (functools.partial(rescale, by=3.0), "rescale(by=3.0)", "aten.mul.Tensor"),
        (Fuse(4.5), "Fuse(uuid='fuse by 4.5')", f"{FUSED}.default"),
    ],
    ids=["a function", "with uuid", "a partial", "patterns"],
)
def test_a_planted_mistake_is_named_of_passes_that_nobody_bound(wrong, name, made):
    model, x, found = traced()
    text = str(bisect_passes(found, [Rescale(2.0), wrong, eliminate_dead_code_pass], (model, x)))
    assert text.startswith(f"introduced by pass 2 of 3, {name} (")
    assert made in text.partition("computed from what the pass made\n")[2]


def test_patterns_of_inductor_match_in_a_pipeline():
    """Also by their own ``apply``, which takes a graph or a module and gives a number."""
    model, x, found = traced()
    for a_pass in (Fuse(), Fuse().patterns.apply):
        passes = construct_default_graph_passes(bucket_plan=["up"], extra={"bucketing": [a_pass]})
        assert_graph(apply_graph_passes(found.gm, (), passes[-1:]), f"count 1 {FUSED}")
        assert bisect_passes(found, passes[-1:], (model, x)).outcome == "equal"


def test_a_partial_is_its_function_with_options():
    half = functools.partial(rescale, by=0.5)
    assert bind_options(half) == bind_options(rescale, by=0.5)
    assert bind_options(half, by=2.0) == bind_options(rescale, by=2.0)
    opaque = bind_options(
        functools.partial(rescale, by=torch.tensor(2.0))
    )  # of what has no fingerprint
    assert (str(opaque), opaque.home) == ("rescale()", "")


def test_caches_do_not_take_one_object_for_another():
    def ids(*passes):
        slot = "post_grad_custom_post_pass"
        return [inductor_options(each, slot=slot)[slot][0].uuid() for each in passes]

    assert ids(Rescale(2.0), bind_options(Rescale(3.0))) == [None, None]
    two, three, again = ids(Named(2.0), Named(3.0), Named(2.0))
    assert two == again != three
    reported, home, *_ = ids(rescale)[0]
    assert (reported, home) == ("rescale()", f"{__name__}:rescale")


def test_caches_do_not_take_one_function_for_another(tmp_path, monkeypatch):
    """The functions have the same name in another module, or another text; a function without a
    name of its own is not cached.
    """
    source = "def fuse(graph):\n    graph.lint()\n"
    for name in ("one", "other"):
        (tmp_path / f"{name}_pass.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    one, other = (importlib.import_module(f"{name}_pass") for name in ("one", "other"))

    def identity(a_pass, **options):
        return inductor_options(a_pass, **options)["joint_custom_post_pass"][0].uuid()

    before = identity(one.fuse)
    assert before == identity(one.fuse) != identity(other.fuse)
    assert before != identity(one.fuse, files=(other.__file__,))
    Path(one.__file__).write_text(source.replace("lint()", "eliminate_dead_code()"))
    assert before != identity(one.fuse)
    assert [identity(lambda graph: graph.lint()), identity(lambda graph: None)] == [None, None]

    def inside(graph):
        graph.lint()

    assert identity(inside) is None
    assert identity(canonicalize_graph_pass) is not None
    with pytest.raises(
        ValueError, match=r"files='nowhere.py': No such file or directory: give the source files of"
    ):
        identity(one.fuse, files=("nowhere.py",))


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

    with pytest.raises(
        TypeError,
        match="another returns another graph than it was given, which Inductor would drop",
    ):
        apply_graph_passes(make_fx(lambda x: x * 2)(torch.ones(2)), (), [bind_options(another)])


def test_a_backend_that_gives_the_forward_is_a_pass():
    _, _, found = traced()
    gm = apply_graph_passes(found.gm, found.example_inputs, [bind_options(backend)])
    assert gm.graph.find_nodes(op="call_function", target=DIV)
    with pytest.raises(
        TypeError, match="a pass returns a GraphModule, this one returned a function"
    ):
        apply_graph_passes(
            found.gm, found.example_inputs, [bind_options(lambda gm, inputs: lambda *given: given)]
        )


def backend(gm, example_inputs):
    """A backend of torch.compile."""
    Rescale(2.0)(gm.graph)
    gm.recompile()
    return gm.forward


@pytest.mark.parametrize(
    "a_pass",
    [Rescale(2.0), Named(2.0), rescale, backend],
    ids=["an object", "with uuid", "a function", "a backend"],
)
def test_it_stands_in_a_pass_file(tmp_path, a_pass):
    file = tmp_path / "a.fxgraph"
    head = (
        "# gtrainer graph v2\n# passes: fuse\n# values: same\n# check: then aten.relu\n"
        "# check: next aten.mul\n"
    )
    file.write_text(
        f"{head}if I:\n  I.x: f32[64]\nif fwd:\n  relu: f32[64] = aten.relu(I.x)\nif out:\n"
        f"  yield fwd._.relu\n"
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

        def batch(number, rank):
            generator = torch.Generator().manual_seed(10 * number + rank)
            return (torch.randn(4, 16, generator=generator),)

        return TrainConfig(
            model=model, step=step, batch=batch, bucket_plan=["up"], mesh=mesh, steps=1
        )

    plain, right, wrong = (
        train_graph(config, world=gt_world, passes=[bind_options(each) for each in passes])
        for passes in ([], [Named(2.0), Fuse()], [Rescale(3.0)])
    )
    assert_bitwise_equal(right, plain)
    assert_bitwise_different(wrong, plain)
    witness, named = (
        PassWitness(),
        pytest.raises(BitwiseDifference, match=r"introduced by pass 2 of 2, Fuse \("),
    )
    with facts.watching(witness.watchers()), named:
        assert_bitwise_equal(
            train_graph(config, world=gt_world, passes=[Named(2.0), Fuse(4.5)]), plain
        )
