"""Shared by the parity suite: train twice, compare layouts, then bits."""

import math

import pytest

from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, assert_same_layout, facts
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun


@pytest.fixture
def check_parity():
    """``check_parity(config)``: the rewritten graph trains as eager FSDP2, bit for bit; returns its run.

    Compared are loss, gradients, weights, optimiser state and buffers of every step, on every
    rank, after the place of every parameter in every bucket.
    """

    def check(config):
        eager, graph = EagerRun(config), GraphRun(config)
        expected, actual = eager.run(), graph.run()
        assert_same_layout(graph.layout(), eager.layout())
        assert_bitwise_equal(actual, expected)
        assert_trains(expected)
        return graph

    return check


def assert_trains(record):
    """What was compared is a run: no NaN among the losses, and no two steps with the same one."""
    losses = [tensor.item() for key, tensor in record.items() if key.phase == "loss"]
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == len(losses) > 1


@pytest.fixture
def check_execution_order_differs():
    """The twin that must differ: the same graph, packed in the order it runs (L5); returns the layout's complaint."""

    def check(config):
        eager, graph = EagerRun(config), GraphRun(config, payload_order="execution")
        expected, actual = eager.run(), graph.run()
        assert_bitwise_different(actual, expected)
        with pytest.raises(AssertionError, match="bucket layouts differ") as failure:
            assert_same_layout(graph.layout(), eager.layout())
        return str(failure.value)

    return check


@pytest.fixture
def pin(gt_golden, gt_world):
    """``pin(traced)``: compare graph and schedule with their goldens, on the device that these were made on.

    Attention traces to another operator on a GPU, so there the golden is counted as not judged.
    """

    def check(traced):
        if gt_world.device == "cpu":
            gt_golden.check(traced)
            gt_golden.check(traced, "schedule", view="schedule")
        else:
            facts.emit("golden", outcome=f"not judged on {gt_world.device}")

    return check
