"""Runs of a graph from one start, whatever has happened since."""

from __future__ import annotations

import torch

from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal
from pytest_gtrainer.bisect import flat_inputs, local_run
from tests.numerics.test_bisect import BATCH, Net, traced_net


def by_name(values):
    return {key.name: value for key, value in values.items()}


def test_a_run_starts_where_it_was_made():
    """Inputs that are written to and random numbers that are drawn meanwhile are nothing to it; its own go nowhere."""
    gm, model = traced_net().gm, Net()
    flat = flat_inputs((model, *BATCH))
    run = local_run(flat)
    first = by_name(run(gm))
    assert {"loss", "scale", "steps afterwards"} <= first.keys()
    state = torch.get_rng_state()
    assert_bitwise_equal(by_name(run(gm)), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.steps == 0
    torch.rand(1)
    with torch.no_grad():
        model.scale.mul_(2)
    assert_bitwise_equal(by_name(run(gm)), first)
    assert_bitwise_different(by_name(local_run(flat)(gm)), first, what="from another start")
