"""Tests that ``test_changes.py`` runs twice: with VARIANT=now a graph, a pass, a layout's order and
numbers are others.
"""

import os

import pytest
import torch
from torch import nn

from pytest_gtrainer import (
    Record,
    apply_graph_passes,
    assert_bitwise_equal,
    construct_default_graph_passes,
    data_parallel,
    trace_step,
)

NOW = os.environ.get("VARIANT") == "now"


class Net(nn.Module):
    def __init__(self, changed):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 8)
        self.changed = changed

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x.cos() if self.changed else x.sin()
        return self.lm_head(self.norm(x)).sum()


def trace(changed, mesh=None):
    model = Net(changed) if mesh is None else data_parallel(Net(changed), mesh)
    return trace_step(model, lambda m, x: m(x), (torch.zeros(2, 8),))


@pytest.mark.gt_world("fake", size=2)
def test_graph(gt_golden, gt_mesh):
    gt_golden.check(trace(NOW, gt_mesh))


@pytest.mark.gt_world("ranks", size=2)
def test_graph_on_ranks(gt_golden, gt_mesh):
    gt_golden.check(trace(NOW, gt_mesh))


def swap(gm):
    """Makes another graph of the same one in the second run."""
    if NOW:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[:1]:
            node.target = torch.ops.aten.cos.default
    return gm


@pytest.mark.gt_world("fake", size=2)
def test_pass(gt_mesh):
    traced = trace(False, gt_mesh)
    plan = ["layers.0", "layers.1", *([["norm", "lm_head"]] if NOW else ["norm", "lm_head"])]
    apply_graph_passes(
        traced.gm, traced.example_inputs, [swap, *construct_default_graph_passes(bucket_plan=plan)]
    )


def record(value):
    made = Record()
    for step in range(2):
        made.add(step, 0, "loss", "loss", torch.tensor(1.0))
        made.add(step, 0, "weight", "w", torch.full((2,), value if step else 0.0))
    return made


def test_numbers():
    """Equal in either run, and other numbers in the second."""
    assert_bitwise_equal(record(1.0 + NOW), record(1.0 + NOW), what="graph against eager")


def test_tensors():
    """Like ``test_numbers``, for a tensor that is no record."""
    assert_bitwise_equal(torch.tensor([1.0, 1.0 + NOW]), torch.tensor([1.0, 1.0 + NOW]), what="sum")


def test_same():
    assert_bitwise_equal(record(1.0), record(1.0), what="the same")


def test_fixed():
    assert NOW


if NOW:

    def test_new():
        pass

else:

    def test_gone():
        pass
