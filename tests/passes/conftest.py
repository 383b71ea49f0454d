"""A small sharded model whose registration order differs from its execution order, and its
graph.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pytest_gtrainer import MixedPrecisionPolicy, data_parallel, trace_step
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass


class Block(nn.Module):
    """Runs w1, w3, w2.

    Registers a scale of its own, then w1, w2, w3, then the norm it runs first.
    """

    def __init__(self, dim) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.w1, self.w2, self.w3 = (nn.Linear(dim, dim, bias=index == 0) for index in range(3))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(self.w1(h) * self.w3(h)) * self.scale


class Net(nn.Module):
    def __init__(self, n_layers, dim) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(16, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, 16, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def token_step(model, tokens):
    return model(tokens).float().logsumexp(-1).mean()


PLAN = ["tok_embeddings", "layers.0", "layers.1", "layers.2", ["norm", "lm_head"]]


@pytest.fixture
def plan():
    return list(PLAN)


@pytest.fixture
def make_net():
    return Net


@pytest.fixture
def make_joint(gt_mesh):
    """``make_joint(n_layers=3, dim=8, policy=...)`` -> the canonicalised traced step of a sharded
    Net.
    """

    def make(n_layers=3, dim=8, policy=None, step=token_step, **options):
        model = data_parallel(
            Net(n_layers, dim), gt_mesh, mp_policy=policy or MixedPrecisionPolicy(torch.bfloat16)
        )
        traced = trace_step(model, step, (torch.zeros(2, 3, dtype=torch.int64),), **options)
        return traced.with_graph(canonicalize_graph_pass(traced.gm))

    return make


@pytest.fixture(scope="session")
def traced_joints():
    """The joint graphs of all tests by world and options: tracing takes twenty times as
    long as a copy.
    """
    return {}


@pytest.fixture
def shared_joint(make_joint, gt_mesh, traced_joints):
    """``shared_joint(**options)`` -> what ``make_joint(**options)`` gives, for this test alone."""

    def make(**options):
        groups = tuple(group.group_name for group in gt_mesh.get_all_groups())
        key = str(gt_mesh), groups, dist.get_rank(), *options.items()
        if key not in traced_joints:
            traced_joints[key] = make_joint(**options)
        traced = traced_joints[key]
        gm = copy.deepcopy(traced.gm)
        for node in gm.graph.nodes:  # a copy of a graph shares what its nodes' metadata holds
            node.meta = {
                name: copy.copy(held) if isinstance(held, dict) else held
                for name, held in node.meta.items()
            }
        return traced.with_graph(gm)

    return make


@pytest.fixture
def joint(shared_joint):
    """Return the result of ``make_joint()``, for this test alone."""
    return shared_joint()
