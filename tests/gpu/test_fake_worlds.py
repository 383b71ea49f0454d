"""Fake worlds whose tensors lie on a GPU: the graphs of a training step as a GPU runs it, at any
size.
"""

import pytest
import torch

from fixtures.training import llama3_training
from pytest_gtrainer import graphtext
from pytest_gtrainer.references.graph import GraphRun

pytestmark = pytest.mark.gt_world("fake", size=8, device="cuda")


def test_a_step_is_traced_on_the_gpu(gt_world, gt_mesh, record_property):
    """Every tensor of the graph is said to be on the GPU, and tracing allocates nothing there
    beside the model.
    """
    assert (gt_world.device, gt_mesh.device_type) == ("cuda", "cuda")
    before = torch.cuda.memory_allocated()
    run = GraphRun(llama3_training(gt_mesh, "bf16_fp32"))
    held = torch.cuda.memory_allocated() - before
    state = sum(tensor.numel() * tensor.element_size() for tensor in _local_state(run.model))
    record_property(
        "measured", f"{held / 2**20:.1f} MiB held, the model's shards are {state / 2**20:.1f} MiB"
    )
    devices = {
        str(value.device)
        for node in run.traced.gm.graph.nodes
        for value in _tensors(node.meta.get("val"))
    }
    assert devices == {"cuda:0"}
    assert held <= state + 2**20


def test_attention_is_the_gpus(gt_mesh):
    """The CPU's attention operator is in no graph of a GPU."""
    traced = GraphRun(llama3_training(gt_mesh, "bf16_fp32")).traced
    called = {str(node.target) for node in traced.gm.graph.nodes if node.op == "call_function"}
    attention = sorted(name for name in called if "scaled_dot_product" in name)
    assert attention
    assert not any("for_cpu" in name for name in attention)


def test_graph_text_comes_back(gt_mesh):
    """Devices are part of the text, which parses to a graph of the same text."""
    text = graphtext.render(GraphRun(llama3_training(gt_mesh, "fp32")).traced.gm)
    assert 'default = device("cuda")' in text
    assert graphtext.render(graphtext.parse(text)) == text


def _local_state(model):
    from pytest_gtrainer.tracing.model import ModelState, local

    return [local(tensor) for tensor in ModelState.of(model).tensors]


def _tensors(value):
    return [
        each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)
    ]
