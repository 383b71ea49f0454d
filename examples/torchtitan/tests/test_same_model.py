"""torchtitan's parallelize, for any numbers: the parallel debug models are the unsharded ones."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

import torch
from debug_models import DebugModel
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pytest_gtrainer import AnotherFunction, assert_same_model

BATCH, LENGTH, VOCABULARY, EXPERTS = 1, 4, 16, 4
FSDP = {"data_parallel_shard_degree": 2}
TP = {"tensor_parallel_degree": 2}


def tiny(name, **parallelism):
    """Return a debug model of one layer with few tokens and experts: elements take time."""
    lab = DebugModel(name, **parallelism)
    model = lab.spec.model
    model.layers = model.layers[-1:]
    model.vocab_size = VOCABULARY
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    moe = getattr(model.layers[0], "moe", None)
    if moe is not None:
        routed = moe.routed_experts
        for part in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
            part.num_experts = EXPERTS
        moe.router.gate.out_features = EXPERTS
        moe.router.top_k = routed.token_dispatcher.top_k = 2
        routed.inner_experts.hidden_dim = 16
    return lab


def batch(coordinate):
    generator = torch.Generator().manual_seed(coordinate)
    return tuple(torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator))


def step(model, tokens, labels):
    """Return the share of a batch in the loss: torchtitan adds gradients, and divides no sum."""
    positions = torch.arange(LENGTH, dtype=torch.int32).repeat(BATCH, 1)
    logits = model(tokens, positions)
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def compare(name, mesh, change=None, **parallelism):
    def parallel():
        model = tiny(name, **parallelism).parallel()
        if change is not None:
            change(model)
        return model

    return assert_same_model(
        parallel,
        lambda: tiny(name).unsharded(),
        step,
        batch,
        mesh=mesh,
        data_dims=[dim for dim in mesh.mesh_dim_names if dim == "shard"],
        combine="sum",
    )


@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_tp(gt_mesh):
    proof = compare("llama3", gt_mesh, data_parallel_shard_degree=1, **TP)
    assert proof.kind == "reordered", str(proof)


@pytest.mark.gt_world("simulated", size=4, mesh={"shard": 2, "tp": 2})
def test_fsdp_and_tp(gt_mesh):
    proof = compare("llama3", gt_mesh, **FSDP, **TP)
    assert proof.kind == "reordered", str(proof)


@pytest.mark.gt_world("simulated", size=2, mesh={"shard": 2})
def test_fsdp_and_ep(gt_mesh):
    """Experts compute in bfloat16, so their sums over tokens of two ranks round elsewhere."""
    proof = compare("qwen3_moe", gt_mesh, **FSDP, expert_parallel_degree=2)
    assert proof.kind == "rounds elsewhere", str(proof)


@pytest.mark.gt_world("simulated", size=2, mesh={"shard": 2})
def test_a_mean_instead_of_a_sum(gt_mesh):
    """The control: the loss is divided by all tokens, and FSDP2 divides once more."""

    def divide(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)

    with pytest.raises(AnotherFunction, match="1/2 times what is expected"):
        compare("llama3", gt_mesh, divide, **FSDP)
