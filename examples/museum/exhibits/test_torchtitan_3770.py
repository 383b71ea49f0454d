"""The head runs inside the loss, and the last bucket of the plan does not know "loss".

torchtitan#3770 (2026): with a chunked loss the head's weight is used under the module "loss". The
plan ended with norm and lm_head alone, so the head's collectives stayed outside of the bucket and
the weights of several nodes lost eager's bits. Here the plan of a small model ends in the same
way.
"""

import pytest
import torch
from museum import exhibit
from torch import nn

from pytest_gtrainer import (
    PlanError,
    TrainConfig,
    assert_simulated_parity,
    get_default_transformer_block_buckets,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(16, 8)
        self.layers = nn.ModuleDict({"0": nn.Linear(8, 8, bias=False)})
        self.norm, self.lm_head = nn.RMSNorm(8), nn.Linear(8, 16, bias=False)

    def forward(self, tokens):
        return self.norm(self.layers["0"](self.tok_embeddings(tokens)).sin())


def step(model, tokens):
    """Two chunks of tokens go through the head in the loss."""
    hidden, labels = model(tokens), tokens.roll(1, -1)
    if hasattr(model.lm_head, "unshard"):  # eager fully_shard: nobody calls the module
        model.lm_head.unshard()
    weight = model.lm_head.weight
    losses = []
    for rows, targets in zip(hidden.chunk(2), labels.chunk(2), strict=True):
        losses.append(
            nn.functional.cross_entropy((rows @ weight.T).flatten(0, 1), targets.flatten())
        )
    return torch.stack(losses).mean()


def training(mesh, bug):
    return TrainConfig(
        model=Model,
        step=step,
        batch=lambda step, rank: (
            torch.randint(0, 16, (2, 8), generator=torch.manual_seed(8 * step + rank)),
        ),
        bucket_plan=get_default_transformer_block_buckets(1, chunked_loss_enabled=not bug),
        mesh=mesh,
        steps=1,
    )


@exhibit(
    "torchtitan#3770",
    2026,
    kind="order and payload",
    found_by="layout",
    raises=PlanError,
    says="covers no all-gather of lm_head.weight (read in loss)",
    usual="nobody on two ranks: a sum of two has one order, and every bit is equal",
)
@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_the_head_is_in_the_last_bucket(gt_world, bug):
    assert_simulated_parity(lambda mesh: training(mesh, bug), gt_world)
