"""Graphs that must never be called equal: state, decisions, memory and constants that hide a
difference.
"""

import copy
import os
import random
import types
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch._higher_order_ops import scan
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.modules.module import register_module_forward_hook

from pytest_gtrainer import meaning, prove
from pytest_gtrainer.arithmetic import mode
from pytest_gtrainer.proofs.state import modes_of_torch

F = nn.functional
X, Y = torch.arange(1.0, 5.0), torch.tensor([2.0, -1.0, 3.0, 0.5])


def kind_of(actual, expected, *inputs):
    proof = prove(actual, expected, inputs=inputs)
    return proof.kind, str(proof)


# --- state that is replaced, or not registered


def update(how, factor):
    def step(model, x):
        model(x).sum().backward()
        for name, parameter in list(model.named_parameters()):
            new = parameter.detach() - factor * parameter.grad
            how(model, name, parameter, new)

    return step


HOWS = {
    "data": lambda model, name, parameter, new: setattr(parameter, "data", new),
    "a new parameter": lambda model, name, parameter, new: setattr(model, name, nn.Parameter(new)),
    "in place": lambda model, name, parameter, new: parameter.data.copy_(new),
    "load_state_dict": lambda model, name, parameter, new: model.load_state_dict(
        {**model.state_dict(), name: new}, assign=True
    ),
    "an attribute": lambda model, name, parameter, new: setattr(model, f"old_{name}", new),
    "a private attribute": lambda model, name, parameter, new: setattr(model, f"_{name}", new),
}


@pytest.mark.parametrize("how", HOWS)
def test_state_that_a_program_replaces_is_seen(how):
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    steps = [update(HOWS[how], factor) for factor in (0.1, 0.1, 0.2)]
    assert kind_of(steps[0], steps[1], model, x)[0] == "identical"
    assert kind_of(steps[0], steps[2], model, x)[0] == "another function"


def test_data_and_in_place_are_one_update():
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    steps = update(HOWS["data"], 0.1), update(HOWS["in place"], 0.1)
    assert kind_of(*steps, model, x)[0] == "identical"


def test_two_modules_with_the_same_names_are_two():
    def train(factor):
        def step(teacher, student, x):
            student(x).sum().backward()
            student.weight.data.sub_(factor * student.weight.grad)

        return step

    inputs = nn.Linear(4, 3), nn.Linear(4, 3), torch.ones(2, 4)
    assert kind_of(train(0.1), train(0.1), *inputs)[0] == "identical"
    assert kind_of(train(0.1), train(0.2), *inputs)[0] == "another function"


def test_modules_and_tensors_in_lists_and_dicts_are_state():
    def train(factor):
        def step(models, kept, x):
            with torch.no_grad():
                models[1].weight.mul_(factor)
                kept["last"] = models[1](x)
                kept["all"].append(x * factor)

        return step

    inputs = [nn.Linear(4, 3), nn.Linear(4, 3)], {"all": []}, torch.ones(2, 4)
    assert kind_of(train(2), train(2), *inputs)[0] == "identical"
    assert kind_of(train(2), train(3), *inputs)[0] == "another function"


class Graph(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.register_buffer("seen", torch.zeros(4))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.seen.mul_(1 - self.factor).add_(x, alpha=self.factor)
        return x * self.weight


def test_a_graph_that_writes_to_its_attributes_is_seen():
    graphs = [fx.symbolic_trace(Graph(factor)) for factor in (0.1, 0.1, 0.9)]
    assert kind_of(graphs[0], graphs[1], X)[0] == "identical"
    assert kind_of(graphs[0], graphs[2], X)[0] == "another function"


def test_aliased_inputs_of_a_graph_stay_aliased():
    def before(base, part):
        read = part * 1
        base.add_(1)
        return read

    def after(base, part):
        base.add_(1)
        return part * 1

    graphs = [fx.symbolic_trace(function) for function in (before, after)]
    base = X.clone()
    assert kind_of(*graphs, base, base[:3])[0] == "another function"
    assert kind_of(*graphs, base, X[:3].clone())[0] == "identical"


MODEL, CAPTURED = nn.Linear(4, 4), torch.ones(4)


class Holder:
    """Holds a module, and calls it, as a trainer does."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)

    def step(self, x):
        return self.model(x)


class WithHidden(nn.Module):
    """Has a module in a list, which registers nothing."""

    def __init__(self):
        super().__init__()
        self.hidden = [nn.LayerNorm(4)]

    def forward(self, x):
        return self.hidden[0](x)


def with_another_forward():
    model = nn.LayerNorm(4)
    forward = model.forward
    model.forward = lambda x: forward(x) * 2
    return model


def with_a_hook():
    model, norm = nn.Sequential(nn.Identity()), nn.LayerNorm(4)
    model[0].register_forward_hook(lambda module, args, output: norm(output))
    return model


HELD = [MODEL]


def helps(x):
    return HELD[0](x)


def closing_over(model):
    return lambda x: model(x).sum().backward()


REFUSED = {
    "a module in a closure": (closing_over(nn.Linear(4, 4)), (X,), "holds model, a Linear"),
    "a global module": (lambda x: MODEL(x), (X,), "holds MODEL, a Linear"),
    "a bound method": (nn.Linear(4, 4).forward, (X,), "holds self, a Linear"),
    "a module in a list": (lambda x: HELD[0](x), (X,), r"holds HELD\[0\], a Linear"),
    "a module in a dict": (closing_over({"a": MODEL}), (X,), r"holds model\['a'\], a Linear"),
    "a module behind a function": (lambda x: helps(x), (X,), r"holds helps.HELD\[0\], a Linear"),
    "a module of self": (Holder(MODEL).step, (X,), "holds self.model, a Linear"),
    "a module of an object": (closing_over(Holder(MODEL)), (X,), "holds model.model, a Linear"),
    "a module of a callable": (Holder([MODEL]), (X,), r"holds model\[0\], a Linear"),
    "a module by default": (lambda x, model=MODEL: model(x), (X,), "holds model, a Linear"),
    "a module by name alone": (
        lambda x, *, model=MODEL: model(x),
        (X,),
        "holds model, a Linear",
    ),
    "an unregistered module": (WithHidden(), (X,), r"holds hidden\[0\], a LayerNorm"),
    "a forward of its own": (
        with_another_forward(),
        (X,),
        "forward, a function that holds forward.self, a LayerNorm",
    ),
    "a hook": (with_a_hook(), (X,), "0.forward_hooks, a function that holds norm, a LayerNorm"),
    "an optimiser": (
        lambda o: o.step(),
        (torch.optim.SGD(MODEL.parameters()),),
        "input 0 is a SGD, and nobody follows",
    ),
    "an object": (lambda o: o.x * 2, (SimpleNamespace(x=X),), "input 0 is a SimpleNamespace"),
    "a tensor for a tuple": (torch.sin, X, "inputs= is a Tensor: give a tuple"),
    "compiled code": (torch.compile(torch.sin, backend="eager"), (X,), "compiled"),
    "compiled code inside": (
        (lambda inner: lambda x: inner(x))(torch.compile(torch.sin, backend="eager")),
        (X,),
        "holds inner, compiled code",
    ),
    "a compiled module": (torch.compile(nn.Linear(4, 4), backend="eager"), (X,), "compiled"),
    "an object that is returned": (lambda x: SimpleNamespace(x=x), (X,), "returns a SimpleNam"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_can_follow_is_refused(name):
    function, inputs, complaint = REFUSED[name]
    with pytest.raises(ValueError, match=complaint):
        prove(function, function, inputs=inputs)


def test_a_captured_tensor_that_is_written_to_is_a_result_and_is_put_back():
    def write(factor):
        def run(x):
            CAPTURED.add_(factor * x)
            return x + 1

        return run

    assert kind_of(write(1), write(1), X)[0] == "identical"
    assert kind_of(write(1), write(2), X)[0] == "another function"
    assert torch.equal(CAPTURED, torch.ones(4))


class Averages:
    """Replaces its tensor at each call."""

    def __init__(self, factor=0.9):
        self.mean = torch.ones(4)
        self.factor = factor

    def __call__(self, x):
        self.mean = self.mean * self.factor + x
        self.seen = x
        return x + 1


def in_a_closure(factor):
    mean = torch.ones(4)

    def run(x):
        nonlocal mean
        mean = mean * factor + x
        return x + 1

    return run


def in_a_list(factor):
    means = [torch.ones(4)]

    def run(x):
        means[0] = means[0] * factor + x
        means.append(x)
        return x + 1

    return run


def as_a_global(factor):
    def run(x):
        global CAPTURED
        CAPTURED = CAPTURED * factor + x
        return x + 1

    return run


@pytest.mark.parametrize("make", [Averages, in_a_closure, in_a_list, as_a_global])
def test_a_captured_tensor_that_is_replaced_is_a_result_and_is_put_back(make):
    before, captured = make(0.9), CAPTURED
    assert kind_of(before, make(0.9), X)[0] == "identical"
    kind, text = kind_of(before, make(0.5), X)
    assert kind == "another function"
    assert "afterwards" in text
    assert CAPTURED is captured
    if make is Averages:
        assert vars(before).keys() == {"mean", "factor"}
        assert torch.equal(before.mean, torch.ones(4))


@pytest.mark.parametrize(
    ("held", "removes"),
    [
        ([torch.ones(4), torch.zeros(4)], list.pop),
        ({"a": torch.ones(4), "b": torch.zeros(4)}, dict.popitem),
        ({"a": torch.ones(4)}, dict.clear),
    ],
    ids=["of a list", "of a dict", "the only one"],
)
def test_a_captured_tensor_that_is_removed_is_a_result_and_is_put_back(held, removes):
    def run(changes):
        def call(x):
            changes(held)
            return x + 1

        return call

    count = len(held)
    assert kind_of(run(removes), run(removes), X)[0] == "identical"
    for both in ((run(removes), run(len)), (run(len), run(removes))):
        kind, text = kind_of(*both, X)
        assert kind == "another function", text
        assert "afterwards" in text
    assert len(held) == count


def test_a_gradient_that_a_captured_parameter_has_is_put_back():
    weight = nn.Parameter(torch.ones(4))
    weight.grad = before = Y.clone()

    def adds(x):
        (weight * x).sum().backward()

    assert kind_of(adds, adds, X)[0] == "identical"
    assert weight.grad is before
    assert torch.equal(before, Y)


@pytest.mark.parametrize("which", [0, 1])
def test_a_module_that_is_left_frozen_is_another_function(which):
    """Whichever of two modules it is."""

    def stays(first, second, x):
        return second(first(x))

    def freezes(first, second, x):
        result = second(first(x))
        (first, second)[which].bias.requires_grad_(False)
        return result

    inputs = nn.Linear(4, 3), nn.Linear(3, 2), X
    assert kind_of(freezes, freezes, *inputs)[0] == "identical"
    kind, text = kind_of(freezes, stays, *inputs)
    assert kind == "another function", text
    assert "parameters that require a gradient afterwards" in text


def test_a_replaced_tensor_is_no_tensor_that_stays():
    kind, text = kind_of(Averages(), lambda x: x + 1, X)
    assert kind == "another function"
    assert "captured mean afterwards: is written to" in text


def test_random_numbers_of_a_captured_generator_are_drawn_again():
    generator = torch.Generator().manual_seed(3)
    start = generator.get_state()

    def noisy(x):
        return x + torch.randn(4, generator=generator)

    def twice(x):
        noisy(x)
        return noisy(x)

    def draws_more(x):
        result = noisy(x)
        torch.randn(4, generator=generator)
        return result

    assert kind_of(noisy, noisy, X)[0] == "identical"
    assert kind_of(twice, noisy, X)[0] == "another function"
    kind, text = kind_of(draws_more, noisy, X)
    assert kind == "another function"
    assert "captured" in text
    assert torch.equal(generator.get_state(), start)


def test_gradients_that_a_model_has_are_added_to():
    def accumulates(model, x):
        model(x).square().mean().backward()

    def overwrites(model, x):
        loss = model(x).square().mean()
        parameters = list(model.parameters())
        for parameter, own in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = own

    model = nn.Linear(4, 2)
    assert kind_of(accumulates, overwrites, model, X)[0] == "identical"
    model(X).sum().backward()
    before = model.weight.grad.clone()
    assert kind_of(accumulates, accumulates, model, X)[0] == "identical"
    kind, text = kind_of(accumulates, overwrites, model, X)
    assert kind == "another function"
    assert "gradient of" in text
    assert torch.equal(model.weight.grad, before)


class Counting(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by
        self.calls = 0

    def forward(self, x):
        self.calls += self.by
        return x + 1


def test_a_counter_of_a_module_is_state():
    module = Counting(1)
    assert kind_of(module, Counting(1), X)[0] == "identical"
    kind, text = kind_of(module, Counting(2), X)
    assert kind == "another function"
    assert "attribute calls afterwards" in text
    assert kind_of(lambda m, x: x + 1, lambda m, x: x + 1, module, X)[0] == "identical"
    assert kind_of(lambda m, x: m(x), lambda m, x: x + 1, module, X)[0] == "another function"


@pytest.mark.parametrize("start", [0, 0.0, (0,), [0.5], {"a": 0}], ids=str)
def test_a_number_that_a_module_holds_is_state_in_any_form(start):
    class Holding(nn.Module):
        def __init__(self, changes):
            super().__init__()
            self.held, self.changes = start, changes

        def forward(self, x):
            if self.changes:
                self.held = {**self.held, "a": 1} if isinstance(start, dict) else start + start
                if isinstance(start, int | float):
                    self.held = start + 0.5
            return x + 1

    assert kind_of(Holding(True), Holding(True), X)[0] == "identical"
    kind, text = kind_of(Holding(True), Holding(False), X)
    assert kind == "another function", text
    assert "attribute held afterwards" in text


def test_counters_of_two_modules_are_two():
    def count(by):
        def call(first, second, x):
            first.calls += by
            return second(x)

        return call

    inputs = Counting(1), Counting(1), X
    assert kind_of(count(1), count(1), *inputs)[0] == "identical"
    kind, text = kind_of(count(1), count(2), *inputs)
    assert (kind, "first attribute calls afterwards" in text) == ("another function", True)


def leave(write):
    def call(x, held, module):
        write(held, module)
        return module(x)

    return call


def nothing(*_):
    return None


WRITES = {
    "a number of a list": lambda held, module: held["list"].__setitem__(0, 3),
    "the last of a list": lambda held, module: held["list"].__setitem__(-1, -0.0),
    "one more": lambda held, module: held["list"].append(2.0),
    "None": lambda held, module: held["list"].append(None),
    "a list in a list": lambda held, module: held["list"].append([]),
    "nothing is left": lambda held, module: held["list"].clear(),
    "a text": lambda held, module: held.update(text="b"),
    "a key": lambda held, module: held.update(more=1),
    "a key less": lambda held, module: held.pop("text"),
    "a list of a module": lambda held, module: module.kept.append(1),
    "a parameter that is frozen": lambda held, module: module.bias.requires_grad_(False),
    "a hook": lambda held, module: module.register_forward_hook(nothing),
    "a hook of a backward": lambda held, module: module.register_full_backward_hook(nothing),
    "a function of its own": lambda held, module: setattr(module, "helper", nothing),
    "an attribute of a parameter": lambda held, module: setattr(module.weight, "tag", "a"),
    "no gradients any more": lambda held, module: torch.set_grad_enabled(False),
    "an attribute of a buffer": lambda held, module: setattr(module.count, "tag", "a"),
    "a hook of a parameter": lambda held, module: module.weight.register_hook(nothing),
    "another dtype by default": lambda held, module: torch.set_default_dtype(torch.float64),
    "autocast": lambda held, module: torch.set_autocast_enabled("cpu", True),
    "autocast of GPUs": lambda held, module: torch.set_autocast_enabled("cuda", True),
    "a dtype of autocast": lambda held, module: torch.set_autocast_dtype("cpu", torch.half),
    "hooks of saved tensors": lambda held, module: saved_tensors_hooks(
        nothing, nothing
    ).__enter__(),
    "a hook of all modules": lambda held, module: register_module_forward_hook(nothing),
    "deterministic algorithms": lambda held, module: torch.use_deterministic_algorithms(True),
    "warnings of these": lambda held, module: torch.use_deterministic_algorithms(
        True, warn_only=True
    ),
    "no memory is filled": lambda held, module: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "products of less precision": lambda held, module: torch.set_float32_matmul_precision("high"),
    "products of GPUs": lambda held, module: setattr(
        torch.backends.cuda.matmul, "fp32_precision", "tf32"
    ),
    "products in bfloat16": lambda held, module: setattr(
        torch.backends.mkldnn.matmul, "fp32_precision", "bf16"
    ),
    "measured kernels": lambda held, module: setattr(torch.backends.cudnn, "benchmark", True),
    "no oneDNN": lambda held, module: setattr(torch.backends.mkldnn, "enabled", False),
    "no flash attention": lambda held, module: torch.backends.cuda.enable_flash_sdp(False),
    "anomalies": lambda held, module: torch.autograd.set_detect_anomaly(True),
    "threads": lambda held, module: torch.set_num_threads(torch.get_num_threads() + 1),
    "rings": lambda held, module: os.environ.update(NCCL_ALGO="Ring"),
}


@pytest.mark.parametrize("write", WRITES)
def test_python_values_that_a_call_leaves_are_results(write):
    module = nn.Linear(4, 3)
    module.kept = []
    module.register_buffer("count", torch.zeros(1))
    inputs = X, {"list": [1, 0.0], "text": "a"}, module
    before = modes_of_torch()
    writes, reads = leave(WRITES[write]), leave(lambda held, module: None)
    assert kind_of(writes, writes, *inputs)[0] == "identical"
    assert kind_of(writes, reads, *inputs)[0] == "another function"
    assert kind_of(reads, writes, *inputs)[0] == "another function"
    assert modes_of_torch() == before


class Answers:
    """An object that has something for every name."""

    def __getattr__(self, name):
        if name.startswith("__deepcopy"):
            raise AttributeError(name)
        return self

    def __call__(self, *given):
        return self


class Buffered(nn.Module):
    def __init__(self, replaces):
        super().__init__()
        self.scale, self.replaces, self.answers = nn.Buffer(torch.ones(4)), replaces, Answers()

    def forward(self, x):
        if self.replaces:
            self.scale = self.scale + 1
        else:
            self.scale.add_(1)
        return x * self.scale


def test_what_changes_no_number_is_no_difference():
    assert kind_of(Buffered(True), Buffered(False), X)[0] == "identical"

    marks = torch._dynamo.mark_dynamic, torch._dynamo.mark_static_address
    for mark in (*marks, torch._dynamo.decorators.mark_unbacked):

        def marked(x, mark=mark):
            mark(x, 0)
            return x * 2

        assert kind_of(marked, lambda x: x * 2, X.clone())[0] == "identical"


LEFT_ON_TENSORS = {
    "requires_grad": lambda x: x.requires_grad_(),
    "a hook": lambda x: x.requires_grad_().register_hook(nothing),
    "an attribute": lambda x: setattr(x, "tag", 3),
    "a list of an attribute": lambda x: x.kept.append(3),
    "an attribute less": lambda x: delattr(x, "kept"),
    "a function": lambda x: setattr(x, "tag", nothing),
}


@pytest.mark.parametrize("left", LEFT_ON_TENSORS)
def test_what_a_call_leaves_on_an_input_is_a_result(left):
    def leaves(x):
        LEFT_ON_TENSORS[left](x)
        return x.detach() * 2

    x = X.clone()
    x.kept = [1]
    plain = lambda x: x.detach() * 2  # noqa: E731
    assert kind_of(leaves, leaves, x)[0] == "identical"
    kind, text = kind_of(leaves, plain, x)
    assert kind == "another function"
    what = "hooks and attributes"
    if left in ("requires_grad", "a hook"):
        what = "requires_grad"  # a hook needs it
    assert f"{what} of input 0 afterwards" in text
    assert kind_of(plain, leaves, x)[0] == "another function"
    assert x.kept == [1]
    assert not x.requires_grad


def gradient_of(model):
    return model.weight.grad.clone()


TENSORS_LEFT = {  # what a step leaves of its gradient, with a factor, and the name of that
    "of a weight": (
        "weight.main_grad",
        lambda model, x, k: setattr(model.weight, "main_grad", k * gradient_of(model)),
    ),
    "of the last parameter, known": (
        "bias.main_grad",
        lambda model, x, k: setattr(model.bias, "main_grad", torch.full((3,), float(k))),
    ),
    "of a buffer": (
        "steps.sums",
        lambda model, x, k: setattr(model.steps, "sums", k * gradient_of(model)),
    ),
    "of a gradient": (
        "gradient of weight.norm",
        lambda model, x, k: setattr(model.weight.grad, "norm", k * gradient_of(model).norm()),
    ),
    "of an input": ("input 1.twice", lambda model, x, k: setattr(x, "twice", k * x)),
    "in a dict": (
        "weight.meta['a'][1]",
        lambda model, x, k: setattr(model.weight, "meta", {"a": [1, k * gradient_of(model)]}),
    ),
    "of an attribute": (
        "weight.kept.own",
        lambda model, x, k: setattr(model.weight.kept, "own", k * gradient_of(model)),
    ),
    "that was there": (
        "weight.kept",
        lambda model, x, k: model.weight.kept.add_(k * gradient_of(model)),
    ),
}


@pytest.mark.parametrize("left", TENSORS_LEFT)
def test_a_tensor_that_is_an_attribute_of_a_tensor_is_a_result(left):
    """As the ``main_grad`` of Megatron."""
    name, leave = TENSORS_LEFT[left]

    def step(k):
        def train(model, x):
            loss = model(x).square().mean()
            loss.backward()
            leave(model, x, k)
            return loss

        return train

    model = nn.Linear(4, 3)
    model.register_buffer("steps", torch.zeros(1))
    model.weight.kept = torch.zeros(3, 4)
    assert kind_of(step(2), step(2), model, X.clone())[0] == "identical"
    kind, text = kind_of(step(2), step(1), model, X.clone())
    assert kind == "another function"
    assert f"first buffer {name} afterwards" in text
    assert kind_of(step(1), lambda model, x: step(1)(model, x), model, X.clone())[0] == "identical"
    assert vars(model.weight).keys() == {"kept"}
    assert not model.weight.kept.any()
    assert not vars(model.weight.kept)


class Cache:
    """What a module holds beside its parameters, as keys of attention."""

    def __init__(self):
        self.keys, self.count, self.parts = None, 0, []


class Slots:
    __slots__ = ("keys",)

    def __init__(self):
        self.keys = None


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.cache, self.slots, self.names = Cache(), Slots(), SimpleNamespace(keys=None)
        self.inner = SimpleNamespace(cache=Cache())
        self.recent, self.array = deque(), np.zeros(2)


LEFT_IN_OBJECTS = {  # what a step leaves in an object that a module holds, with a factor
    "an object": ("cache.keys", lambda m, x, k: setattr(m.cache, "keys", k * x)),
    "slots": ("slots.keys", lambda m, x, k: setattr(m.slots, "keys", k * x)),
    "a namespace": ("names.keys", lambda m, x, k: setattr(m.names, "keys", k * x)),
    "an object of an object": (
        "inner.cache.keys",
        lambda m, x, k: setattr(m.inner.cache, "keys", k * x),
    ),
    "a list of an object": ("cache.parts[0]", lambda m, x, k: m.cache.parts.append(k * x)),
    "a count of an object": ("cache.count", lambda m, x, k: setattr(m.cache, "count", k)),
    "a count of the last": (
        "inner.cache.count",
        lambda m, x, k: setattr(m.inner.cache, "count", k),
    ),
    "a deque": ("recent[0]", lambda m, x, k: m.recent.append(k * x)),
    "an array": ("array", lambda m, x, k: setattr(m, "array", k * np.ones(2))),
    "an array in place": ("array", lambda m, x, k: m.array.__iadd__(k)),
    "an object of a weight": (
        "linear.weight.kept.keys",
        lambda m, x, k: setattr(m.linear.weight, "kept", SimpleNamespace(keys=k * x)),
    ),
}


@pytest.mark.parametrize("left", LEFT_IN_OBJECTS)
def test_what_a_call_leaves_in_an_object_that_a_module_holds_is_a_result(left):
    name, leave = LEFT_IN_OBJECTS[left]

    def step(k):
        def call(module, x):
            leave(module, x, k)
            return module.linear(x)

        return call

    module = Holding()
    assert kind_of(step(2), step(2), module, X.clone())[0] == "identical"
    kind, text = kind_of(step(2), step(1), module, X.clone())
    assert kind == "another function"
    assert f" {name} afterwards" in text
    assert kind_of(lambda m, x: m.linear(x), step(1), module, X.clone())[0] == "another function"
    assert (module.cache.keys, module.cache.count, module.cache.parts) == (None, 0, [])
    assert not module.recent
    assert not module.array.any()


def test_an_object_that_a_weight_has_is_copied_for_each_run():
    module = nn.Linear(4, 3)
    module.weight.meta = SimpleNamespace(total=torch.zeros(3, 4), parts=[torch.zeros(3)])

    def step(k):
        def call(m, x):
            loss = m(x).square().mean()
            loss.backward()
            m.weight.meta.total.add_(k * m.weight.grad)
            return loss

        return call

    assert kind_of(step(1), step(1), module, X)[0] == "identical"
    kind, text = kind_of(step(2), step(1), module, X)
    assert kind == "another function"
    assert "weight.meta.total afterwards" in text
    assert not module.weight.meta.total.any()


RECORDS = np.zeros(3, dtype=[("a", "f4"), ("b", "f8")])
ARRAYS = {
    "long doubles": np.zeros(2, dtype=np.longdouble),
    "a field of records": RECORDS["b"],
    "reversed": np.zeros(4)[::-1],
    "texts": np.array(["a", "b"]),
    "objects": np.array([None, 1], dtype=object),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_are_no_tensors_are_left_alone(name):
    module = nn.Linear(4, 3)
    module.array = ARRAYS[name]
    call = lambda m, x: m(x)  # noqa: E731
    assert kind_of(call, call, module, X)[0] == "identical"


def test_a_module_of_an_object_has_known_numbers():
    """A copy of the whole has a copy of it."""
    module = nn.Linear(4, 3)
    module.helper = SimpleNamespace(other=nn.Linear(4, 3), rows=[0] * 20_000)
    call = lambda m, x: m(x) + m.helper.other(x)  # noqa: E731
    kind, text = kind_of(call, call, module, X)
    assert kind == "identical"
    assert "known" in text or "given numbers" in text
    assert kind_of(call, lambda m, x: m(x), module, X)[0] == "another function"


def test_attributes_of_a_result_are_results():
    def call(k):
        def run(x):
            made = 2 * x
            made.aux = k * x
            return made

        return run

    assert kind_of(call(2), call(2), X)[0] == "identical"
    kind, text = kind_of(call(2), call(3), X)
    assert kind == "another function"
    assert "output 0.aux" in text


@pytest.mark.parametrize(
    "tie",
    [
        lambda model: setattr(model.weight, "owner", model),
        lambda model: setattr(model.weight, "me", model.weight),
        lambda model: (
            setattr(model.weight, "tied", model.bias),
            setattr(model.bias, "tied", model.weight),
        ),
    ],
    ids=["its module", "itself", "each other"],
)
def test_attributes_of_parameters_that_lead_back_to_them(tie):
    model = nn.Linear(4, 3)
    tie(model)
    call = lambda m, x: m(x)  # noqa: E731
    assert kind_of(call, call, model, X)[0] == "identical"
    assert kind_of(call, lambda m, x: 2 * m(x), model, X)[0] == "another function"


def test_attributes_of_a_bare_parameter_are_there_in_a_proof():
    """Its own deepcopy leaves them behind."""
    weight = nn.Parameter(torch.ones(4))
    weight.scale = torch.full((4,), 2.0)
    weight.names = ["a"]
    read = lambda w: w * w.scale * len(w.names)  # noqa: E731
    kind, text = kind_of(read, lambda w: 2 * w, weight)
    assert kind != "another function"
    assert "begin with the given numbers of buffer input 0.scale" in text
    assert kind_of(read, lambda w: 3 * w, weight)[0] == "another function"


def test_hooks_that_differ_in_a_number_alone_are_told():
    def leaves(by):
        def call(module, x):
            module.register_forward_hook(by)
            return x * 2

        return call

    doubles, trebles = (lambda module, given, out: 2 * out), (lambda module, given, out: 3 * out)
    inputs = nn.Linear(4, 3), X
    assert kind_of(leaves(doubles), leaves(doubles), *inputs)[0] == "identical"
    assert kind_of(leaves(doubles), leaves(trebles), *inputs)[0] == "another function"


@pytest.mark.parametrize(
    "values",
    [(1, 2), ("a", "b"), (slice(1), slice(2)), (range(1), range(2)), (len, max), (int, float)],
    ids=str,
)
def test_python_values_that_a_call_returns_are_results(values):
    actual, expected = (lambda x, value=value: (x * 2, value) for value in values)
    assert kind_of(actual, actual, X)[0] == "identical"
    assert kind_of(actual, expected, X)[0] == "another function"


NUMBERS = torch.ones(4)
NUMBERS_PARAMETER = nn.Parameter(torch.ones(4))
NUMBERS_LIST = [torch.ones(4)]
NUMBERS_MODULE = nn.Linear(4, 3)
SETTINGS = types.ModuleType("settings")
SETTINGS.held, SETTINGS.module = torch.ones(4), NUMBERS_MODULE


class Settings:
    held = torch.ones(4)
    module = NUMBERS_MODULE


def backward(by):
    (NUMBERS_PARAMETER * by).sum().backward()
    return NUMBERS


WRITES_TO_HELD = {
    "a global": lambda x, by: NUMBERS.add_(by),
    "zeroed": lambda x, by: NUMBERS.mul_(1 - by),
    "an item of a list": lambda x, by: NUMBERS_LIST[0].add_(by),
    "in a lambda": lambda x, by: (lambda: NUMBERS.add_(by))(),
    "in a comprehension": lambda x, by: [NUMBERS.add_(by) for _ in range(1)],
    "in a generator": lambda x, by: next(NUMBERS.add_(by) for _ in range(1)),
    "two lambdas deep": lambda x, by: (lambda: (lambda: NUMBERS.add_(by))())(),
    "of a class": lambda x, by: Settings.held.add_(by),
    "of a module of Python": lambda x, by: SETTINGS.held.add_(by),
    "a gradient": lambda x, by: backward(by),
}


@pytest.mark.parametrize("write", WRITES_TO_HELD)
def test_known_numbers_written_to_what_a_function_holds_are_results(write):
    chosen = WRITES_TO_HELD[write]

    def writes(by):
        return lambda x: (chosen(x, by), x * 2)[1]

    tensors = [NUMBERS, NUMBERS_LIST[0], Settings.held, SETTINGS.held]
    assert kind_of(writes(0.5), writes(0.5), X)[0] == "identical"
    assert kind_of(writes(0.5), writes(0.25), X)[0] == "another function"
    assert kind_of(writes(0.5), lambda x: x * 2, X)[0] == "another function"
    assert kind_of(lambda x: x * 2, writes(0.5), X)[0] == "another function"
    assert all(torch.equal(tensor, torch.ones(4)) for tensor in tensors)
    assert NUMBERS_PARAMETER.grad is None


def test_what_a_function_holds_is_returned_as_it_has_left_it():
    def writes(x):
        NUMBERS.add_(1)
        return x * 2, NUMBERS, NUMBERS[:2]

    def holds(x):
        return x * 2, NUMBERS + 1, NUMBERS[:2] + 1

    proof = prove(writes, lambda x: (x * 2, NUMBERS, NUMBERS[:2]), inputs=(X,))
    assert (proof.kind, proof.first.result) == ("another function", "output 1")
    assert "output" not in prove(writes, holds, inputs=(X,)).first.result
    assert torch.equal(NUMBERS, torch.ones(4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (lambda value: NUMBERS_MODULE(value))(x),
        lambda x: [NUMBERS_MODULE(value) for value in x[None]],
        lambda x: Settings.module(x),
        lambda x: SETTINGS.module(x),
    ],
    ids=["a lambda", "a comprehension", "a class", "a module of Python"],
)
def test_a_module_that_a_function_reaches_elsewhere_is_refused(function):
    with pytest.raises(ValueError, match=r"(module|MODULE), a Linear, whose numbers"):
        prove(function, function, inputs=(X,))


CUTS = {
    "detach": lambda x: (x, (x * 2).detach()),
    "no_grad": torch.no_grad()(lambda x: (x, x * 2)),
    "a new parameter": lambda x: (x, nn.Parameter(x * 2)),
    "a new leaf": lambda x: (x, (x * 2).detach().requires_grad_()),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_result_that_one_program_cuts_from_autograd_is_unknown(cut):
    x = X.clone().requires_grad_()
    actual, expected = CUTS[cut], lambda x: (x, x * 2)
    assert kind_of(actual, actual, x)[0] == "identical"
    assert kind_of(actual, expected, X)[0] == "identical"  # nothing has a gradient
    for programs, side in (((actual, expected), "actual"), ((expected, actual), "expected")):
        kind, text = kind_of(*programs, x)
        assert kind == "unknown"
        assert f"output 1 are equal, but the {side} program cuts it from autograd" in text


def test_a_loss_is_detached_or_not_where_gradients_are_compared():
    def step(finish):
        def call(model, x):
            loss = model(x).sum()
            loss.backward()
            return finish(loss)

        return call

    steps = step(lambda loss: loss), step(lambda loss: loss.detach())
    assert kind_of(*steps, nn.Linear(4, 3), X)[0] == "identical"


def test_parameters_that_a_module_lists_are_abstract():
    module = nn.LSTM(4, 3)
    proof = prove(module, module, inputs=(torch.ones(2, 4),))
    assert (proof.kind, proof.assumes) == ("identical", ())


def test_known_numbers_of_buffers_and_captured_tensors_are_named():
    class Centered(nn.Module):
        def __init__(self, sign):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.sign = sign

        def forward(self, x):
            return torch.add(x, self.mean, alpha=self.sign)

    text = kind_of(Centered(1), Centered(-1), X)[1]
    assert "assumed: runs begin with the given numbers of buffer mean: others" in text
    text = kind_of(lambda x: x + CAPTURED, lambda x: CAPTURED + x, X)[1]
    assert "assumed: runs begin with the given numbers of captured CAPTURED: others" in text
    graphs = [fx.symbolic_trace(Centered(sign)) for sign in (1, -1)]
    assert "assumed: runs begin with the given numbers of mean: others" in kind_of(*graphs, X)[1]
    assert "the given numbers of" not in kind_of(nn.Linear(4, 2), nn.Linear(4, 2), X)[1]


def test_one_more_random_number_is_seen():
    def draw(count):
        def run(x):
            for _ in range(count):
                torch.rand(2)
            return x + 1

        return run

    assert kind_of(draw(1), draw(1), X)[0] == "identical"
    kind, text = kind_of(draw(1), draw(2), X)
    assert kind == "another function"
    assert "random state of torch.cpu" in text


# --- decisions

DECISIONS = {
    "any": (lambda x: torch.where((x > 1).any(), x * 2, x), lambda x: x * 2),
    "all": (lambda x: torch.where((x > 1).all(), x * 2, x), lambda x: x + 0),
    "a limit that is never met": (lambda x: x.clamp(max=100), lambda x: x + 0),
    "a guard in Python": (
        lambda x: x * 2 if (x.abs() > 1e4).any() else x * 1,
        lambda x: x * 1,
    ),
    "the last of several": (
        lambda x: x * torch.cat([x[:-1], x[-1:] * 2])[x.argmax()],
        lambda x: x * x[x.argmax()],
    ),
    "a sign": (lambda x: (x * x).sqrt(), lambda x: x + 0),
    "a minimum of two": (lambda x: torch.minimum(x[0], x[1]), lambda x: x[0] + 0),
    "two conditions": (
        lambda x: torch.where((x[0] > 0) & (x[1] > 0), x * 2, x),
        lambda x: x + 0,
    ),
    "a median": (lambda x: x[:3].median(), lambda x: torch.maximum(x[0], x[1])),
}


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize("count", [4, 64])
def test_every_decision_goes_both_ways(name, count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    actual, expected = DECISIONS[name]
    kind, text = kind_of(actual, actual, x)
    assert kind == "identical"
    if name == "the last of several" and count == 64:
        assert "what aten.argmax.default chose in 9 orders shows every choice" in text
        return
    assert kind_of(actual, expected, x)[0] == "another function"


@pytest.mark.parametrize("place", [49, 210, 218])
def test_one_comparison_of_two_numbers_does_not_agree_by_chance(place):
    """``y`` is the larger one at these places in the first run and in those of ``ORDERS``."""
    x, y = torch.randn(400), torch.randn(400)
    larger = kind_of(
        lambda x, y: torch.maximum(x[place], y[place]), lambda x, y: y[place] + 0, x, y
    )
    assert larger[0] == "another function"


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", range(4))
def test_roots_of_one_number_at_many_places_do_not_agree_by_chance(place, sign):
    root = kind_of(
        lambda x: (x[place] * x[place]).expand(16).sqrt(), lambda x: sign * x[place].expand(16), X
    )
    assert root[0] == "another function"


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum])
def test_the_larger_of_two_zeros_depends_on_their_order(function):
    """It is 0.0 or -0.0, whichever stands at the first place, or at the second."""
    assert kind_of(function, lambda x, y: function(y, x), X, Y)[0] == "other kernels"


def test_comparisons_of_equal_numbers_are_named_as_an_assumption():
    kind, text = kind_of(lambda x: (x > 0) * x, lambda x: (x >= 0) * x, X)
    assert kind == "identical"
    assert "no two compared numbers are equal (aten.ge.Scalar, aten.gt.Scalar)" in text


# --- memory and code that no dispatch mode sees


def freed(x, is_written):
    y = (x * 2).clone()
    storage = y.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    if is_written:
        y.copy_(x * 2)
    return y.relu()


def test_memory_that_is_freed_and_made_again_is_new():
    plain = torch.UntypedStorage.resize_
    kind, _ = kind_of(lambda x: freed(x, False), lambda x: (x * 2).relu(), X)
    assert kind in ("another function", "unknown")
    assert kind_of(lambda x: freed(x, True), lambda x: (x * 2).relu(), X)[0] == "identical"
    assert torch.UntypedStorage.resize_ is plain


def through_numpy(x):
    y = x.clone()
    y.numpy()[0] = 0
    return y


def as_bits(x):
    y = x.clone()
    y.view(torch.int32)[0] = 1
    return y


def as_half(x):
    y = x.half()
    y.view(torch.bfloat16)[0] = 1
    return y


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (through_numpy, lambda x: x.clone()),
        (as_bits, lambda x: x.clone()),
        (as_half, lambda x: x.half()),
        (lambda x: (x + 1e8) - 1e8, lambda x: x * 1),
    ],
    ids=["numpy", "bits", "another dtype", "rounding leaves nothing"],
)
def test_what_contradicts_the_real_numbers_is_unknown(actual, expected):
    assert kind_of(actual, expected, Y)[0] == "unknown"


def doubled_unseen(x):
    y = x * 2
    y.detach().numpy()[:] *= 3
    return y


def doubled(x):
    return x * 2


def beside_an_infinity(step):
    return lambda x: (step(x), torch.full((2,), float("-inf")))


def with_an_infinity(step):
    return lambda x: torch.cat([step(x), torch.full((2,), float("inf"))])


def as_real_part(step):
    return lambda x: torch.complex(step(x), x)


def as_pairs(step):
    return lambda x: torch.view_as_complex(torch.stack([step(x), x], -1))


@pytest.mark.parametrize(
    "rest", [beside_an_infinity, with_an_infinity, as_real_part, as_pairs], ids=lambda f: f.__name__
)
def test_what_numpy_computes_is_seen_beside_other_numbers(rest):
    """An infinity is no measure of the other results, and a complex number has real parts."""
    assert kind_of(rest(doubled_unseen), rest(doubled), Y)[0] == "unknown"
    assert kind_of(rest(doubled), rest(doubled), Y)[0] == "identical"


def clears_its_input(x):
    y = x * 2
    x.detach().numpy()[:] = 0
    return y


def clears_its_weight(model, x):
    y = model(x)
    model.weight.detach().numpy()[:] = 0
    return y


def test_what_numpy_writes_to_inputs_and_state_is_seen():
    """Elements stay as they were, so only the real numbers show such a write."""
    kind, text = kind_of(clears_its_input, doubled, Y)
    assert kind == "unknown"
    assert "input 0 is written to where no dispatch mode sees it" in text
    assert kind_of(doubled, clears_its_input, Y)[0] == "unknown"
    model = nn.Linear(4, 4)
    kind, text = kind_of(clears_its_weight, lambda model, x: model(x), model, torch.ones(2, 4))
    assert kind == "unknown"
    assert "weight is written to where no dispatch mode sees it" in text


def test_a_write_that_rounds_is_seen_as_rounding():
    """Elements of a field are the same with and without the cast, and real numbers are not."""

    def round_in_place(x):
        x.copy_(x.bfloat16())
        return x * 2

    assert kind_of(round_in_place, doubled, Y)[0] == "rounds elsewhere"


def times_minus_infinity(step):
    return lambda x: step(x) * torch.full_like(x, float("-inf"))


def complex_of(step):
    return lambda x: torch.complex(step(x), torch.zeros_like(x))


def test_elements_that_are_nan_alone_prove_nothing_of_complex_numbers_either():
    one = times_minus_infinity(lambda x: x * x + 1)
    other = times_minus_infinity(lambda x: x * x + 2)
    for sides in ((one, other), (complex_of(one), complex_of(other))):
        kind, text = kind_of(*sides, Y)
        assert kind == "unknown"
        assert "is NaN in exact arithmetic alone" in text


# --- kernels and constants


def test_a_sum_at_another_place_is_not_identical():
    order = torch.tensor([4, 3, 2, 1, 0])
    rows = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    kind, _ = kind_of(lambda x: x[:, order].sum(0)[order], lambda x: x.sum(0), rows)
    assert kind == "other kernels"


def test_a_power_of_two_that_is_no_number_of_the_dtype_is_no_product():
    kind, _ = kind_of(lambda x: x / 2.0**140, lambda x: x * 2.0**-140, X)
    assert kind != "identical"


def test_sums_in_bfloat16_over_doubles_are_not_reordered():
    places = torch.zeros(8, dtype=torch.int64)
    gradient = torch.ones(8, 6, dtype=torch.bfloat16)

    def by_kernel(g):
        return torch.ops.aten.embedding_dense_backward(g, places, 3, -1, False)

    def wide(g):
        return torch.zeros(3, 6).index_add(0, places, g.float()).bfloat16()

    assert kind_of(by_kernel, wide, gradient)[0] not in ("identical", "other kernels", "reordered")


def test_a_constant_in_an_exponent_is_the_number_that_is_written():
    single = float(torch.tensor(0.1))
    x = X.double()
    kind, _ = kind_of(lambda x: (x * 0.1).exp(), lambda x: (x * single).exp(), x)
    assert kind == "rounds elsewhere"


def fill_part(x):
    filled = x.clone()
    filled[:2].fill_(0.1)
    return filled


FILLS = {
    "masked_fill": lambda x: x.masked_fill(X > 2, 0.1),
    "a constant pad": lambda x: F.pad(x, (1, 1), value=0.1),
    "a part in place": fill_part,
}


@pytest.mark.parametrize("name", FILLS)
def test_a_number_that_is_filled_in_is_rounded_to_the_dtype(name):
    fill = FILLS[name]
    narrow = X.bfloat16()
    sides = (lambda x: fill(x).float(), lambda x: fill(x.float()))
    assert kind_of(*sides, narrow)[0] == "rounds elsewhere"
    assert kind_of(fill, fill, narrow)[0] == "identical"


@pytest.mark.parametrize("power", [1.0, 0.25, 0.5])
def test_a_power_of_e_is_none_of_two(power):
    sides = (lambda x: torch.exp(x + power), lambda x: 4**power * torch.exp(x))
    assert kind_of(*sides, X)[0] == "another function"


def test_known_numbers_differ_by_bits():
    functions = [lambda x, n=number: (x + 1, torch.tensor(n)) for number in (0.0, -0.0, torch.nan)]
    for other in functions[1:]:
        assert kind_of(other, functions[0], X)[0] == "another function"


def test_bits_that_differ_are_not_identical_though_the_elements_are_equal():
    """Without a look for weaker kinds nobody knows more."""

    def one_ulp(x):
        y = x * 1
        y.numpy()[0] = torch.nextafter(y[0], torch.tensor(9.0)).item()
        return y

    proof = prove(one_ulp, lambda x: x * 1, inputs=(Y,), at_least="identical")
    assert proof.kind == "unknown"
    assert proof.reason == "not identical: the bits of output 0 differ"


def zero_by_numpy(tensor):
    tensor.detach().numpy()[...] = 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("state", ["an input", "a parameter"])
def test_a_write_to_state_that_no_dispatch_mode_sees_is_unknown(state, when):
    def step(x, linear, writes):
        written = x if state == "an input" else linear.weight
        if writes and when == "before":
            zero_by_numpy(written)
        y = linear(x).sum() * 0
        if writes and when == "after":
            zero_by_numpy(written)
        return y

    kind, text = kind_of(
        lambda x, linear: step(x, linear, True),
        lambda x, linear: step(x, linear, False),
        Y.clone(),
        nn.Linear(4, 2),
    )
    assert kind == "unknown", text
    assert "is written to where no dispatch mode sees it, as NumPy does" in text


def test_a_write_that_leaves_the_numbers_is_no_unseen_one():
    def step(x):
        x.mul_(3).div_(3)
        return x * 2

    assert kind_of(step, step, Y.clone())[0] == "identical"


def by_five_percent(x, factor):
    y = x * 2
    numbers = y.numpy()
    numbers *= factor
    return y


ROUNDED = {
    "to whole numbers": (lambda x: (x + 12582912.0) - 12582912.0, 10),
    "to a scale of eight bits": (lambda x: ((x / 0.1 + 12582912.0) - 12582912.0) * 0.1, 1),
    "to bfloat16": (lambda x: x * 65537 - (x * 65537 - x), 1),
    "then relu": (lambda x: ((x + 12582912.0) - 12582912.0).relu(), 10),
    "then softmax": (lambda x: ((x + 1572864.0) - 1572864.0).softmax(-1), 1),
    "by NumPy": (lambda x: by_five_percent(x, 1.05) / 2, 1),
}
PLAIN = {"then relu": torch.relu, "then softmax": lambda x: x.softmax(-1)}


@pytest.mark.parametrize("how", ROUNDED)
def test_digits_that_one_program_alone_loses_are_no_rounding(how):
    function, scale = ROUNDED[how]
    x = scale * torch.tensor([[0.31, -1.27, 0.77, 2.03], [1.44, -0.66, 0.12, -2.39]])
    kind, text = kind_of(function, PLAIN.get(how, lambda x: x * 1), x)
    assert kind == "unknown", text
    assert "the actual program alone loses digits of output 0" in text


def test_digits_that_both_programs_lose_are_rounding():
    x = torch.tensor([400.3, 399.1, 401.7, 400.9, 398.2])
    by_sum = lambda x: (x * x).sum() / 5 - (x.sum() / 5) ** 2  # noqa: E731
    by_mean = lambda x: (x.flip(0) ** 2).mean() - x.flip(0).mean() ** 2  # noqa: E731
    kind, text = kind_of(by_sum, by_mean, x)
    assert kind == "reordered", text


def halved(x):
    while x.abs().max() > 1:
        x = x / 2
    return x


def root(x):
    y = x * 0 + 1
    while ((y * y - x).abs() > 1e-4).any():
        y = 0.5 * (y + x / y)
    return y


@pytest.mark.parametrize("loop", [halved, root])
def test_a_loop_that_only_numbers_end_is_unknown(loop, monkeypatch):
    monkeypatch.setattr(mode, "_MOST_ANSWERS", 100)
    monkeypatch.setattr(mode, "_MOST_SECONDS", 0.0)
    kind, text = kind_of(loop, lambda x: loop(x), Y.abs())
    assert kind == "unknown", text
    assert "the end of a loop depends on numbers" in text


@pytest.mark.parametrize("most", [1000, 5])
def test_a_loop_that_asks_of_many_elements_ends(most, monkeypatch):
    """Also if it gets more equal answers than an endless one has to: it takes no time."""
    monkeypatch.setattr(mode, "_MOST_ANSWERS", most)

    def count(x):
        total = 0
        for each in x.unbind():
            if each > 0:
                total = total + each
        return total * torch.ones(())

    assert kind_of(count, lambda x: count(x), torch.linspace(-1, 2, 12))[0] != "unknown"


# --- operators of users


@torch.library.custom_op("gt_proofs::keywords", mutates_args=())
def keywords(x: torch.Tensor, *, a: float = 0.0, b: float = 0.0) -> torch.Tensor:
    return x * a + x.cos() * b


@torch.library.custom_op("gt_proofs::lists", mutates_args=())
def lists(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    return a[0] + b[0]


for operator in (keywords, lists):
    operator.register_fake(lambda x, *_, **__: torch.empty_like(x[0] if isinstance(x, list) else x))


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (lambda x, y: keywords(x, a=1.0), lambda x, y: keywords(x, b=1.0)),
        (lambda x, y: lists([x, y], [x]), lambda x, y: lists([x], [y, x])),
    ],
    ids=["names of keywords", "lists"],
)
def test_arguments_of_opaque_operators_keep_their_names_and_lists(actual, expected):
    assert kind_of(actual, actual, X, Y)[0] == "identical"
    assert kind_of(actual, expected, X, Y)[0] == "unknown"


def test_a_meaning_serves_an_operator_without_a_kernel():
    """So graphs of another device are judged here."""
    library = torch.library.Library("gt_proofs_far", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    twice = torch.ops.gt_proofs_far.twice
    with meaning("gt_proofs_far::twice", lambda x: x + x):
        assert kind_of(lambda x: twice(x), lambda x: x + x, X)[0] == "identical"
        assert kind_of(lambda x: twice(x), lambda x: x + 1, X)[0] == "another function"
    del library


def scanned(x):
    return scan(lambda carry, row: (carry + row, carry * 1), torch.zeros(4), x)[1]


def test_a_scan_is_seen_through():
    rows = torch.randn(3, 4)
    assert kind_of(scanned, scanned, rows)[0] == "identical"
    assert kind_of(scanned, lambda x: x.cumsum(0) - x, rows)[0] == "reordered"
    assert kind_of(scanned, lambda x: x.cumsum(0), rows)[0] == "another function"


def quantised(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


def test_quantised_numbers_are_unknown_by_name():
    """On whichever side they are."""
    for sides in ((quantised, torch.clone), (torch.clone, quantised)):
        kind, text = kind_of(*sides, X)
        assert kind == "unknown"
        assert "nobody knows what aten.dequantize.self, aten.quantize_per_tensor.default" in text
    given = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    kind, text = kind_of(lambda x, q: x + q.dequantize(), lambda x, q: x, X, given)
    assert kind == "unknown"
    assert "a result or an input of torch.qint8" in text


def test_attention_that_is_compiled_inside_is_seen_through():
    """Dynamo refuses a dispatch mode, and would skip the frame in later tests, too."""
    q = torch.randn(1, 2, 4, 8)

    def attend(q):
        return flex_attention(q, q, q)

    assert kind_of(attend, attend, q)[0] == "identical"
    assert kind_of(lambda q: flex_attention(q, q, 2 * q), attend, q)[0] == "another function"
    assert any("flex_attention" in str(node.target) for node in make_fx(attend)(q).graph.nodes)


def overflows(x):
    if bool((x > 1e6).any()):
        raise RuntimeError("overflow")
    return x * 2


def test_an_error_of_other_numbers_alone_is_no_error():
    proof = prove(overflows, overflows, inputs=(X,))
    assert proof.kind == "unknown"
    assert "the function runs on real numbers alone (RuntimeError: overflow)" in proof.reason


@pytest.mark.second_tier
def test_flex_attention_is_seen_through():
    """Without a scale of two in the exponent it is what the other attention computes."""
    qkv = [torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def flex(q, k, v):
        return flex_attention(q, k, v)

    def doubled(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda score, *_: score * 2)

    plain, whole, other = (
        make_fx(function)(*qkv)
        for function in (nn.functional.scaled_dot_product_attention, flex, doubled)
    )
    assert prove(whole, copy.deepcopy(whole)).kind == "identical"
    assert prove(whole, plain).is_at_least("rounds elsewhere")
    assert prove(other, whole).kind == "another function"


# --- seeds


def scaled_by_python(x):
    return x * random.random()


def scaled_by_numpy(x):
    return x * float(np.random.rand())


@pytest.mark.parametrize("seed", [0, 1, 42])
@pytest.mark.parametrize(
    ("seeds", "draws"),
    [
        (torch.manual_seed, F.dropout),
        (random.seed, scaled_by_python),
        (np.random.seed, scaled_by_numpy),
    ],
    ids=["torch", "python", "numpy"],
)
def test_a_program_that_seeds_is_another_function(seeds, draws, seed):
    """Whatever its seed is, and from whatever state the test begins."""

    def seeded(x):
        seeds(seed)
        return draws(x)

    def in_a_fork(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return F.dropout(x)

    seeds(seed)
    assert kind_of(seeded, draws, X)[0] == "another function"
    if draws is F.dropout:
        assert kind_of(in_a_fork, draws, X)[0] == "another function"


# --- graphs and functions together


def test_a_graph_and_the_function_that_it_was_traced_from_are_one():
    def function(x, y):
        return torch.sin(x) * y, {"sum": (x + y).sum()}

    graph = torch.fx.experimental.proxy_tensor.make_fx(function)(X, Y)
    assert kind_of(graph, function, X, Y)[0] == "identical"
    assert kind_of(graph, lambda x, y: (torch.cos(x) * y, {"sum": (x + y).sum()}), X, Y)[0] == (
        "another function"
    )


def test_clipping_against_itself():
    def step(model, x):
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    assert kind_of(step, step, nn.Linear(4, 3), torch.ones(2, 4))[0] == "identical"


def test_a_module_that_is_left_in_eval_is_another_function():
    def stays(model, x):
        return model(x)

    def switches(model, x):
        result = model(x)
        model[0].eval()
        return result

    inputs = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    assert prove(stays, stays, inputs=inputs).kind == "identical"
    proof = prove(switches, stays, inputs=inputs)
    assert proof.kind == "another function"
    assert proof.first.result == "training modes afterwards"
