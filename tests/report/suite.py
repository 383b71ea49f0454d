"""Tests that ``test_report.py`` runs: a pipeline of passes, records that differ on one rank of two,
equal ones, nothing.
"""

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x).sin()
        return self.lm_head(self.norm(x))


@pytest.mark.gt_world("fake", size=4)
def test_pipeline(gt_mesh):
    model = data_parallel(Net(), gt_mesh)
    traced = trace_step(
        model, lambda m, x: m(x).square().mean(), (torch.zeros(2, 3, dtype=torch.int64),)
    )
    apply_graph_passes(traced.gm, traced.example_inputs, construct_default_graph_passes(n_layers=3))


def record(rank, weight):
    made = Record(world_size=2, rank=rank)
    for step in range(2):
        made.add(step, rank, "loss", "loss", torch.tensor(float(step)))
        made.add(step, rank, "weight", "w", torch.full((3,), weight if step == 0 else 0.0))
    return made


@pytest.mark.gt_world("ranks", size=2)
def test_that_differs(gt_world):
    ours, theirs = record(gt_world.rank, 1.0), record(gt_world.rank, 1.0 + gt_world.rank)
    assert_bitwise_equal(ours, theirs, what="ours against theirs")


@pytest.mark.gt_world("ranks", size=2)
def test_equal_on_ranks(gt_world):
    assert_bitwise_equal(
        record(gt_world.rank, 1.0), record(gt_world.rank, 1.0), what="the same twice"
    )


def test_silent():
    print("nothing <b>of ours</b>")
