"""A head that was tied to the embedding gets memory of its own, and half of the gradient each.

verl#7834 (2026): to save memory on the host, models are built without storage and given some by
``to_empty()``. That unties a tied head, while its values stay right, since the checkpoint has them
under both names: the embedding then learns from its inputs alone. The thread warns of this where a
naive fix of another problem would do it.
"""

import pytest
import torch
from museum import exhibit, usual
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_gtrainer import AnotherFunction, assert_same_model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)).tanh())


def parallel(mesh, bug):
    model = Model()
    # What to_empty() does where ranks have no weights yet: fresh memory for each parameter.
    model.head.weight = nn.Parameter(torch.empty_like(model.head.weight))
    if not bug:
        model.tie()
    return DistributedDataParallel(model, process_group=mesh.get_group())


def step(model, tokens):
    return model(tokens).square().mean()


def batch(_):
    return (torch.randint(8, (6,)),)


@exhibit(
    "verl#7834",
    2026,
    kind="reductions",
    found_by="proof",
    raises=AnotherFunction,
    says="first gradient of embedding.weight",
    usual=usual.of_models(parallel, Model, step, batch, mesh={"dp": 2}, data_dim="dp"),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_the_tied_weight_learns_from_both_sides(gt_mesh, bug):
    assert_same_model(lambda mesh: parallel(mesh, bug), Model, step, batch, mesh=gt_mesh)
