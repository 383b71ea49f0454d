"""Collectives that torch would fuse with matrix products under tensor parallelism: its own pass
decides, on CPU.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fixtures.models import llama3
from fixtures.models.loss import ce_step
from fixtures.models.tensor_parallel import apply_tensor_parallel
from pytest_gtrainer import async_tp_decisions, graphtext, trace_step

BLOCK = "layers.0"
FUSED = [
    "fwd reduce_scatter of tok_embeddings, not fused",
    f"fwd all_gather of {BLOCK}.attention + wq, wk, wv",
    f"fwd reduce_scatter of {BLOCK}.attention.wo + {BLOCK}.attention.wo",
    f"fwd all_gather of {BLOCK}.feed_forward + w1, w3",
    f"fwd reduce_scatter of {BLOCK}.feed_forward.w2 + {BLOCK}.feed_forward.w2",
    "fwd all_gather of lm_head + lm_head",
    "fwd all_gather of lm_head, not fused",  # of the logits, for the loss
    "bwd reduce_scatter of lm_head + lm_head",
    f"bwd all_gather of {BLOCK}.feed_forward.w2 + {BLOCK}.feed_forward.w2",
    f"bwd reduce_scatter of {BLOCK}.feed_forward, not fused",  # of a sum of two products
    f"bwd all_gather of {BLOCK}.attention.wo + {BLOCK}.attention.wo",
    f"bwd reduce_scatter of {BLOCK}.attention, not fused",
    "bwd all_gather of tok_embeddings, not fused",
]


def traced(mesh, **how):
    model = llama3.Llama3(replace(llama3.FLAVORS["debug"], n_layers=1))
    model.init_weights(seed=0)
    apply_tensor_parallel(model, mesh, **how)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    return trace_step(model, ce_step, (tokens, tokens)).gm


@pytest.mark.gt_world("fake", size=4, mesh={"dp": 2, "tp": 2})
def test_the_table_of_a_sequence_parallel_block(gt_mesh):
    """The graph stays as it was, and torch says again that there is no NCCL where there is none."""
    gm, has_nccl = traced(gt_mesh["tp"], sequence=True), dist.is_nccl_available()
    before = graphtext.render(gm)
    assert [str(decision) for decision in async_tp_decisions(gm, gt_mesh["tp"])] == FUSED
    assert (graphtext.render(gm), dist.is_nccl_available()) == (before, has_nccl)


@pytest.mark.gt_world("fake", size=4, mesh={"dp": 2, "tp": 2})
def test_without_sequence_parallelism_nothing_is_fused(gt_mesh):
    """All-reduces are between the products then: the plan, and not the pass, decides. Other meshes
    are not judged.
    """
    gm = traced(gt_mesh["tp"])
    assert [str(decision) for decision in async_tp_decisions(gm, gt_mesh["tp"])] == [
        "fwd all_gather of lm_head, not fused"
    ]
    with pytest.raises(
        ValueError, match=r"no all-gather and no reduce-scatter over .*: nothing could be fused"
    ):
        async_tp_decisions(gm, gt_mesh["dp"])
    with pytest.raises(
        ValueError, match=r"has 2 dimensions: give the one of tensor parallelism, mesh\['tp'\]"
    ):
        async_tp_decisions(gm, gt_mesh)
