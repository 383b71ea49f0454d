"""A pipeline backpropagates the sum of the loss; the division by tokens comes after the backward.

torchtitan#2972 (2026): without pipelines the loss was divided by the number of valid tokens before
the backward. The schedule of a pipeline calls the backward itself, so there the division reached
the logged loss only: gradients were larger by the number of tokens. AdamW does not mind a factor, so
a curve of losses hides it.
"""

from collections import OrderedDict

import pytest
import torch
from museum import exhibit, usual
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from pytest_gtrainer import AnotherFunction, assert_same_model

TOKENS = 8


def reference():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def loss_sum(output, target):
    return (output - target).square().sum()


def step(model, x, target):
    return loss_sum(model(x), target) / TOKENS


def batch(_):
    return torch.randn(TOKENS, 8), torch.randn(TOKENS, 8)


def parallel(mesh, bug):
    index, count = mesh.get_local_rank("pp"), mesh["pp"].size()
    layers = dict(reference().named_children())
    own = ("0", "1") if index == 0 else ("2",)
    module = nn.Sequential(OrderedDict((name, layers[name]) for name in own))
    stage = PipelineStage(module, index, count, torch.device("cpu"), group=mesh.get_group("pp"))

    def loss_mean(output, target):
        return loss_sum(output, target) / TOKENS

    schedule = ScheduleGPipe(
        stage, n_microbatches=2, loss_fn=loss_sum if bug else loss_mean, scale_grads=False
    )

    def step_of_stage(model, x, target):
        if index == 0:
            schedule.step(x)
            return None
        losses = []
        schedule.step(target=target, losses=losses)
        total = torch.stack(losses).sum().detach()
        return total / TOKENS if bug else total

    return module, step_of_stage


@exhibit(
    "torchtitan#2972",
    2026,
    kind="scale",
    found_by="proof",
    raises=AnotherFunction,
    says="8 times what is expected",
    usual=usual.of_pipeline(parallel, reference, step, batch),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"pp": 2})
def test_a_pipeline_has_the_gradient_of_the_mean(gt_mesh, bug):
    assert_same_model(
        lambda mesh: parallel(mesh, bug), reference, step, batch, mesh=gt_mesh, data_dims=()
    )
