"""Dynamo's graph is proven against the model that it is of: state is looked up by its FQN."""

import pytest
import torch
from torch import nn

from pytest_gtrainer import AnotherFunction, assert_same_function, gt_compile
from pytest_gtrainer.proofs.state import copy_of

pytestmark = pytest.mark.second_tier


class Model(nn.Module):
    """Parameters, buffers that a step writes to, a tensor in an attribute; no argument is self."""

    def __init__(this):
        super().__init__()
        this.embed = nn.Embedding(7, 4)
        this.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        this.scale = torch.full((4,), 2.0)

    def forward(this, tokens, factor=None, more=None):
        # Arguments are used in another order than they come in.
        h = this.layers(this.embed(tokens) if more is None else more["bias"] + this.embed(tokens))
        return h * this.scale if factor is None else {"b": factor * h, "a": h}


TOKENS = torch.tensor([0, 3, 6, 1, 1])


def graph_of(function, *inputs, **options):
    with gt_compile() as record:
        torch.compile(function, **options)(*inputs)
    return record.dynamo


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("dynamic", [False, True])
def test_parameters_buffers_and_attributes_are_found(model: Model, dynamic: bool):
    graph = graph_of(model, TOKENS, dynamic=dynamic)
    for sides in (graph, model), (model, graph):
        proof = assert_same_function(*sides, inputs=(TOKENS,), at_least="identical")
        assert proof.compared == 5  # the output, three buffers, and the state of the generator


def test_arguments_go_by_their_names(model: Model):
    more = {"bias": torch.randn(4)}
    factor = torch.randn(4)
    graph = graph_of(model, TOKENS, factor, more)
    assert_same_function(graph, model, inputs=(TOKENS, factor, more), at_least="identical")


def test_the_model_may_be_an_argument_of_what_was_compiled(model: Model):
    def loss(net, tokens):
        return net(tokens).square().sum()

    graph = graph_of(loss, model, TOKENS)
    assert_same_function(graph, loss, inputs=(model, TOKENS), at_least="identical")


def test_a_graph_with_a_mistake_is_another_function(model: Model):
    graph = graph_of(model, TOKENS)
    mul = graph.graph.output_node().all_input_nodes[0]
    mul.args = (mul.args[0], 3.0)
    graph.recompile()
    with pytest.raises(AnotherFunction) as failure:
        assert_same_function(graph, model, inputs=(TOKENS,))
    assert "3/2 times what is expected" in str(failure.value)
    assert "begins at node mul" in str(failure.value)


def test_another_stage_and_inputs_of_another_kind_are_refused(model: Model):
    with gt_compile() as record:
        torch.compile(model)(TOKENS).sum().backward()
    with pytest.raises(ValueError, match=r"input tokens is a tensor of torch\.float32"):
        assert_same_function(record.dynamo, model, inputs=(TOKENS.float(),))
    with pytest.raises(ValueError, match=r"Model cannot be called with inputs=: .*'tokens'"):
        assert_same_function(record.dynamo, model, inputs=())
    with pytest.raises(ValueError, match=r"which a call of Linear with inputs= does not have"):
        assert_same_function(record.dynamo, nn.Linear(4, 4), inputs=(TOKENS,))


class Returning(nn.Module):
    """Returns what ``function`` makes of the module, its input and a hidden value."""

    def __init__(self, function):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.function, self.calls = function, 0

    def forward(self, x):
        self.calls += 1
        return self.function(self, x, self.l(x))


ROWS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x, h: (h, h * 2, h),
        lambda self, x, h: (x, h, {"rows": x.shape[0], "none": None}),
        lambda self, x, h: [h, self.l.weight, self.l.bias],
        lambda self, x, h: (h, h.float(), x.contiguous(), self.l.weight.float()),
        lambda self, x, h: (nn.functional.dropout(x, training=False), h),
    ],
    ids=["twice", "an input", "parameters", "casts of nothing", "no dropout"],
)
def test_what_is_given_again_and_counters_are_of_the_code_around_the_graph(function):
    model = Returning(function)
    graph = graph_of(model, ROWS)
    assert_same_function(graph, model, inputs=(ROWS,), at_least="identical")
    linear = graph.graph.find_nodes(op="call_function", target=torch.nn.functional.linear)[0]
    x, weight, _ = linear.args
    linear.args = (x, weight)
    with pytest.raises(AnotherFunction):
        assert_same_function(graph, model, inputs=(ROWS,))


def test_a_tensor_that_is_kept_in_an_attribute_is_refused():
    def keep(self, x, h):
        self.cache = h
        return h * 2

    model = Returning(keep)
    graph = graph_of(model, ROWS)
    with pytest.raises(ValueError, match="the call puts another tensor into cache, which Dynamo"):
        assert_same_function(graph, model, inputs=(ROWS,))


@pytest.mark.parametrize(
    "model",
    [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))],
    ids=["linear", "sequential"],
)
def test_modules_of_torch_are_compiled_in_a_wrapper(model):
    model = model()
    graph = graph_of(model, ROWS)
    assert_same_function(graph, model, inputs=(ROWS,), at_least="identical")


def test_a_module_may_be_given_the_state_as_the_graph_is():
    class Functional(nn.Module):
        def forward(self, w, b, x):
            return (nn.functional.linear(x, w, b),)

    model = nn.Linear(4, 4)
    inputs = (model.weight, model.bias, ROWS)
    graph = graph_of(model, ROWS)
    assert_same_function(graph, Functional(), inputs=inputs, at_least="identical")


class Scaled(nn.Module):
    """A call has as many inputs as the graph, which takes the weight and not the second one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x, other=None):
        return x * self.weight


@pytest.mark.parametrize("other", [1e-5, torch.ones(4)], ids=["number", "tensor"])
def test_an_input_that_the_graph_does_not_take(other):
    model = Scaled()
    graph = graph_of(model, ROWS, other)
    assert_same_function(graph, model, inputs=(ROWS, other), at_least="identical")


def test_of_two_models_each_has_its_own_parameters():
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def distil(teacher, student, x):
        return (teacher(x) - student(x)).square().mean()

    def both(models, x):
        return models[0](x) * 2 - models[1](x)

    def second(teacher, student, x):
        return student(x)

    inputs = (*models, ROWS)
    assert_same_function(graph_of(distil, *inputs), distil, inputs=inputs)
    assert_same_function(graph_of(both, models, ROWS), both, inputs=(models, ROWS))
    with pytest.raises(ValueError, match="takes 'weight', and 2 models of the call have that"):
        assert_same_function(graph_of(second, *inputs), second, inputs=inputs)


SCALE = torch.full((4,), 3.0)


def test_a_tensor_of_a_module_of_python_is_found():
    model = Returning(lambda self, x, h: h * SCALE)
    graph = graph_of(model, ROWS)
    assert_same_function(graph, model, inputs=(ROWS,), at_least="identical")


@pytest.mark.parametrize("stage", ["forward", "joint"])
def test_graphs_of_later_stages_are_refused(stage):
    model = nn.Linear(4, 4)
    with gt_compile() as record:
        torch.compile(model)(ROWS).sum().backward()
    with pytest.raises(ValueError, match=f"the graph is that of the stage '{stage}', which also"):
        assert_same_function(getattr(record, stage), model, inputs=(ROWS,))


def test_a_graph_of_another_call_has_other_results(model: Model):
    graph = graph_of(model, TOKENS)
    with pytest.raises(AnotherFunction, match="first output 0"):
        assert_same_function(graph, model, inputs=(TOKENS, torch.randn(4)))


class OfOneName(nn.Module):
    """A submodule and a buffer that have the names of arguments."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.register_buffer("bias", torch.randn(4))

    def forward(self, embed, bias):
        return self.embed(embed) * self.bias + bias


def test_an_argument_may_have_the_name_of_a_submodule_or_buffer():
    model, bias = OfOneName(), torch.randn(4)
    graph = graph_of(model, ROWS, bias)
    assert_same_function(graph, model, inputs=(ROWS, bias), at_least="identical")


def test_a_model_that_keeps_a_result_of_a_run_is_copied(model: Model):
    """``deepcopy`` refuses what autograd has computed."""
    model.cache = model.other = model(TOKENS)
    again, _ = copy_of([model, TOKENS])
    assert again.cache is again.other
    assert torch.equal(again.cache, model.cache)
