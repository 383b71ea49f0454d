"""Shared by the parity suite: train twice, compare layouts, then bits."""

import dataclasses
import math

import pytest
import torch

from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_same_layout,
    facts,
    train_graph,
)
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.tracing.model import ModelState, local


@pytest.fixture
def check_parity():
    """``check_parity(config)``: the rewritten graph trains as eager FSDP2, bit for bit; returns its
    run.

    Compared are loss, gradients, weights, optimiser state and buffers of every step, on every
    rank, after the place of every parameter in every bucket.
    """

    def check(config):
        eager, graph = EagerRun(config), GraphRun(config)
        _check(eager, graph)
        return graph

    return check


def _check(eager, graph):
    """Train both; returns the record that both have."""
    expected, actual = eager.run(), graph.run()
    assert_same_layout(graph.layout(), eager.layout())
    assert_bitwise_equal(actual, expected)
    assert_trains(expected)
    return expected


def assert_trains(record):
    """Assert that a run trains: no NaN among the losses, and no two steps with the same loss."""
    losses = [tensor.item() for key, tensor in record.items() if key.phase == "loss"]
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == len(losses) > 1


@pytest.fixture
def check_parity_and_twin():
    """Like ``check_parity``, and the twin that must differ: the same trace and start, packed in the
    order it runs (L5).

    Returns the layout's complaint about the twin.
    """

    def check(config):
        eager, graph = EagerRun(config), GraphRun(config)
        twin, state = graph.rewritten(payload_order="execution"), ModelState.of(graph.model).tensors
        start = [local(tensor).detach().clone() for tensor in state]
        expected = _check(eager, graph)
        for tensor, first in zip(state, start, strict=True):
            local(tensor).detach().copy_(first)
        assert_bitwise_different(twin.run(), expected)
        with pytest.raises(AssertionError, match="bucket layouts differ") as failure:
            assert_same_layout(twin.layout(), eager.layout())
        return str(failure.value)

    return check


@pytest.fixture
def check_parity_and_control():
    """Like ``check_parity``, and gradients of the first step differ from eager's if the graph
    reduces them in bf16.
    """

    def check(config):
        eager, graph = EagerRun(config), GraphRun(config)
        expected = _check(eager, graph)
        policy = dataclasses.replace(config.mp_policy, reduce_dtype=torch.bfloat16)
        control = train_graph(dataclasses.replace(config, steps=1, mp_policy=policy))
        gradients = {key: tensor for key, tensor in control.items() if key.phase == "gradient"}
        assert_bitwise_different(
            gradients, {key: tensor for key, tensor in expected.items() if key in gradients}
        )
        return graph

    return check


@pytest.fixture
def pin(gt_golden, gt_world):
    """``pin(traced)``: compare graph and schedule with their goldens, on the device that these were
    made on.

    Attention traces to another operator on a GPU, so there the golden is counted as not judged.
    """

    def check(traced):
        if gt_world.device == "cpu":
            gt_golden.check(traced)
            gt_golden.check(traced, "schedule", view="schedule")
        else:
            facts.emit("golden", outcome=f"not judged on {gt_world.device}")

    return check
