"""A graph before and after a pass in bits: recorded inputs, seeds, sizes; and what broke compiled
against eager.
"""

import contextlib
import copy
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pytest_gtrainer import assert_compiled_bitwise, assert_pass_bitwise, gt_compile
from pytest_gtrainer._torch.passes import add_control_dependencies
from pytest_gtrainer.compiling.bitwise import SameGraph, _generate_inputs
from pytest_gtrainer.numerics.compare import BitwiseDifference, ControlFailed
from pytest_gtrainer.passes.graph_pass import check_waits
from tests.compiling.test_recorder import Model, Rescale


def run_of(a_pass, function=None, *inputs, **options):
    torch.manual_seed(0)
    with gt_compile() as record:
        compiled = torch.compile(
            function or Model(), options={"post_grad_custom_post_pass": a_pass}, **options
        )
        compiled(*(inputs or [torch.randn(4, 16)])).sum()
    return record.passes(type(a_pass).__name__)[0]


@pytest.mark.second_tier("True")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_pass_that_changes_no_bit_and_its_twin_that_does(dynamic):
    """P4: on the same inputs."""
    assert_pass_bitwise(run_of(Rescale(2.0), dynamic=dynamic))
    with pytest.raises(BitwiseDifference) as caught:
        assert_pass_bitwise(run_of(Rescale(3.0), dynamic=dynamic))
    message = str(caught.value)
    assert message.startswith(
        "Rescale on the forward graph 0/0 changed the numbers, on the inputs of the first call\n"
    )
    assert (
        "computed from what the pass made\n"
        "    mul_tensor = aten.mul.Tensor in the forward of layers.0\n" in message
    )


def test_two_graphs_without_a_record():
    run = run_of(Rescale(3.0))
    with pytest.raises(BitwiseDifference, match="the pass changed the numbers, on seed 0"):
        assert_pass_bitwise((run.before, run.after))


class AtMost:
    """Wrong for sizes over ``most``."""

    def __init__(self, most):
        self.most = most

    def __call__(self, graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            with graph.inserting_after(node):
                cut = graph.call_function(torch.ops.aten.slice.Tensor, (node, 0, 0, self.most))
            cut.meta = dict(node.meta)
            node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)


def test_dynamic_sizes_are_tried_beyond_the_example():
    run = run_of(AtMost(4), lambda x: x.relu().sum(0), torch.randn(4, 16), dynamic=True)
    with pytest.raises(BitwiseDifference, match=r"on seed 0 with s\d+ = 8"):
        assert_pass_bitwise(run)


def in_eights(x):
    return x.view(-1, 8).relu().sum(0)


def test_sizes_that_guards_forbid_are_passed_over():
    """The compilation holds for multiples of eight alone."""

    assert_pass_bitwise(run_of(Rescale(2.0), in_eights, torch.randn(16), dynamic=True))
    with pytest.raises(BitwiseDifference, match=r"on seed 0 with s\d+ = 32"):
        assert_pass_bitwise(run_of(AtMost(2), in_eights, torch.randn(16), dynamic=True))


def test_guards_that_forbid_all_other_sizes_are_told():
    def function(x):
        torch._check(x.shape[0] % 1024 == 0)
        return x.relu().sum(0)

    run = run_of(Rescale(2.0), function, torch.randn(1024), dynamic=True)
    with pytest.raises(
        ValueError, match=r"the guards of the graph forbid s\d+ = 1025 and the 63 sizes after it: "
    ):
        assert_pass_bitwise(run)


@pytest.mark.second_tier
def test_integers_of_the_first_call_are_kept():
    weight = torch.randn(50, 4)
    run = run_of(Rescale(2.0), lambda index, w: w[index].relu(), torch.tensor([3, 49, 7]), weight)
    assert_pass_bitwise(run)
    with pytest.raises(BitwiseDifference):
        assert_pass_bitwise(
            run_of(Rescale(3.0), lambda index, w: w[index].relu(), torch.tensor([3, 49, 7]), weight)
        )


def test_integers_of_other_sizes_than_the_example_are_made_up():
    """Those of the first call have its size."""
    index, weight = torch.tensor([3, 49, 7, 8, 9]), torch.randn(50, 4)
    torch._dynamo.mark_dynamic(index, 0)
    run = run_of(AtMost(5), lambda index, w: w[index].relu().sum(0), index, weight)
    with pytest.raises(BitwiseDifference, match=r"on seed 0 with s\d+ = 10"):
        assert_pass_bitwise(run)


def test_what_cannot_fail_is_refused():
    with gt_compile() as record:
        options = {"post_grad_custom_post_pass": Rescale(2.0)}
        torch.compile(Model(), options=options)(torch.randn(4, 16)).sum().backward()
    with pytest.raises(
        SameGraph, match=r"Rescale on the backward graph 0/0 changed nothing: take record.passes"
    ):
        assert_pass_bitwise(record.passes("Rescale", changed=False)[0])
    with pytest.raises(
        ControlFailed, match="outputs for two seeds are equal: this check cannot fail"
    ):
        assert_pass_bitwise(run_of(Rescale(2.0), lambda x: (x.abs() * 0).relu(), torch.ones(2, 3)))
    with pytest.raises(ValueError, match=r"seeds=\[0\]: give two different ones"):
        assert_pass_bitwise(record.passes("Rescale", changed=True)[0], seeds=[0])
    with pytest.raises(TypeError, match=r"seeds=3: give the seeds themselves, such as range\(3\)"):
        assert_pass_bitwise(record.passes("Rescale", changed=True)[0], seeds=3)


def test_a_copy_of_a_graph_is_the_same_graph():
    """P4: also with attributes and graphs inside; a copy that holds another value is not."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.randn(4)
    called = graph.call_module("body", (x,))
    graph.output((called, graph.get_attr("table")))
    body = make_fx(lambda x: x.exp())(torch.randn(4))
    gm = torch.fx.GraphModule({"body": body, "table": torch.ones(4)}, graph)
    others = [copy.deepcopy(gm) for _ in range(3)]
    with pytest.raises(SameGraph, match="the pass changed nothing"):
        assert_pass_bitwise((gm, others[0]))
    others[1].table.add_(1)
    with pytest.raises(BitwiseDifference):
        assert_pass_bitwise((gm, others[1]))
    for node in others[2].body.graph.find_nodes(
        op="call_function", target=torch.ops.aten.exp.default
    ):
        node.target = torch.ops.aten.sin.default
    others[2].body.recompile()
    with pytest.raises(BitwiseDifference):
        assert_pass_bitwise((gm, others[2]))


def test_a_compiled_function_returns_the_structure_of_eager(monkeypatch):
    """P4: numbers and containers of results, too."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: lambda x: (real(function)(x),))
    with pytest.raises(BitwiseDifference, match=r"output structure \(\(\*, \*\),\)"):
        assert_compiled_bitwise(lambda x: (x.relu(), x.exp()), torch.ones(3))


@dataclass
class Result:
    value: torch.Tensor


@pytest.mark.parametrize("pack", [Result, lambda x: {"a": x, "b": Result(x)}, lambda x: [object()]])
def test_a_result_that_is_no_pytree_is_refused(pack):
    with pytest.raises(TypeError, match="in which nothing can be compared: return tensors"):
        assert_compiled_bitwise(lambda x: pack(x.relu()), torch.ones(3))


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2)
def test_a_fake_world_moves_no_data(gt_world):
    def function(x):
        return (
            torch.distributed._functional_collectives.all_reduce(x.relu(), "sum", dist.group.WORLD)
            * 2
        )

    with pytest.raises(
        ValueError, match=r"the forward graph 0/0 has all_reduce.*, and a fake world moves no data"
    ):
        assert_pass_bitwise(run_of(Rescale(3.0), function, torch.randn(4, 16)))
    with pytest.raises(
        ValueError, match=r"^compiled graph 0/0 has all_reduce.*, and a fake world moves no data"
    ):
        assert_compiled_bitwise(function, torch.randn(4, 16))
    assert_compiled_bitwise(torch.relu, torch.randn(4, 16))


@pytest.mark.gt_world("ranks", size=2)
def test_on_ranks_all_vote(gt_world):
    def function(x):
        return (
            torch.distributed._functional_collectives.all_reduce(x.relu(), "sum", dist.group.WORLD)
            * 2
        )

    x = torch.randn(4, 16) if gt_world.rank else torch.zeros(4, 16)
    assert_pass_bitwise(run_of(Rescale(2.0), function, x))
    with pytest.raises(BitwiseDifference):
        assert_pass_bitwise(run_of(Rescale(3.0), function, x))


TABLE, PLACES = torch.randn(5, 4), torch.tensor([0, 1])


def _refuse_four(places):
    torch._assert_async((places < 4).all())


REFUSING = {
    "an index": (
        lambda table, places: table[places.abs()] * 1,
        lambda table, places: table[:-1][places.abs()] * 1,
        "the integer 4 in .*: the graph after the pass refuses .* takes: IndexError: index 4",
    ),
    "a row of an embedding": (
        lambda table, places: nn.functional.embedding(places, table),
        lambda table, places: nn.functional.embedding(places, table[:-1]),
        "the graph after the pass refuses",
    ),
    "a value": (
        lambda table, places: table[places.abs()] * 1,
        lambda table, places: (_refuse_four(places), table[places.abs()] * 1)[1],
        "the graph after the pass refuses .* takes: RuntimeError",
    ),
}


@pytest.mark.parametrize("name", REFUSING)
def test_inputs_that_only_the_graph_behind_a_pass_refuses_are_a_difference(name):
    before, after, says = REFUSING[name]
    graphs = [make_fx(each, tracing_mode="real")(TABLE, PLACES) for each in (before, after)]
    with pytest.raises(BitwiseDifference, match=says):
        assert_pass_bitwise(tuple(graphs))


@pytest.mark.gt_world("ranks", size=2)
def test_inputs_that_a_graph_refuses_on_one_rank_are_a_difference_on_all(gt_world):
    first, rows = torch.zeros_like(PLACES), 1 if gt_world.rank else 5
    before = make_fx(lambda table, places: table[places] * 1)(TABLE, first)
    after = make_fx(lambda table, places: table[:rows][places] * 1)(TABLE, first)
    with pytest.raises(BitwiseDifference, match="graph after the pass refuses the inputs"):
        assert_pass_bitwise((before, after))


@pytest.mark.gt_world("ranks", size=2)
def test_generated_inputs_differ_between_ranks(gt_world):
    """The maximum of equal numbers is the number: a pass that drops it would change no bit."""

    def highest(x):
        reduced = torch.ops._c10d_functional.all_reduce(x, "max", dist.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(reduced)

    x = torch.randn(4, 16)
    before = make_fx(highest)(x)
    assert_pass_bitwise((before, make_fx(lambda x: highest(x) * 1.0)(x)))
    dropped = make_fx(lambda x: x.clone())(x)
    with pytest.raises(BitwiseDifference, match=r"on seed 0\n.*differ"):
        assert_pass_bitwise((before, dropped))


@pytest.mark.second_tier
def test_compiled_against_eager_says_what_broke_it():
    x = torch.randn(8, 8)
    assert assert_compiled_bitwise(lambda x: torch.relu(x @ x), x).outcome == "equal"
    with pytest.raises(
        BitwiseDifference,
        match=r"decomposition, or a pass changed the numbers\n"
        r"in exact arithmetic: joint of graph 0/0 against dynamo: other kernels: .*"
        r"(?s:.)*aten.erf.default",
    ):
        assert_compiled_bitwise(lambda x: torch.nn.functional.gelu(x @ x), x)


@pytest.mark.second_tier
def test_compiled_against_eager_copies_what_it_gives():
    def function(x, y):
        x.add_(1)
        return x + y

    x = torch.zeros(4)
    assert assert_compiled_bitwise(function, x, x).outcome == "equal"
    assert torch.equal(x, torch.zeros(4))
    needs = torch.ones(4, requires_grad=True)
    assert (
        assert_compiled_bitwise(lambda x: torch.autograd.grad((x * x).sum(), x), needs).outcome
        == "equal"
    )


@pytest.mark.second_tier
def test_compiled_against_eager_compares_inputs_that_are_written_to():
    def function(x, out):
        out.copy_(torch.nn.functional.gelu(x))
        return torch.relu(x)

    with pytest.raises(BitwiseDifference, match=r"first at input 1, which is written to"):
        assert_compiled_bitwise(function, torch.randn(8, 8), torch.zeros(8, 8))


def is_compiled():
    """1 in compiled code, else 0."""
    return int(torch.compiler.is_compiling())


class Averaging(torch.nn.Module):
    """Write in one way, otherwise if compiled."""

    def __init__(self, way, factor=None):
        super().__init__()
        self.way, self.factor, self.cache = way, factor, torch.zeros(4)
        self.caches = {"of": [torch.zeros(4), torch.zeros(4)]}
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=way == "gradient")
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("first", None)

    def forward(self, x):
        other = x[0] * (1 + is_compiled() if self.factor is None else self.factor)
        if self.way == "buffer":
            self.mean.mul_(0.5).add_(other)
        elif self.way == "another buffer":
            self.mean = self.mean + other
        elif self.way == "an empty buffer":
            self.first = other
        elif self.way == "parameter":
            self.weight.add_(other)
        elif self.way == "attribute":
            self.cache += other
        elif self.way == "an attribute's last item":
            self.caches["of"][-1] += other
        elif self.way == "a new attribute":
            self.seen = other
        elif self.way == "gradient":
            (self.weight * other).sum().backward()
        return x + 1


WAYS = {
    "buffer": "buffer mean, which is written to",
    "another buffer": "buffer mean, which is written to",
    "an empty buffer": "buffer first, which is written to",
    "parameter": "weight, which is written to",
    "attribute": "attribute cache, which is written to",
    "an attribute's last item": "attribute caches['of'][1], which is written to",
    "a new attribute": "attribute seen, which is written to",
    "gradient": "gradient of weight",
}


@pytest.mark.parametrize(
    ("way", "place"),
    [
        *((way, "called") for way in WAYS),
        *(("another buffer", place) for place in ("a part", "an input", "captured")),
        ("gradient", "captured"),
    ],
)
def test_compiled_against_eager_compares_the_state_of_modules(way, place):
    """And puts it back."""
    module, x = Averaging(way), torch.ones(2, 4)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    function, inputs, prefix = module, [x], ""
    if place == "a part":
        function, prefix = torch.nn.Sequential(torch.nn.Identity(), module), "1."
    elif place == "an input":
        function, inputs, prefix = lambda x, model: model(x), [x, module], "input 1."
    elif place == "captured":
        function, prefix = lambda x: module(x), "module."
    name = WAYS[way]
    parts = name.split(",")[0].split(" ")
    expected = name.replace(parts[-1], prefix + parts[-1], 1)
    with pytest.raises(BitwiseDifference, match=f"first at {re.escape(expected)}"):
        assert_compiled_bitwise(function, *inputs)
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    assert module.weight.grad is None
    assert not module.cache.any()
    assert not module.caches["of"][1].any()
    assert not hasattr(module, "seen")


class Holder:
    def __init__(self):
        self.total = torch.zeros(4)


TOTAL = torch.zeros(4)


def in_a_closure():
    total = torch.zeros(4)

    def function(x):
        total.add_(x[0] + is_compiled())
        return x + 1

    return function, "captured total", total


def put_in_a_closure():
    total = torch.zeros(4)

    def function(x):
        nonlocal total
        total = total + x[0] + is_compiled()
        return x + 1

    return function, "captured total", total


def in_an_object():
    holder = Holder()

    def function(x):
        holder.total += x[0] + is_compiled()
        return x + 1

    return function, "captured holder.total", holder.total


def in_a_global():
    def function(x):
        TOTAL.add_(x[0] + is_compiled())
        return x + 1

    return function, "captured TOTAL", TOTAL


@pytest.mark.parametrize("make", [in_a_closure, put_in_a_closure, in_an_object, in_a_global])
def test_compiled_against_eager_compares_what_a_function_holds(make):
    function, name, tensor = make()
    with pytest.raises(BitwiseDifference, match=f"first at {name}, which is written to"):
        assert_compiled_bitwise(function, torch.ones(2, 4))
    assert not tensor.any()


def write_into_a_dict(x, cache):
    cache["keys"] = x + is_compiled()
    return x + 1


def add_to_a_list(x, cache):
    cache.append(x + is_compiled())
    return x + 1


def write_to_the_second(x, cache):
    cache[1].add_(is_compiled() + 1)
    return x + 1


def leave_a_gradient(x, cache):
    (cache[0] * (is_compiled() + 2)).sum().backward()
    return x + 1


@pytest.mark.parametrize(
    ("function", "cache", "name"),
    [
        (write_into_a_dict, {"keys": torch.zeros(4)}, "input 1, which is written to"),
        (add_to_a_list, [torch.zeros(4)], "input 2, which is written to"),
        (write_to_the_second, [torch.zeros(4), torch.zeros(4)], "input 2, which is written to"),
        (leave_a_gradient, [torch.zeros(4, requires_grad=True)], "gradient of input 1"),
    ],
)
def test_compiled_against_eager_compares_inputs_in_containers(function, cache, name):
    with pytest.raises(BitwiseDifference, match=f"first at {name}"):
        assert_compiled_bitwise(function, torch.ones(2, 4), cache)


@pytest.mark.second_tier
def test_all_runs_of_compiled_against_eager_begin_with_the_same_state():
    for way in WAYS:
        assert assert_compiled_bitwise(Averaging(way, 2.0), torch.ones(2, 4)).outcome == "equal"
    module = torch.nn.BatchNorm1d(4)
    module.weight.grad = torch.ones(4)
    with pytest.raises(BitwiseDifference, match="decomposition, or a pass"):
        assert_compiled_bitwise(module, torch.randn(8, 4))
    assert module.num_batches_tracked == 0
    assert torch.equal(module.weight.grad, torch.ones(4))


@pytest.mark.second_tier
def test_compiled_against_eager_compares_random_states():
    """V2: a draw that nobody reads is left out of the compiled graph, and what is drawn later
    differs.
    """

    def function(x):
        torch.rand(3)
        return torch.relu(x)

    with pytest.raises(BitwiseDifference, match=r"first at random state of torch\.cpu afterwards"):
        assert_compiled_bitwise(function, torch.randn(8, 8))


@pytest.mark.second_tier
def test_compiled_against_eager_blames_generated_code():
    def function(x):
        return (x * 3 + x * 5).sum(-1)

    with pytest.raises(
        BitwiseDifference,
        match=r"compiled against eager: code generation changed the numbers\n"
        r"in exact arithmetic: .* of generated code: assert_no_less_accurate",
    ):
        assert_compiled_bitwise(function, torch.randn(64, 1000).bfloat16())


NAN = torch.full((3,), float("nan"))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: (x * NAN).sin(), "output 0: nothing but NaN"),
        (lambda x: (x.exp(), x * NAN), "output 1: nothing but NaN"),
        (lambda x: x[:0].exp(), "no result has an element"),
        (lambda x: [x[:0].exp(), {"a": x[:0]}], "no result has an element"),
        (lambda x: (x.exp(), None)[1], "no result has an element"),
        (lambda x: (x.mul_(NAN), None)[1], "input 0, which is written to: nothing but NaN"),
    ],
    ids=["NaN", "the second is NaN", "empty", "all empty", "nothing", "NaN in place"],
)
def test_results_that_cannot_differ_are_unverified(function, words):
    """V6: neither the structure of results nor random states are values."""
    with pytest.raises(BitwiseDifference, match=f"no difference could be seen(?s:.)*{words}"):
        assert_compiled_bitwise(function, torch.ones(3))


@pytest.mark.second_tier
def test_results_of_which_some_are_empty_are_equal():
    """V6: and a call that returns nothing may write to an input."""
    assert assert_compiled_bitwise(lambda x: (x[:0], x.relu()), torch.ones(3)).outcome == "equal"

    def write(x):
        x.add_(1)

    assert assert_compiled_bitwise(write, torch.ones(3)).outcome == "equal"
    partly = torch.tensor([float("nan"), 1.0])
    assert assert_compiled_bitwise(torch.relu, partly).label == "equal (not finite)"


def test_compiled_and_eager_draw_the_same_numbers():
    """And leave the generator as it was; with Inductor's own numbers a dropout differs."""
    state, x = torch.get_rng_state(), torch.ones(8, 8)
    with torch._inductor.config.patch(fallback_random=True):
        assert assert_compiled_bitwise(lambda x: torch.dropout(x, 0.5, True), x).outcome == "equal"
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(BitwiseDifference, match="decomposition, or a pass"):
        assert_compiled_bitwise(lambda x: torch.dropout(x, 0.5, True), x)


class Eps:
    """Takes ten times what is added to a mean of squares."""

    def __call__(self, graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.args = (node.args[0], 10 * node.args[1])


@pytest.mark.parametrize(
    ("rows", "otherwise"),
    [
        (2, contextlib.nullcontext()),
        (5, pytest.raises(BitwiseDifference, match="on inputs with zeros of both signs")),
    ],
)
def test_what_is_added_to_a_variance_shows(rows, otherwise, monkeypatch):
    """The addend is rounded away in bf16, except for rows close to zero; tiny inputs are such rows
    only by chance.
    """

    def function(x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    run = run_of(Eps(), function, torch.ones(rows, 4, dtype=torch.bfloat16))
    with pytest.raises(BitwiseDifference, match="on seed 0"):
        assert_pass_bitwise(run)
    monkeypatch.setattr("pytest_gtrainer.compiling.bitwise.SMALL", 1.0)
    with otherwise:
        assert_pass_bitwise(run)


@pytest.mark.parametrize("recompiles", [True, False])
def test_a_pass_that_does_not_recompile_is_judged_by_its_graph(recompiles):
    """V2: the code of the module would still be that of the graph before."""
    before = make_fx(lambda x, y: (x + y).relu())(torch.randn(4), torch.randn(4))
    for node, value in zip(
        before.graph.find_nodes(op="placeholder"), (torch.randn(4), torch.randn(4)), strict=True
    ):
        node.meta["val"] = value
    after = copy.deepcopy(before)
    for node in after.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        node.target = torch.ops.aten.sub.Tensor
    if recompiles:
        after.recompile()
    with pytest.raises(BitwiseDifference):
        assert_pass_bitwise((before, after))


@pytest.mark.parametrize(
    ("rewritten", "words"),
    [
        (lambda x, y, z: x + (y + z), "reordered: the same function"),
        (lambda x, y, z: (x + y) + 1.001 * z, "another function: .*; begins at node mul"),
    ],
)
def test_a_failure_says_which_kind(rewritten, words):
    inputs = [torch.randn(64) for _ in range(3)]
    before = make_fx(lambda x, y, z: (x + y) + z)(*inputs)
    with pytest.raises(BitwiseDifference, match=f"in exact arithmetic: {words}"):
        assert_pass_bitwise((before, make_fx(rewritten)(*inputs)))


@pytest.mark.gt_world("ranks", size=2)
def test_a_pass_that_loses_a_wait_is_refused(gt_world):
    """gloo may have sent the numbers already, so bits can be equal."""
    c10d = torch.ops._c10d_functional

    def summed(x):
        reduced = c10d.all_reduce(x, "sum", dist.group.WORLD.group_name)
        return c10d.wait_tensor(reduced) * 2

    before = make_fx(summed)(torch.ones(4))
    after = copy.deepcopy(before)
    (wait,) = after.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    wait.replace_all_uses_with(wait.args[0])
    after.graph.erase_node(wait)
    after.recompile()
    with pytest.raises(RuntimeError, match="the pass left a graph that does not wait"):
        assert_pass_bitwise((before, after))


def test_a_size_is_read_before_a_wait():
    """Sizes are known when a collective is launched; its numbers are not."""
    c10d, aten = torch.ops._c10d_functional, torch.ops.aten
    graph = fx.Graph()
    x = graph.placeholder("x")
    launch = graph.call_function(c10d.all_reduce.default, (x, "sum", "0"))
    size = graph.call_function(aten.sym_size.int, (launch, 0))
    wait = graph.call_function(c10d.wait_tensor.default, (launch,))
    graph.output((wait, size))
    check_waits(graph, "a pass")
    with graph.inserting_before(wait):
        graph.call_function(aten.neg.default, (launch,))
    with pytest.raises(RuntimeError, match="a pass left a graph that does not wait: neg"):
        check_waits(graph, "a pass")


C10D, ATEN = torch.ops._c10d_functional, torch.ops.aten
EARLY = {
    "only behind the launch": (ATEN.sin.default, "exp", ["reader"], False),
    "a wait": (None, "", ["wait"], False),
    "a size": (ATEN.sym_size.int, "launch", ["reader"], False),
    "a read": (ATEN.neg.default, "launch", ["reader"], True),
    "a read of a view": (ATEN.detach.default, "launch", ["reader"], True),
    "a launch": (ATEN.neg.default, "launch", ["launch"], True),
    "a launch and its wait": (None, "", ["launch", "wait"], False),
}


@pytest.mark.second_tier(*list(EARLY)[:3], "a launch and its wait")
@pytest.mark.parametrize("what", EARLY)
def test_a_control_dependency_does_what_is_in_it(what):
    """It is a wait, a view or a read as its body is, and does not read what it stands behind."""
    operator, source, inside, is_early = EARLY[what]
    graph = fx.Graph()
    exp = graph.call_function(ATEN.exp.default, (graph.placeholder("x"),))
    nodes = {"exp": exp, "launch": graph.call_function(C10D.all_reduce.default, (exp, "sum", "0"))}
    if operator is not None:
        args = (nodes[source], 0) if operator is ATEN.sym_size.int else (nodes[source],)
        nodes["reader"] = graph.call_function(operator, args)
        if operator is ATEN.detach.default:
            nodes["reader of the view"] = graph.call_function(ATEN.neg.default, (nodes["reader"],))
    nodes["wait"] = graph.call_function(C10D.wait_tensor.default, (nodes["launch"],))
    graph.output(tuple(nodes.values()))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, device="meta")
    gm = fx.GraphModule({}, graph)

    behind = {"launch": exp, "reader": nodes["launch"], "wait": exp}
    add_control_dependencies(gm.graph, {nodes[name]: behind[name] for name in inside})
    if is_early:
        with pytest.raises(RuntimeError, match="a pass left a graph that does not wait"):
            check_waits(gm.graph, "a pass")
    else:
        check_waits(gm.graph, "a pass")


def test_a_symbol_that_only_strides_have_gets_sizes_too():
    """As in a slice of a dynamic matrix that has a fixed width."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        width = shapes.create_unbacked_symint()
        torch._check(width >= 3)
        value = torch.empty_strided((4, 3), (width, 1))
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    graph.output((x,))
    found = []
    for description, (made,) in _generate_inputs(fx.GraphModule({}, graph), {}, (0, 1)):
        assert made.shape == (4, 3)
        found.append((description, made.stride()))
    assert found == [
        (f"seed {seed} with u0 = {size}", (size, 1)) for size in (4, 8, 5) for seed in (0, 1)
    ]
