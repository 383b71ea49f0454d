"""NCCL with a single rank: what it computes, and the main job over it.

One rank adds nothing up, so no order of sums and no bucket shows here; what shows is that
collectives run on CUDA tensors, in the dtypes of training, and that both sides run the kernels of a
GPU to the same bits.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from fixtures.training import PRECISIONS, deepseek_v3_training, llama3_training
from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    trace_step,
    train_eager,
    train_graph,
)
from pytest_gtrainer._torch.graph_bytes import bytes_of, graphs_of
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import shard_traceably

pytestmark = pytest.mark.gt_world("ranks", size=1, device="cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_the_world_is_on_the_gpu(gt_world, gt_mesh):
    """A rank has its GPU set, the backend is NCCL, and the mesh is one of CUDA."""
    assert (gt_world.device, gt_world.backend, gt_mesh.device_type) == ("cuda", "nccl", "cuda")
    assert (dist.get_backend(), torch.cuda.current_device()) == ("nccl", 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives(gt_world, dtype):
    """Gathers and exchanges of one rank copy; sums and averages are the identity."""
    value = torch.arange(5, device="cuda").to(dtype)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        reduced, scattered = value.clone(), torch.empty_like(value)
        dist.all_reduce(reduced, op=op)
        dist.reduce_scatter_tensor(scattered, value, op=op)
        assert reduced.tolist() == scattered.tolist() == [0, 1, 2, 3, 4]
    gathered, exchanged = torch.empty_like(value), torch.empty_like(value)
    dist.all_gather_into_tensor(gathered, value)
    dist.all_to_all_single(exchanged, value)
    assert gathered.tolist() == exchanged.tolist() == [0, 1, 2, 3, 4]


def test_a_scaled_sum():
    """NCCL has PREMUL_SUM, which gloo refuses: the factor is applied before the sum."""
    value = torch.ones(3, device="cuda")
    dist.all_reduce(value, op=dist._make_nccl_premul_sum(0.5))
    assert value.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("turn", range(2))
def test_a_backward_does_not_use_the_groups_of_an_earlier_test(gt_mesh, turn):
    """It runs in a thread of the GPU's own, where DTensor has caches of its own."""
    x = distribute_tensor(torch.ones(4, device="cuda"), gt_mesh, [Shard(0)]).requires_grad_()
    (x / 2).sum().full_tensor().backward()
    assert dist.get_process_group_ranks(x.grad.device_mesh.get_group()) == [0]


@pytest.mark.parametrize("training", [llama3_training, deepseek_v3_training])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_trains_as_eager_fsdp2(gt_mesh, gt_deterministic, training, precision):
    """Loss, gradients, weights and optimiser state of every step. One rank gathers nothing: there
    is no layout.
    """
    assert_bitwise_equal(
        train_graph(training(gt_mesh, precision)), train_eager(training(gt_mesh, precision))
    )


def test_another_precision_differs(gt_mesh, gt_deterministic):
    """The twin that must differ."""
    exact, rounded = (
        llama3_training(gt_mesh, precision, steps=2) for precision in ("fp32", "bf16_fp32")
    )
    assert_bitwise_different(train_graph(rounded), train_eager(exact))


def test_a_graph_comes_through_bytes(gt_mesh, gt_deterministic):
    """Ranks hand over a graph as bytes: its constants and devices are on the reader's GPU, its
    results are the same bits.
    """
    config = deepseek_v3_training(gt_mesh, "bf16_fp32", steps=1)
    model, inputs = shard_traceably(new_model(config), config), config.inputs(0)
    model.register_buffer("scale", torch.ones((), device="cuda"))

    def step(model, *batch):
        return config.step(model, *batch) * model.scale * torch.tensor(0.5, device="cuda")

    traced = trace_step(model, step, inputs)
    own = torch.device("cuda", 0)
    assert own in (node.kwargs.get("device") for node in traced.gm.graph.nodes)
    (taken,), _ = graphs_of(bytes_of([traced.gm], None, own), new_fake_mode(), own)
    results = traced.results(model, *inputs)
    assert_bitwise_equal(replace(traced, gm=taken).results(model, *inputs), results)
    model.scale.add_(1)
    assert_bitwise_different(replace(traced, gm=taken).results(model, *inputs), results)
