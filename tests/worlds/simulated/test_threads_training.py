"""Unmodified eager trainers on threads: the bits of real ranks, and of another net where the net is
another.
"""

import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import simulate
from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import NetModel, Record, assert_bitwise_different, assert_bitwise_equal
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.simulated import simulated_eager
from pytest_gtrainer.worlds.simulated.threads import run_threads
from tests.worlds.simulated.gloo import GlooNet

pytestmark = pytest.mark.second_tier

TRAININGS = {
    "llama3": (
        {"fsdp": 4},
        functools.partial(llama3_training, precision="fp32", flavor="debug_odd", steps=2),
    ),
    "deepseek_v3 with expert parallelism": (
        {"efsdp": 2, "ep": 2},
        functools.partial(deepseek_v3_training, precision="fp32", flavor="debug_odd", steps=2),
    ),
}


def real_run(name):
    mesh, config_of_mesh = TRAININGS[name]
    return EagerRun(
        config_of_mesh(init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)))
    ).run()


@pytest.mark.parametrize("name", TRAININGS)
def test_eager_training_has_the_bits_of_real_ranks(gt_ranks, name):
    """S8: loss, gradients, weights, optimiser state, on every rank; and the twin, another order of
    addition.
    """
    mesh, config_of_mesh = TRAININGS[name]
    real = Record.merged(gt_ranks.run(real_run, name, size=4))
    assert_bitwise_equal(simulated_eager(config_of_mesh, GlooNet(4), mesh=mesh).record, real)
    assert_bitwise_different(
        simulated_eager(config_of_mesh, NetModel(2, 2, channels=2), mesh=mesh).record, real
    )


def hybrid_shards(rank):
    """HSDP with gradients accumulated over two backwards, and clipped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = little_model(rank)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for step in range(2):
        loss_of(model, rank, step).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return [norm.full_tensor(), *(parameter.grad.to_local() for parameter in model.parameters())]


def data_parallel(rank):
    model = little_model(rank)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, rank, step).backward()
        optimizer.step()
    return list(model.state_dict().values())


def little_model(rank):
    """Dropout and weights by seed: of a rank's own random numbers."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(9, 16), nn.Sequential(nn.Dropout(0.25), nn.Linear(16, 5)))
    torch.manual_seed(rank)
    return model


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 9, generator=generator)).square().mean()


@pytest.mark.parametrize("function", [hybrid_shards, data_parallel])
def test_a_trainer_of_ones_own_has_the_bits_of_real_ranks(gt_ranks, function):
    """S8: HSDP, and DDP, whose reductions C++ starts and waits for."""
    real = gt_ranks.run(on_rank, function, size=4)
    assert all(map(same, run_threads(4, function, net=GlooNet(4)), real))
    assert not all(map(same, run_threads(4, without_seeds, function, net=GlooNet(4)), real))


def on_rank(function):
    return function(dist.get_rank())


def without_seeds(rank, function):
    return function(rank + 1)


def same(tensors, others):
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


ROUGH = functools.partial(llama3_training, precision="bf16_fp32", steps=1)


@functools.cache
def trained(**net):
    return simulated_eager(ROUGH, NetModel.of_world(8, **net)).record


def test_two_nodes_add_in_another_order_than_one():
    """S1: what makes the net visible; two nodes, two channels.

    With one node's rail rings channels change nothing.
    """
    assert_bitwise_equal(trained(nodes=1, channels=1), trained(nodes=1, channels=2))
    assert_bitwise_different(trained(nodes=2, channels=2), trained(nodes=1, channels=2))


def test_a_run_is_the_same_every_time():
    """Turns are handed on in a fixed order, whatever the system does with the threads."""
    assert_bitwise_equal(
        simulated_eager(ROUGH, NetModel.of_world(8, nodes=2, channels=2)).record,
        trained(nodes=2, channels=2),
    )


def backward_thread(rank):
    threads = []
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda gradient: threads.append(threading.get_ident()))
    (tensor * 2).sum().backward()
    return threads == [threading.get_ident()]


def test_a_backward_runs_on_the_thread_of_its_rank():
    assert run_threads(3, backward_thread, net=NetModel(1, 3)) == [True] * 3


def test_the_layout_comes_with_the_record():
    run = simulated_eager(
        functools.partial(llama3_training, precision="fp32", steps=1), NetModel(1, 2)
    )
    assert run.record.ranks == (0, 1)
    assert run.layout.payloads


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
def test_a_finished_configuration_moves_to_the_ranks_if_its_mesh_is_all_it_has(gt_mesh):
    """The default group is a fake one in a test of a simulated world."""
    run = simulated_eager(llama3_training(gt_mesh, "fp32"), GlooNet(4), steps=1)
    assert_bitwise_equal(run.record, simulated_eager(ROUGH_FP32, GlooNet(4), steps=1).record)
    assert dist.get_backend() == "fake"
    assert dist.get_world_size() == 4


ROUGH_FP32 = functools.partial(llama3_training, precision="fp32")


@pytest.mark.gt_world("fake", size=4, mesh={"efsdp": 2, "ep": 2})
def test_a_configuration_with_more_meshes_is_refused(gt_mesh):
    with pytest.raises(ValueError, match="hand over a function that builds it from a rank's mesh"):
        simulated_eager(deepseek_v3_training(gt_mesh, "fp32"), GlooNet(4))


@pytest.mark.gt_world("fake", size=2, mesh={"fsdp": 2})
def test_a_mesh_of_outside_means_nothing_to_a_rank(gt_mesh):
    """Its groups move no data; they are not found by accident either."""
    with pytest.raises(RuntimeError, match="process group"):
        run_threads(2, lambda rank: gt_mesh.get_group(), net=NetModel(1, 2))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [64, 128, 256])
def test_many_ranks(ranks):
    """S2: graph and eager by one digest a step of all ranks' weights, as ``benchmarks.simulate``
    prints them.
    """
    graph, eager = (
        simulate.train(side, ranks, nodes=ranks // 8, steps=2).digests
        for side in ("graph", "eager")
    )
    assert graph == eager
    assert len({*graph.values()}) == 2
