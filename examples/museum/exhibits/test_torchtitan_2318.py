"""A loss that is divided by all tokens is averaged once more by DDP.

torchtitan#2318 (2026): after the loss was divided by the tokens of all ranks, FSDP's own division
was switched off, but DDP and hybrid sharding still averaged over their replicas. Norms of gradients
differed by a factor of 8 between parallelisms of one job. The thread names the factor and the
change; the rest is rebuilt from that.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_gtrainer import AnotherFunction, assert_same_model

ALL_TOKENS = 8


def reference():
    return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))


def sum_over_replicas(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def parallel(mesh, bug):
    model = DistributedDataParallel(reference(), process_group=mesh.get_group())
    if not bug:
        model.register_comm_hook(mesh.get_group(), sum_over_replicas)
    return model


def step(model, x):
    return model(x).square().sum() / ALL_TOKENS


def batch(_):
    return (torch.randn(4, 8),)


@exhibit(
    "torchtitan#2318",
    2026,
    kind="scale",
    found_by="proof",
    raises=AnotherFunction,
    says="1/2 times what is expected",
    usual=usual.of_models(
        parallel, reference, step, batch, mesh={"dp": 2}, data_dim="dp", combine="sum"
    ),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_replicas_are_added(gt_mesh, bug):
    assert_same_model(
        lambda mesh: parallel(mesh, bug), reference, step, batch, mesh=gt_mesh, combine="sum"
    )
