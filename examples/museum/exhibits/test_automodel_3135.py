"""Experts of hybrid sharding lose the group of their replicas.

NeMo-Automodel#3135 (2026): the parallelizer of MoE layers built the mesh of FSDP2 without the
dimension of the replicas, so experts were sharded and never reduced over replicas. Replicas of one
expert trained apart from the first step on, without an error.
"""

import pytest
import torch
from museum import exhibit, usual
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_gtrainer import AnotherFunction, assert_same_model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.experts = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.experts(self.attention(x))


def reference():
    return nn.Sequential(Block(), nn.Linear(8, 8))


def parallel(mesh, bug):
    model = reference()
    hybrid = mesh["replicate", "shard"]
    fully_shard(model[0].experts, mesh=mesh["shard"] if bug else hybrid)
    return fully_shard(model, mesh=hybrid)


def step(model, x):
    return model(x).square().mean()


def batch(_):
    return (torch.randn(4, 8),)


@exhibit(
    "NeMo-Automodel#3135",
    2026,
    kind="reductions",
    found_by="proof",
    raises=AnotherFunction,
    says="equal after a mean over 'replicate'",
    usual=usual.of_models(
        parallel,
        reference,
        step,
        batch,
        mesh={"replicate": 2, "shard": 1},
        data_dim="replicate",
    ),
)
@pytest.mark.gt_world("simulated", size=4, mesh={"replicate": 2, "shard": 2})
def test_experts_are_reduced_over_replicas(gt_mesh, bug):
    assert_same_model(
        lambda mesh: parallel(mesh, bug),
        reference,
        step,
        batch,
        mesh=gt_mesh,
        data_dims=("replicate", "shard"),
    )
