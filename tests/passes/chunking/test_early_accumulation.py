"""J: where the gradients of chunks are added, before or after they are communicated."""

from dataclasses import replace

import pytest
import torch

from fixtures.chunking import chunked, strict, token_batch
from fixtures.models import chunkable
from fixtures.models.chunkable import net
from fixtures.models.loss import ce_step
from pytest_gtrainer import (
    ChunkConfig,
    MixedPrecisionPolicy,
    assert_bitwise_different,
    assert_bitwise_equal,
    data_parallel,
    eager_chunked,
    trace_step,
)
from pytest_gtrainer._torch.passes import REDUCE_SCATTER

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(),
    "bf16_fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}
ON, OFF = ChunkConfig("layers.*", num_chunks=3), strict("layers.*", num_chunks=3)


def sharded(mesh, precision):
    """Parameters of fp32, but for "bf16": these are of bf16, and so is all that is computed of
    them.
    """
    torch.manual_seed(0)
    model = net(chunkable.Dense)()
    return data_parallel(
        model.bfloat16() if precision == "bf16" else model, mesh, mp_policy=POLICIES[precision]
    )


def chunk(model, config, inputs):
    """The chunked step of a tracer that gathers a parameter whenever it is read."""
    traced = trace_step(model, ce_step, inputs, chunk=config, reuse_gathers=False)
    return traced.with_graph(chunked(traced, config))


def on_and_off(model, inputs, reuse_gathers=False):
    """The step traced once, and chunked in both ways, whose twins are the same."""
    traced = trace_step(model, ce_step, inputs, chunk=ON, reuse_gathers=reuse_gathers)
    return [traced.with_graph(chunked(traced, config)) for config in (ON, OFF)]


def reductions(step, of="layers.0."):
    found = step.gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    return [node for node in found if node.meta["custom"]["module_fqn"].startswith(of)]


@pytest.mark.gt_world("fake", size=2)
@pytest.mark.parametrize("precision", POLICIES)
def test_the_golden_pair(gt_mesh, gt_golden, precision):
    """J3: on, one reduction a parameter, of the sum, behind the casts; off, one a chunk. In bf16
    there is no cast.
    """
    inputs = token_batch(0, batch=6)
    on, off = on_and_off(sharded(gt_mesh, precision), inputs)
    assert (len(reductions(on)), len(reductions(off))) == (4, 12)
    gt_golden.check(on.gm, "on")
    gt_golden.check(off.gm, "off")


@pytest.mark.second_tier("6")
@pytest.mark.gt_world("fake", size=2)
@pytest.mark.parametrize(("num_chunks", "precision"), [(2, "fp32"), (6, "bf16")])
def test_the_number_of_reductions_does_not_grow(gt_mesh, num_chunks, precision):
    """J2."""
    step = chunk(
        sharded(gt_mesh, precision), replace(ON, num_chunks=num_chunks), token_batch(0, batch=6)
    )
    assert len(reductions(step)) == 4


@pytest.mark.gt_world("fake", size=2)
def test_nothing_moves_across_a_cast(gt_mesh):
    """J2: what is added has the dtype it had in its chunk; a reduction with a cast behind it stays
    in its chunk.
    """
    step = chunk(sharded(gt_mesh, "bf16_fp32"), ON, token_batch(0, batch=6))
    for reduction in reductions(step):
        total = reduction.args[0]
        while total.target is torch.ops.aten.view.default:
            total = total.args[0]
        assert total.target is torch.ops.aten.add.Tensor
        assert {operand.meta["val"].dtype for operand in total.all_input_nodes} == {torch.float32}
    narrow = sharded(gt_mesh, "bf16_fp32").bfloat16()
    assert len(reductions(chunk(narrow, ON, token_batch(0, batch=6)))) == 12


@pytest.mark.gt_world("fake", size=2)
def test_a_parameter_gathered_once_is_reduced_once(gt_mesh):
    """A10: by our own tracer; early or not, the sum is autograd's."""
    inputs = token_batch(0, batch=6)
    on, off = on_and_off(sharded(gt_mesh, "fp32"), inputs, reuse_gathers=True)
    assert [str(node.target) for node in on.gm.graph.nodes] == [
        str(node.target) for node in off.gm.graph.nodes
    ]
    assert len(reductions(off)) == 4


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_off_is_bitwise_and_on_is_not(gt_world, gt_mesh, precision):
    """J1, J3: against an eager run that gathers, and reduces, whenever a chunk reads a
    parameter.
    """
    inputs = token_batch(gt_world.rank, batch=6)
    eager = sharded(gt_mesh, precision)
    with eager_chunked(eager, OFF):
        ce_step(eager, *inputs).backward()
    expected = {name: p.grad.to_local() for name, p in eager.named_parameters()}
    found = {}
    for config in (ON, OFF):
        model = sharded(gt_mesh, precision)
        chunk(model, config, inputs).replay(model, *inputs)
        found[config] = {name: p.grad.to_local() for name, p in model.named_parameters()}
    assert_bitwise_equal(found[OFF], expected)
    assert_bitwise_different(found[ON], expected)
