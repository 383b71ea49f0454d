"""The rewritten step: its graph is pinned, and its gradients are those of the step without our
pass, bit for bit.
"""

import pytest
import torch
from acme.model import Model, step
from acme.passes import sum_and_divide_pass

from pytest_gtrainer import (
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    bind_options,
    construct_default_graph_passes,
    data_parallel,
    trace_step,
)


@pytest.fixture
def model(gt_mesh):
    return data_parallel(Model(), gt_mesh)


@pytest.fixture
def traced(model, gt_world):
    return trace_step(model, step, batch(gt_world.rank))


@pytest.fixture
def divide_first(pytestconfig):
    return pytestconfig.getoption("with_bug")


def batch(rank):
    tokens = torch.randint(0, 48, (2, 2, 7), generator=torch.Generator().manual_seed(rank))
    return tokens[0], tokens[1]


def rewritten(traced, *ours):
    """The step after pytest-gtrainer's passes, and ours behind them."""
    passes = construct_default_graph_passes(n_layers=2, extra={"concretize": list(ours)})
    return traced.with_graph(apply_graph_passes(traced.gm, traced.example_inputs, passes))


def gradients(step, model, inputs):
    model.zero_grad()
    loss = step.replay(model, *inputs)
    return {
        "loss": loss,
        **{name: parameter.grad.to_local() for name, parameter in model.named_parameters()},
    }


@pytest.mark.gt_world("fake", size=8)
def test_the_graph(traced, divide_first, gt_golden):
    ours = bind_options(sum_and_divide_pass, divide_first=divide_first)
    gt_golden.check(rewritten(traced, ours))


@pytest.mark.gt_world("ranks", size=3)
def test_sums_divided_afterwards_are_averages(traced, model, divide_first, gt_world):
    ours = bind_options(sum_and_divide_pass, divide_first=divide_first)
    inputs = batch(gt_world.rank)
    averages = gradients(rewritten(traced), model, inputs)
    assert_bitwise_equal(
        gradients(rewritten(traced, ours), model, inputs), averages, what="sum_and_divide_pass"
    )


@pytest.mark.gt_world("ranks", size=3)
def test_sums_divided_first_are_not(traced, model, gt_world):
    """The control: the test above can fail."""
    ours = bind_options(sum_and_divide_pass, divide_first=True)
    inputs = batch(gt_world.rank)
    averages = gradients(rewritten(traced), model, inputs)
    assert_bitwise_different(gradients(rewritten(traced, ours), model, inputs), averages)
