"""Stamped layers: a trace of four of many identical layers is the full trace, or it says why it is one."""

import random
import re

import pytest
import torch

from fixtures.repeated import REFUSED, STAMPED, WIDTH
from pytest_gtrainer import trace_step
from pytest_gtrainer.tracing.stamping.verdict import first_difference


def step(model, x):
    return model(x).sum()


def traced_both_ways(build, step=step):
    """The same model traced in full and stamped, after one that fills caches of torch."""
    inputs = (torch.ones(4, WIDTH),)
    torch.manual_seed(0)
    model = build()
    stamped = trace_step(model, step, inputs, repeat_layers="auto")
    random.seed(0)
    torch.manual_seed(0)
    full = trace_step(build(), step, inputs)
    return full, stamped


@pytest.mark.parametrize("name", STAMPED)
def test_what_is_proven_alike_is_stamped_and_equal_node_by_node(name):
    full, stamped = traced_both_ways(STAMPED[name])
    assert stamped.repeated.stamped, stamped.repeated.full
    assert not stamped.repeated.full
    assert first_difference(full.gm.graph, stamped.gm.graph) is None
    assert (full.parameter_fqns, full.buffer_fqns) == (stamped.parameter_fqns, stamped.buffer_fqns)
    assert full.trainable_fqns == stamped.trainable_fqns


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_is_traced_in_full_and_says_why(name):
    build, reason = REFUSED[name]
    full, stamped = traced_both_ways(build)
    assert not stamped.repeated.stamped
    reasons = [layers.reason for layers in stamped.repeated.full]
    assert any(re.search(reason, told) for told in reasons), reasons
    assert first_difference(full.gm.graph, stamped.gm.graph) is None
