"""torchtitan's parallelize, for any numbers: the parallel debug models are the unsharded ones."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

from dataclasses import replace
from unittest import mock

import torch
from debug_models import DebugModel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.models import deepseek_v3, llama3, qwen3

from pytest_gtrainer import AnotherFunction, assert_same_model

BATCH, LENGTH, VOCABULARY, DIM, HEAD = 1, 4, 16, 16, 4
FSDP = {"data_parallel_shard_degree": 2}
TP = {"tensor_parallel_degree": 2}
# Where torchtitan builds the layers of a model, and sizes of ours: each element of a weight takes time.
SMALL = {
    "llama3": (llama3, "_build_llama3_layers", {"n_heads": 4, "hidden_dim": 16}),
    "qwen3_moe": (
        qwen3,
        "_build_qwen3_moe_layers",
        {
            **{"n_heads": 4, "n_kv_heads": 2, "head_dim": HEAD},
            **{"moe_hidden_dim": 16, "num_experts": 4, "top_k": 2},
        },
    ),
    "deepseek_v3": (
        deepseek_v3,
        "_build_dsv3_layers",
        {
            **{"n_heads": 2, "kv_lora_rank": 16, "v_head_dim": HEAD},
            **{"qk_nope_head_dim": HEAD, "qk_rope_head_dim": HEAD},
            **{"moe_hidden_dim": 16, "num_experts": 4, "router_top_k": 2},
        },
    ),
}


def tiny(name, **parallelism):
    """Return a debug model of one layer, which torchtitan builds of smaller sizes."""
    module, builder, sizes = SMALL[name]
    build = getattr(module, builder)

    def build_small(**options):
        rope = replace(options["rope"], dim=HEAD)
        return build(**{**options, **sizes, "dim": DIM, "rope": rope})

    with mock.patch.object(module, builder, build_small):
        lab = DebugModel(name, **parallelism)
    model = lab.spec.model
    model.layers = model.layers[-1:]
    model.dim = model.norm.normalized_shape = DIM
    model.tok_embeddings.embedding_dim = model.lm_head.in_features = DIM
    model.vocab_size = VOCABULARY
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
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
        data_dims=[dim for dim in mesh.mesh_dim_names if dim != "tp"],
        combine="sum",
    )


@pytest.mark.long  # a part of the next one
@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_tp(gt_mesh):
    proof = compare("llama3", gt_mesh, data_parallel_shard_degree=1, **TP)
    assert proof.kind == "reordered", str(proof)


@pytest.mark.gt_world("simulated", size=4, mesh={"shard": 2, "tp": 2})
def test_fsdp_and_tp(gt_mesh):
    proof = compare("llama3", gt_mesh, **FSDP, **TP)
    assert proof.kind == "reordered", str(proof)


@pytest.mark.long
@pytest.mark.gt_world("simulated", size=8, mesh={"replicate": 2, "shard": 2, "tp": 2})
def test_hsdp_and_tp(gt_mesh):
    proof = compare("llama3", gt_mesh, data_parallel_replicate_degree=2, **FSDP, **TP)
    assert proof.kind == "reordered", str(proof)


@pytest.mark.gt_world("simulated", size=2, mesh={"shard": 2})
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_fsdp_and_ep(name, gt_mesh):
    """Experts compute in bfloat16, so their sums over tokens of two ranks round elsewhere."""
    proof = compare(name, gt_mesh, **FSDP, expert_parallel_degree=2)
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
