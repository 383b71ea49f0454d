"""Does a training step that graph passes have rewritten still train as eager FSDP2 does?

FSDP over ``dp`` and tensor parallelism over ``tp``; from the cheapest check to the dearest.
"""

from functools import partial

import pytest
from model import BUCKETS, Decoder, batch, step, tensor_parallel
from torch.distributed.fsdp import fully_shard

from pytest_gtrainer import (
    AnotherFunction,
    LayoutDifference,
    TrainConfig,
    apply_graph_passes,
    assert_parity,
    assert_same_model,
    construct_default_graph_passes,
    data_parallel,
    trace_step,
)


def training(mesh, **sizes):
    """Return what both sides train: the model on ``tp``, its parameters sharded over ``dp``."""
    return TrainConfig(
        model=lambda: tensor_parallel(Decoder(**sizes), mesh["tp"]),
        step=step,
        batch=batch,
        bucket_plan=BUCKETS,
        mesh=mesh["dp"],
        trace_once=True,
        steps=1,
    )


@pytest.mark.gt_world("fake", size=8, mesh={"dp": 4, "tp": 2})
def test_the_graph_is_the_reviewed_one(gt_mesh, gt_golden):
    """No values here: a model is traced and rewritten; its text is compared with a file."""
    model = data_parallel(tensor_parallel(Decoder(), gt_mesh["tp"]), gt_mesh["dp"])
    traced = trace_step(model, step, batch(0, 0))
    gt_golden.check(traced, name="traced")
    passes = construct_default_graph_passes(n_layers=2)
    rewritten = apply_graph_passes(traced.gm, traced.example_inputs, passes)
    gt_golden.check(rewritten, name="rewritten")


@pytest.mark.gt_world("ranks", size=8, mesh={"dp": 4, "tp": 2})
def test_eight_ranks_train_like_eager_fsdp2(gt_mesh, gt_world):
    """Every loss, gradient, weight and state of AdamW, bit for bit; a control must differ."""
    # Odd shards: gloo hides the order of a payload with an even number of elements.
    assert_parity(training(gt_mesh, dim=28, hidden=38), gt_world)


def unsharded():
    return Decoder(n_layers=1)


def sharded(mesh, *, forget_a_sum=False):
    model = tensor_parallel(unsharded(), mesh["tp"], forget_a_sum=forget_a_sum)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


@pytest.mark.gt_world("simulated", size=4, mesh={"dp": 2, "tp": 2})
def test_the_parallel_model_is_the_unsharded_one(gt_mesh):
    """A proof for any weights, without a tolerance: loss and gradients are the same function."""
    assert_same_model(sharded, unsharded, step, partial(batch, 0), mesh=gt_mesh)


@pytest.mark.gt_world("simulated", size=4, mesh={"dp": 2, "tp": 2})
def test_a_planted_mistake_is_found(gt_mesh):
    """The last layer forgets a sum over ``tp``: not a rounding, and so the message says."""
    mistaken = partial(sharded, forget_a_sum=True)
    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(mistaken, unsharded, step, partial(batch, 0), mesh=gt_mesh)
    print(failure.value)


@pytest.mark.gt_world("simulated", size=8, nodes=2, mesh={"dp": 4, "tp": 2})
def test_two_nodes_train_like_eager_fsdp2(gt_world):
    """Sums are added in the order of rings that go around two nodes of four GPUs."""
    assert_parity(training, gt_world)


@pytest.mark.gt_world("simulated", size=8, nodes=2, mesh={"dp": 4, "tp": 2})
def test_a_wrong_order_of_a_bucket_is_told(gt_world):
    """Payloads are packed in the order of use: one node may hide that, two show it."""
    with pytest.raises(LayoutDifference) as failure:
        assert_parity(training, gt_world, payload_order="execution")
    print(failure.value)
