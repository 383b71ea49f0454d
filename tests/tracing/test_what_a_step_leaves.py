"""A replay equals eager in all that a step leaves, or it is refused."""

import contextlib
import copy
import operator
from collections import defaultdict, deque

import pytest
import torch
from torch import fx, nn

from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    data_parallel,
    trace_stage,
    trace_step,
)
from pytest_gtrainer.numerics.graph_run import AFTERWARDS
from pytest_gtrainer.tracing.model import attributes_kept

X = torch.arange(12.0).reshape(3, 4) / 8


class Writing(nn.Module):
    """A layer, a buffer, and room for more."""

    def __init__(self, *more):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.more = nn.Sequential(*more)

    def forward(self, x):
        return self.more(self.layer(x) * self.gain)


def loss_of(model, x, *others):
    return model(x).square().mean()


def counting(model, x):
    model.count.add_(1)
    return loss_of(model, x)


def doubling_a_parameter(model, x):
    with torch.no_grad():
        model.gain.mul_(2)
    return loss_of(model, x)


def doubling_an_input(model, x):
    x.mul_(2)
    return loss_of(model, x)


def doubling_one_of_two(model, x, y):
    x.mul_(2)
    return (model(y) * x).sum()


def doubling_a_copy_if_there_is_one(model, x):
    x.contiguous().mul_(2)
    return loss_of(model, x)


def dropping_out(model, x):
    return loss_of(model, nn.functional.dropout(x))


def of_a_buffer(model, x, buffer):
    model.count.add_(1)
    return loss_of(model, x) * (1 + buffer)


CASES = {
    "batch norm": (lambda: Writing(nn.BatchNorm1d(4)), loss_of, lambda model: (X,)),
    "a counter": (Writing, counting, lambda model: (X,)),
    "a parameter": (Writing, doubling_a_parameter, lambda model: (X,)),
    "an input": (Writing, doubling_an_input, lambda model: (X.clone(),)),
    "a transposed input": (Writing, doubling_an_input, lambda model: (torch.ones(4, 3).t(),)),
    "a copy of an input": (
        Writing, doubling_a_copy_if_there_is_one, lambda model: (torch.ones(4, 3).t(),),
    ),
    "one tensor twice": (Writing, doubling_one_of_two, lambda model: (X.clone(),) * 2),
    "two views": (
        Writing, doubling_one_of_two, lambda model: (lambda x: (x[:3], x[1:]))(torch.ones(4, 4)),
    ),
    "a buffer": (Writing, of_a_buffer, lambda model: (X, model.count)),
    "a random state": (Writing, dropping_out, lambda model: (X,)),
    "nothing": (Writing, loss_of, lambda model: (X,)),
}  # fmt: skip


def eager_results(model, step, inputs):
    """Return what ``results`` should give, from eager code; changes ``model`` and ``inputs``."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors |= {f"input {place}": value for place, value in enumerate(inputs)}
    before = {name: value.detach().clone() for name, value in tensors.items()}
    state = torch.get_rng_state()
    loss = step(model, *inputs)
    loss.backward()
    results = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad
    for name, value in tensors.items():
        if not torch.equal(value, before[name]):
            results[name + AFTERWARDS] = value.detach()
    if not torch.equal(state, torch.get_rng_state()):
        results["random state of torch.cpu" + AFTERWARDS] = torch.get_rng_state()
    return results


@pytest.mark.parametrize(("make", "step", "inputs_of"), CASES.values(), ids=list(CASES))
def test_results_are_what_eager_code_computes_and_leaves(make, step, inputs_of):
    """V5: and the model, the inputs and the random state stay as they are."""
    model, eager = make(), make()
    inputs = inputs_of(model)
    traced = trace_step(model, step, inputs)
    torch.manual_seed(3)
    first = traced.results(model, *inputs)
    assert_bitwise_equal(traced.results(model, *inputs), first)
    assert_bitwise_equal(first, eager_results(eager, step, inputs_of(eager)))
    assert not any(parameter.grad is not None for parameter in model.parameters())


def without(gm, target):
    """The graph without its first call of ``target``."""
    gm = copy.deepcopy(gm)
    node = gm.graph.find_nodes(op="call_function", target=target)[0]
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)
    gm.recompile()
    return gm


@pytest.mark.parametrize(
    ("make", "step", "target", "name"),
    [
        (lambda: Writing(nn.BatchNorm1d(4)), loss_of, "add_.Tensor", "more.0.num_batches_tracked"),
        (Writing, counting, "add_.Tensor", "count"),
        (Writing, doubling_a_copy_if_there_is_one, "mul_.Tensor", "input 0"),
    ],
    ids=["batch norm", "a counter", "an input"],
)
def test_a_pass_that_drops_an_update_has_other_results(make, step, target, name):
    """V5: the results were equal."""
    packet, overload = target.split(".")
    model, x = make(), X.clone()
    traced = trace_step(model, step, (x,))
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    broken = traced.with_graph(without(traced.gm, operator))
    with pytest.raises(AssertionError, match=f"(?s)only in expected.*{name}{AFTERWARDS}"):
        assert_bitwise_equal(broken.results(model, x), traced.results(model, x))


LEAVES = {
    "its own parameter": lambda model: model.gain,
    "its frozen parameter's neighbour": lambda model: model.layer.bias,
    "another leaf": lambda model: torch.ones(4, requires_grad=True),
    "another parameter": lambda model: nn.Parameter(torch.ones(4)),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=list(LEAVES))
def test_an_input_that_requires_a_gradient_is_refused(leaf):
    """V5: its gradient was lost. In a stage it is a result."""

    def step(model, x, factor):
        return (model.layer(x) * factor).square().mean()

    model = Writing()
    given = leaf(model)
    words = r"inputs\[1\] requires a gradient, .* give detach\(\)"
    with pytest.raises(ValueError, match=words):
        trace_step(model, step, (X, given))
    traced = trace_step(model, step, (X, given.detach()))
    for run in (traced.replay, traced.results):
        with pytest.raises(ValueError, match=words):
            run(model, X, given)
    assert trace_stage(model, (X, given), step=step).differentiated == (1,)


def test_an_input_that_is_a_frozen_parameter_is_traced():
    """V5: eager code computes no gradient of it either."""
    model = Writing()
    model.gain.requires_grad_(False)
    traced = trace_step(model, lambda m, x, gain: (m.layer(x) * gain).sum(), (X, model.gain))
    assert "gradient of gain" not in traced.results(model, X, model.gain)


@pytest.mark.parametrize("trace", [trace_step, trace_stage])
def test_a_buffer_that_requires_a_gradient_is_refused(trace):
    """V5: it has no place among the results of a graph."""
    model = Writing()
    model.register_buffer("scale", torch.ones(4, requires_grad=True))
    arguments = (loss_of, (X,)) if trace is trace_step else ((X,),)
    with pytest.raises(ValueError, match="the buffer scale requires a gradient"):
        trace(model, *arguments)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_input_is_refused(layout):
    """V5: torch said that NestedTensorImpl does not support sizes."""
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    with pytest.raises(ValueError, match=r"inputs\[0\] is a nested tensor.* give a padded one"):
        trace_step(Writing(), lambda m, x: m(x).sum(), (nested,))


OTHERS = {
    "transposed": (torch.ones(4, 4).t(), r"float32\[4, 4\] with strides \[1, 4\]"),
    "expanded": (torch.ones(4).expand(4, 4), r"float32\[4, 4\] with strides \[0, 1\]"),
    "a slice": (torch.ones(4, 8)[:, :4], r"float32\[4, 4\] with strides \[8, 1\]"),
    "sparse": (torch.ones(4, 4).to_sparse(), r"float32\[4, 4\] of layout torch.sparse_coo"),
    "on another device": (torch.ones(4, 4, device="meta"), r"float32\[4, 4\] on meta"),
}


@pytest.mark.parametrize(("other", "words"), OTHERS.values(), ids=list(OTHERS))
def test_a_replay_on_tensors_that_lie_otherwise_is_refused(other, words):
    """V5: contiguous() is the input itself, or a copy: the trace has decided."""
    model, x = Writing(), torch.ones(4, 4)
    traced = trace_step(model, doubling_a_copy_if_there_is_one, (x,))
    with pytest.raises(ValueError, match=f"input 0 is {words}, the step was traced with float32"):
        traced.replay(model, other)


def test_a_replay_on_a_parameter_of_other_strides_is_refused():
    """V5."""
    model = Writing()
    traced = trace_step(model, loss_of, (X,))
    model.layer.weight.data = model.layer.weight.data.t()
    with pytest.raises(ValueError, match=r"layer.weight is float32\[4, 4\] with strides"):
        traced.replay(model, X)


@pytest.mark.parametrize(
    "batch", [torch.ones(6, 4)[3:], torch.ones(1, 3, 4)[0]], ids=["an offset", "a view"]
)
def test_batches_cut_out_of_larger_tensors_are_replayed(batch):
    """V5: the control; what lies in memory alike is taken, wherever it begins."""
    model, eager = Writing(), Writing()
    traced = trace_step(model, loss_of, (X,))
    results = traced.results(model, batch)
    assert_bitwise_different(results, traced.results(model, X))
    assert_bitwise_equal(results, eager_results(eager, loss_of, (batch,)))


def test_one_element_has_no_strides_that_matter():
    """V5: the control."""
    model = Writing()
    traced = trace_step(model, loss_of, (torch.ones(4, 1).t(),))
    given = torch.ones(1, 4)
    assert_bitwise_equal(traced.results(model, given), eager_results(Writing(), loss_of, (given,)))


def with_gradient(gm, change):
    """The graph with its first gradient changed."""
    gm = copy.deepcopy(gm)
    output = gm.graph.output_node()
    loss, first, *others = output.args[0]
    with gm.graph.inserting_before(output):
        output.args = ((loss, change(gm.graph, first), *others),)
    gm.recompile()
    return gm


def summed(graph: fx.Graph, node: fx.Node):
    return graph.call_function(torch.ops.aten.sum.default, (node,))


def first_row(graph: fx.Graph, node: fx.Node):
    return graph.call_function(torch.ops.aten.select.int, (node, 0, 0))


def halved(graph: fx.Graph, node: fx.Node):
    return graph.call_function(torch.ops.aten.to.dtype, (node, torch.bfloat16))


@pytest.mark.parametrize("change", [summed, first_row, halved])
@pytest.mark.parametrize("existing", [False, True], ids=["no gradient", "a gradient"])
def test_a_gradient_of_another_shape_or_dtype_is_refused(change, existing):
    """V5: it was broadcast, or cast, into `.grad`."""
    model = Writing()
    traced = trace_step(model, loss_of, (X,))
    if existing:
        traced.replay(model, X)
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    broken = traced.with_graph(with_gradient(traced.gm, change))
    words = (
        r"the graph gives \w+(\.\w+)? a gradient of .*, and its .grad is|assign a gradient with "
        r"dtype"
    )
    with pytest.raises((ValueError, RuntimeError), match=words):
        broken.replay(model, X)
    after = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_sparse_gradient_is_sparse_and_is_added_to():
    """V5: it was made dense."""
    graph, eager = (nn.Embedding(5, 4, sparse=True) for _ in range(2))
    eager.load_state_dict(graph.state_dict())
    ids = torch.tensor([1, 2, 1])
    traced = trace_step(graph, loss_of, (ids,))
    for _ in range(2):
        traced.replay(graph, ids)
        loss_of(eager, ids).backward()
        assert graph.weight.grad.layout is torch.sparse_coo
        assert_bitwise_equal(graph.weight.grad.to_dense(), eager.weight.grad.to_dense())


class Caching(nn.Module):
    """Keeps tensors and counts in attributes, and in containers that are attributes."""

    def __init__(self):
        super().__init__()
        self.layer, self.table, self.calls = nn.Linear(4, 4), None, 0
        self.seen, self.by_name, self.shapes = [], {}, set()

    def forward(self, x):
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(4.0)
        self.last = self.layer(x) * self.table
        self.seen.append(self.last)
        self.by_name["last"] = self.last
        self.shapes.add(tuple(x.shape))
        return self.last


@pytest.mark.parametrize("trace", [trace_step, trace_stage])
def test_a_cache_that_the_forward_keeps_is_put_back(trace):
    """V5: it was left a fake tensor, which the next trace or eager call met."""
    model = Caching()
    arguments = (lambda m, x: (m(x) + m.seen[-1]).sum(), (X,)) if trace is trace_step else ((X,),)
    for _ in range(2):
        trace(model, *arguments)
        assert (model.table, model.calls, model.seen) == (None, 0, [])
        assert (model.by_name, model.shapes, hasattr(model, "last")) == ({}, set(), False)
    assert type(model(X).detach()) is torch.Tensor


class Cache:
    """A cache as those of ``transformers``: an object with lists of tensors."""

    def __init__(self):
        self.layers, self.length = [[]], 0


class Nesting(nn.Module):
    """It keeps tensors in containers and objects inside others, and one that holds itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.by_layer, self.in_order = {"a": {"b": {}}}, ([], [[]])
        self.last, self.lists = deque([1, 2], maxlen=2), defaultdict(list)
        self.cache, self.caches = Cache(), [Cache()]
        self.loop = []
        self.loop.append(self.loop)

    def forward(self, x):
        made = self.layer(x)
        self.by_layer["a"]["b"]["x"] = made
        self.in_order[0].append(made)
        self.in_order[1][0].append(made)
        self.last.append(made)
        self.lists["x"].append(made)
        for cache in (self.cache, *self.caches):
            cache.layers[0].append(made)
            cache.length += 1
            cache.newest = made
        self.loop.append(made)
        return made

    def left(self):
        caches = [(each.layers, each.length, set(vars(each))) for each in self.caches]
        return (
            self.by_layer,
            self.in_order,
            list(self.last),
            dict(self.lists),
            *caches,
            (self.cache.layers, self.cache.length),
            len(self.loop),
        )


def test_what_the_forward_keeps_inside_other_containers_is_put_back():
    """V5"""
    model = Nesting()
    before = copy.deepcopy(model.left())
    holders = [model.by_layer["a"]["b"], model.in_order[1][0], model.last, model.cache.layers]
    trace_step(model, lambda m, x: m(x).sum(), (X,))
    assert model.left() == before
    assert type(model.lists) is defaultdict
    same = [model.by_layer["a"]["b"], model.in_order[1][0], model.last, model.cache.layers]
    assert all(map(operator.is_, holders, same))


ONE, TWO = torch.ones(1), torch.ones(1)


@pytest.mark.parametrize(
    ("held", "change"),
    [
        ({"a": ONE, "b": TWO}, lambda held: held.update(c=held.pop("b"))),
        ({"a": ONE, "b": ONE}, lambda held: held.update(a=held.pop("a"))),
        ({"a": ONE, "b": TWO}, lambda held: held.update(b=TWO.clone())),
        ({"a": ONE}, lambda held: held.clear()),
        ({}, lambda held: held.update(a=ONE)),
        ([ONE, TWO], lambda held: held.reverse()),
        ([ONE, TWO], lambda held: held.pop()),
        (deque([ONE, TWO], maxlen=2), lambda held: held.append(ONE)),
        ({1, 2}, lambda held: (held.remove(2), held.add(3))),
    ],
    ids=["renamed", "reordered", "an equal one", "emptied", "filled", *["changed"] * 4],
)
def test_a_container_has_the_names_the_values_and_the_order_of_before(held, change):
    module = nn.Module()
    module.held = held

    def parts():
        if isinstance(held, dict):
            return [*held, *map(id, held.values())]
        return list(map(id, held))

    before = parts()
    with attributes_kept(module):
        change(module.held)
        assert parts() != before
    assert (module.held, parts()) == (held, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, dtype=torch.complex64).conj(),
        lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(2, 4, dtype=torch.complex64)[:, ::2],
        lambda: torch.randn(4, 4, dtype=torch.complex64)[:1, ::4],
        lambda: torch.zeros(0, 4),
        lambda: torch.tensor(3.0),
    ],
    ids=["conjugate", "negated", "strided", "one element", "empty", "scalar"],
)
def test_results_of_inputs_of_any_kind(make):
    """Reading their bytes needs no view that torch refuses."""
    given = make()
    before = given.clone()

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (x.real * self.weight).sum()

    model = Scaled()
    traced = trace_step(model, lambda m, x: m(x), (given,))
    found = traced.results(model, given)
    assert torch.equal(found["loss"], before.real.sum())
    assert list(found) == ["loss", "gradient of weight"]
    assert torch.equal(given, before)


def hook(*args):
    return None


CHANGED = {
    "a forward hook": lambda model: model.layer.register_forward_hook(hook),
    "a forward pre hook": lambda model: model.layer.register_forward_pre_hook(hook),
    "a backward hook": lambda model: model.layer.register_full_backward_hook(hook),
    "a backward pre hook": lambda model: model.layer.register_full_backward_pre_hook(hook),
    "another class": lambda model: setattr(model, "layer", Scaled(4, 4)),
    "a module that is gone": lambda model: model.more.pop(0),
    "a module more": lambda model: model.more.append(nn.Tanh()),
}


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("change", CHANGED.values(), ids=list(CHANGED))
def test_modules_that_have_changed_since_the_trace_are_refused(change):
    """V5: a graph does not run them. A copy of the model is taken."""
    model = Writing(nn.ReLU())
    traced = trace_step(model, loss_of, (X,))
    traced.replay(copy.deepcopy(model), X)
    change(model)
    with pytest.raises(
        ValueError, match=r"(layer|more\.[01]) was .* at the trace and is .*trace again"
    ):
        traced.replay(model, X)


@pytest.mark.gt_world("fake", size=4)
def test_sharded_models_are_themselves_at_the_replay(net, inputs, train_step, gt_mesh):
    """V5: the control: wrappers of ours change no class between trace and replay."""
    model = data_parallel(net, gt_mesh)
    traced = trace_step(model, train_step, inputs)
    with pytest.raises(ValueError, match="fake world moves no data"):
        traced.replay(model, *inputs)


def transposed(buffer):
    buffer.t_()


def resized(buffer):
    buffer.resize_(2, 2)


def restrided(buffer):
    buffer.as_strided_((4, 4), (1, 4))


def with_a_dimension_more(buffer):
    buffer.unsqueeze_(0)


@pytest.mark.parametrize("change", [transposed, resized, restrided, with_a_dimension_more])
def test_a_buffer_that_gets_another_shape_or_strides_is_refused(change):
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(16.0).view(4, 4))

    def step(model, x):
        change(model.table)
        return model(x).square().mean()

    with pytest.raises(ValueError, match="the step gives table other memory, another shape or"):
        trace_step(model, step, (X,))
    assert model.table.shape == (4, 4)


class OwnParameter(nn.Parameter):
    pass


class OwnTensor(torch.Tensor):
    pass


def test_tensors_of_a_class_of_the_user_are_compared_and_put_back():
    model = Writing()
    model.gain = OwnParameter(torch.ones(4))
    x = X.clone().as_subclass(OwnTensor)

    def step(model, x):
        with torch.no_grad():
            model.gain.mul_(2)
        x.mul_(2)
        return loss_of(model, x)

    found = trace_step(model, step, (x,)).results(model, x)
    assert found["gain" + AFTERWARDS].tolist() == [2.0] * 4
    assert torch.equal(found["input 0" + AFTERWARDS].as_subclass(torch.Tensor), X * 2)
    assert model.gain.tolist() == [1.0] * 4
    assert torch.equal(x.as_subclass(torch.Tensor), X)


def test_one_fake_tensor_given_twice_stands_for_two_inputs():
    mode = torch._subclasses.FakeTensorMode()
    fake = mode.from_tensor(X)
    model = Writing()

    def step(model, one, other):
        return (model(one) - 2 * model(other)).sum()

    traced = trace_step(model, step, (fake, fake))
    with torch.no_grad():
        assert_bitwise_equal(traced.replay(model, X, X * 3), step(model, X, X * 3))


def in_bf16(cache):
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(self.inner(x))


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "not cached"])
@pytest.mark.parametrize("make", [Twice, lambda: nn.Linear(4, 4)], ids=["twice", "once"])
def test_a_weight_that_autocast_casts_twice_is_refused_unless_eager_casts_it_twice(
    make, cache, where
):
    """Eager's cache adds the gradients of both uses in bf16."""
    model = make()
    inside = in_bf16(cache) if where == "inside" else contextlib.nullcontext()
    around = in_bf16(cache) if where == "around" else contextlib.nullcontext()

    def step(model, x):
        with inside:
            return model(x).float().square().mean()

    with around:
        if cache and isinstance(model, Twice):
            words = r"inner\.\w+ is cast twice inside torch\.autocast\. Eager code keeps the first"
            with pytest.raises(ValueError, match=words):
                trace_step(model, step, (X,))
            return
        found = trace_step(model, step, (X,)).results(model, X)
        step(model, X).backward()
    expected = {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
    assert_bitwise_equal({name: found[name] for name in expected}, expected)
