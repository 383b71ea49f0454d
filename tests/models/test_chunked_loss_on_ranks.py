"""Chunked cross entropy with a sharded head, eager and traced: C4."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as EagerPolicy
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fixtures.models.chunked_loss import chunked_ce_step
from fixtures.models.loss import ce_step
from pytest_gtrainer import (
    MixedPrecisionPolicy,
    assert_bitwise_different,
    assert_bitwise_equal,
    data_parallel,
    trace_step,
)

pytestmark = pytest.mark.second_tier

FLAVOR = "llama3/debug_odd"
DTYPES = {"fp32": (None, None), "bf16": (torch.bfloat16, torch.float32)}
Results = dict[str, torch.Tensor]


class Reductions(TorchDispatchMode):
    """Notes the input elements of every reduce-scatter into ``sent``."""

    def __init__(self, sent: list[int]) -> None:
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if "reduce_scatter" in str(func):
            self.sent.append(args[1].numel())
        return func(*args, **(kwargs or {}))


def eager(build, mesh, batch, step, dtypes) -> tuple[Results, list[int]]:
    """Loss and local gradients of one step under eager FSDP2, and the elements each
    reduction took.
    """
    sent, model = [], build(FLAVOR, n_layers=1)
    options = {
        "mesh": mesh,
        "mp_policy": EagerPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1]),
    }
    for group in (model.tok_embeddings, *model.layers, [model.norm, model.lm_head], model):
        fully_shard(group, **options)
    with Reductions(sent):
        loss = step(model, *batch)
        loss.backward()
    return {"loss": loss.detach()} | local_grads(model), sent


def graph(build, mesh, batch, step, dtypes, **options) -> tuple[Results, int]:
    """The same of the traced step, without bucketing; the second value counts its reductions."""
    model = data_parallel(build(FLAVOR, n_layers=1), mesh, mp_policy=MixedPrecisionPolicy(*dtypes))
    traced = trace_step(model, step, batch, **options)
    loss = traced.replay(model, *batch)
    reductions = sum("reduce_scatter" in str(node.target) for node in traced.gm.graph.nodes)
    return {"loss": loss} | local_grads(model), reductions


def local_grads(model: torch.nn.Module) -> Results:
    return {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}


@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("chunks", [1, 4])
def test_eager_sharded_training_reduces_the_head_once(
    gt_world, gt_mesh, build, batch, chunks, dtypes
):
    """C4: the same reductions as with the whole loss; in one chunk the same bits, too."""
    own = tuple(part.chunk(2)[gt_world.rank] for part in batch)
    whole, expected = eager(build, gt_mesh, own, ce_step, dtypes)
    chunked, sent = eager(build, gt_mesh, own, chunked_ce_step(chunks), dtypes)
    assert sent == expected
    judge = assert_bitwise_equal if chunks == 1 else assert_bitwise_different
    judge(chunked, whole, what=f"{chunks} chunks against the whole")


@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_graph_with_one_gather_equals_eager(gt_world, gt_mesh, build, batch, chunks, dtypes):
    """C4. Known difference: with a reduction per chunk the bits differ, except for one chunk."""
    own = tuple(part.chunk(2)[gt_world.rank] for part in batch)
    expected, _ = eager(build, gt_mesh, own, chunked_ce_step(chunks), dtypes)
    actual, reductions = graph(build, gt_mesh, own, chunked_ce_step(chunks), dtypes)
    assert_bitwise_equal(actual, expected, what="one reduction of the head")
    apart = chunked_ce_step(chunks, read_per_chunk=True)
    actual, more = graph(build, gt_mesh, own, apart, dtypes, reuse_gathers=False)
    assert more == reductions + chunks - 1
    judge = assert_bitwise_equal if chunks == 1 else assert_bitwise_different
    judge(actual, expected, what="a reduction of the head per chunk")
