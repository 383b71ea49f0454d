"""Tests that ``test_repeats.py`` repeats."""

import itertools

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer import apply_graph_passes, assert_bitwise_equal, trace_step

COUNT = itertools.count()
SETUPS = []


@pytest.fixture
def each():
    SETUPS.append("each")
    yield
    SETUPS.append("end")


@pytest.fixture(scope="module")
def once():
    SETUPS.append("once")


def noise(x):
    return x + next(COUNT)


@pytest.mark.parametrize("case", ["a", "b"])
def test_noise(case, each, once):
    total = noise(torch.ones(2) * 2).sum()
    assert_bitwise_equal(total, total.clone(), what="sum")


def test_random():
    x = torch.rand(3)
    assert_bitwise_equal(x, x.clone(), what="random")


def test_graph():
    """Trace under the observer, too."""

    def step(model, x):
        y = model(x)
        return (y.sin() if next(COUNT) % 2 else y.cos()).sum()

    traced = trace_step(torch.nn.Linear(2, 2), step, (torch.ones(2, 2),))
    apply_graph_passes(traced.gm, traced.example_inputs, [lambda gm: gm])


@pytest.mark.gt_world("ranks", size=2)
def test_ranks(each, once):
    assert SETUPS.count("once") <= 2  # once more for the observed repetitions
    assert SETUPS.count("each") == SETUPS.count("end") + 1
    x = torch.ones(2) * 3
    if dist.get_rank() == 1:
        x = noise(x * 2 / 2 + 0)
    dist.all_reduce(x)
    assert_bitwise_equal(x, x.clone(), what="reduced")


def test_setups(each, once):
    assert SETUPS.count("each") == SETUPS.count("end") + 1


def test_flaky():
    assert next(COUNT) % 2 == 0
