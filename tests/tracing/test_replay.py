"""Running the traced step on the live model."""

import copy

import pytest
import torch
from torch import nn

from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, trace_step


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_replay_equals_eager_and_adds_to_gradients(net, inputs, train_step):
    """A9: a second replay adds to what is there, as a second backward does."""
    traced, eager = trace_step(net, train_step, inputs), copy.deepcopy(net)
    for _ in range(2):
        loss = traced.replay(net, *inputs)
        expected = train_step(eager, *inputs)
        expected.backward()
    assert torch.equal(loss, expected.detach())
    assert_bitwise_equal(gradients(net), gradients(eager))
    assert torch.equal(net.seen, eager.seen)


def test_replay_on_other_inputs_differs(net, inputs, train_step):
    """The twin: the graph computes from its inputs, nothing is baked in."""
    traced, other = trace_step(net, train_step, inputs), copy.deepcopy(net)
    traced.replay(net, *inputs)
    traced.replay(other, inputs[0] + 1, inputs[1])
    assert_bitwise_different(gradients(net), gradients(other))


def test_replay_builds_no_autograd_graph(net, inputs, train_step):
    """A8."""
    traced = trace_step(net, train_step, inputs)
    assert not traced.replay(net, *inputs).requires_grad
    assert not any(gradient.requires_grad for gradient in gradients(net).values())


def test_a_model_with_other_names_is_refused(net, inputs, train_step):
    """A8: says what is missing and what is new."""
    traced = trace_step(net, train_step, inputs)
    net.tail = net.head
    del net.head
    with pytest.raises(ValueError, match=r"missing \['head.weight'\], unexpected \['tail.weight'\]"):
        traced.replay(net, *inputs)


def test_an_unused_parameter_keeps_no_gradient(inputs, train_step):
    """A9: None is skipped."""
    model = nn.Linear(8, 4)
    model.unused = nn.Parameter(torch.ones(3))
    traced = trace_step(model, train_step, inputs)
    traced.replay(model, *inputs)
    assert model.unused.grad is None
    assert model.weight.grad is not None
