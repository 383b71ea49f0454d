"""Dynamo's graph is proven against the model that it is of: state is looked up by its FQN."""

import pytest
import torch
from torch import nn

from pytest_gtrainer import AnotherFunction, assert_same_function, gt_compile

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
    with pytest.raises(ValueError, match=r"'gradient\.output_0', which a call of Model with"):
        assert_same_function(record.joint, model, inputs=(TOKENS,))
    with pytest.raises(ValueError, match=r"input tokens is a tensor of torch\.float32"):
        assert_same_function(record.dynamo, model, inputs=(TOKENS.float(),))
    with pytest.raises(ValueError, match=r"Model cannot be called with inputs=: .*'tokens'"):
        assert_same_function(record.dynamo, model, inputs=())
    with pytest.raises(ValueError, match=r"which a call of Linear with inputs= does not have"):
        assert_same_function(record.dynamo, nn.Linear(4, 4), inputs=(TOKENS,))
