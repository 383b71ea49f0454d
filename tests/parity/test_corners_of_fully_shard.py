"""Corners of ``fully_shard`` in one small model: layouts from its own buffers, and bits, on real
ranks.

Frozen parameters, a tie, modules with children and parameters of their own, a bias registered
before its weight, sizes that no number of ranks divides, and shards that are empty on the last
rank.
"""

import pytest
import torch
from torch import nn

from pytest_gtrainer import MixedPrecisionPolicy, TrainConfig
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

pytestmark = pytest.mark.second_tier

DIM, VOCABULARY = 7, 11


class BiasFirst(nn.Module):
    """Registers the bias before the weight, and reads the weight first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class Block(nn.Module):
    """Registers its own parameters before and behind its children; ``pair`` has two rows, so a
    third rank has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.inner, self.outer = BiasFirst(), nn.Linear(DIM, DIM, bias=False)
        self.pair = nn.Parameter(torch.randn(2, DIM))
        self.shift = nn.Parameter(torch.zeros(DIM), requires_grad=False)

    def forward(self, x):
        hidden = self.outer(torch.tanh(self.inner(x) * self.scale)) + self.shift
        return x + hidden + (x @ self.pair.t()) @ self.pair


class Corners(nn.Module):
    """Two blocks, one of them frozen but for a scale; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.lm_head.weight = self.tok_embeddings.weight
        self.layers[1].inner.requires_grad_(False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def corner_step(model, tokens):
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def corner_batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randint(0, VOCABULARY, (3, 5), generator=generator),)


@pytest.fixture
def corners(gt_mesh, gt_world):
    def make(**changes):
        fields = {
            "model": lambda: Corners().to(gt_world.device),
            "step": corner_step,
            "batch": lambda step, rank: tuple(
                t.to(gt_world.device) for t in corner_batch(step, rank)
            ),
            "bucket_plan": [["tok_embeddings", "lm_head"], "layers.0", "layers.1"],
            "mesh": gt_mesh,
            "steps": 2,
        }
        return TrainConfig(**{**fields, **changes})

    return make


FIRST = ("inner.bias", "inner.weight", "outer.weight", "scale", "pair", "shift")
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def names(layout, collective):
    return {payload.label: payload.parameters for payload in layout.of(collective)}


@pytest.mark.gt_world("ranks", size=3)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED], ids=["fp32", "mixed"])
def test_layout_and_bits_are_those_of_fully_shard(corners, check_parity, policy):
    """D2, D3, D4, D14, A10: what is in which payload, at which byte, and every bit of two steps."""
    graph = check_parity(corners(mp_policy=policy))
    gathered, reduced = (names(graph.layout(), kind) for kind in ("all_gather", "reduce_scatter"))
    assert gathered["layers.0"] == tuple(f"layers.0.{name}" for name in FIRST)
    assert reduced["layers.0"] == gathered["layers.0"][:-1]
    assert reduced["layers.1"] == tuple(f"layers.1.{name}" for name in FIRST[2:-1])
    assert gathered["tok_embeddings"] == reduced["tok_embeddings"] == ("tok_embeddings.weight",)
    local = {name: p.to_local().numel() for name, p in graph.model.named_parameters()}
    rank = graph.config.mesh.get_rank()
    assert (local["layers.0.pair"] == 0) == (rank == 2)
    assert local["layers.0.scale"] == [3, 3, 1][rank]


@pytest.mark.gt_world("ranks", size=4, mesh={"replicate": 2, "shard": 2})
def test_layout_and_bits_are_those_of_fully_shard_with_replicas(corners, check_parity):
    """D16."""
    graph = check_parity(corners(mp_policy=MIXED))
    assert names(graph.layout(), "all_reduce") == names(graph.layout(), "reduce_scatter")


@pytest.mark.gt_world("ranks", size=3)
@pytest.mark.parametrize("order", ["execution", "registration"])
def test_another_order_differs_in_layout(corners, order):
    """The twin: ``named_parameters`` has scale first, the graph reads the weight before the
    bias.
    """
    config = corners(steps=1)
    eager, graph = EagerRun(config), GraphRun(config, payload_order=order)
    eager.run()
    assert (
        names(graph.layout(), "all_gather")["layers.0"]
        != names(eager.layout(), "all_gather")["layers.0"]
    )
