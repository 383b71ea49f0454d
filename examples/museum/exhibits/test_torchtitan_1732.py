"""A pipeline divides all that has been accumulated so far, at every accumulation step.

torchtitan#1732 (2025): a schedule with ``scale_grads=True`` divides gradients by the number of
microbatches when it ends. With gradient accumulation it runs several times before the optimiser
does, so the first steps are divided again and again: a moving average in place of a sum.
"""

from collections import OrderedDict

import pytest
import torch
from museum import exhibit, usual
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from pytest_gtrainer import AnotherFunction, assert_same_model

ACCUMULATE, MICROBATCHES = 2, 2


def reference():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def mean_square(output, target):
    return (output - target).square().mean()


def step(model, x, target):
    return mean_square(model(x), target)


def batch(_):
    return torch.randn(8, 8), torch.randn(8, 8)


def parallel(mesh, bug):
    index, count = mesh.get_local_rank("pp"), mesh["pp"].size()
    layers = dict(reference().named_children())
    own = ("0", "1") if index == 0 else ("2",)
    module = nn.Sequential(OrderedDict((name, layers[name]) for name in own))
    stage = PipelineStage(module, index, count, torch.device("cpu"), group=mesh.get_group("pp"))
    # By accumulation steps, and, where the schedule does not do so, by microbatches.
    divisor = ACCUMULATE if bug else ACCUMULATE * MICROBATCHES

    def loss_fn(output, target):
        return mean_square(output, target) / divisor

    schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=loss_fn, scale_grads=bug)

    def step_of_stage(model, x, target):
        losses = []
        parts = x.chunk(ACCUMULATE), target.chunk(ACCUMULATE)
        for some_x, some_target in zip(*parts, strict=True):
            if index == 0:
                schedule.step(some_x)
            else:
                part = []
                schedule.step(target=some_target, losses=part)
                losses.extend(part)
        if index == 0:
            return None
        return torch.stack(losses).detach().sum() * divisor / (ACCUMULATE * MICROBATCHES)

    return module, step_of_stage


@exhibit(
    "torchtitan#1732",
    2025,
    kind="scale",
    found_by="proof",
    raises=AnotherFunction,
    says="first gradient of 0.weight",
    usual=usual.of_pipeline(parallel, reference, step, batch),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"pp": 2})
def test_accumulated_steps_are_added(gt_mesh, bug):
    assert_same_model(
        lambda mesh: parallel(mesh, bug), reference, step, batch, mesh=gt_mesh, data_dims=()
    )
