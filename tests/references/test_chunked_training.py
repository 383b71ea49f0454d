"""``TrainConfig(chunk=)``: both sides run their blocks in chunks."""

from functools import partial

import pytest

from fixtures.chunking import strict, token_batch
from fixtures.models import chunkable
from fixtures.models.chunkable import net
from fixtures.models.loss import ce_step
from pytest_gtrainer import (
    ActivationCheckpointConfig,
    ChunkError,
    TrainConfig,
    assert_bitwise_different,
    assert_bitwise_equal,
    train_eager,
    train_graph,
)

TWO_RANKS = pytest.mark.gt_world("simulated", size=2, nodes=1)
MODEL = net(chunkable.Attention, chunkable.Dense)


def config_of(mesh, batch=8, **changes):
    return TrainConfig(
        model=MODEL,
        step=ce_step,
        batch=lambda step, rank: token_batch(10 * step + rank, batch=batch),
        bucket_plan=["tok_embeddings", "layers.0", "layers.1", "lm_head"],
        mesh=mesh,
        steps=2,
        **changes,
    )


@pytest.mark.second_tier
@TWO_RANKS
@pytest.mark.parametrize(
    "changes", [{}, {"activation_checkpoint": ActivationCheckpointConfig()}], ids=["", "recomputed"]
)
def test_both_sides_run_in_chunks(gt_world, changes):
    """G1: under ``fully_shard``, and beside checkpointing, which then recomputes chunk by chunk."""
    chunked = partial(config_of, chunk=strict("layers.*", num_chunks=4), **changes)
    expected = train_eager(chunked, world=gt_world)
    assert_bitwise_equal(train_graph(chunked, world=gt_world), expected)
    assert_bitwise_different(
        train_eager(partial(config_of, **changes), world=gt_world), expected, what="whole blocks"
    )


@TWO_RANKS
@pytest.mark.parametrize("train", [train_eager, train_graph])
def test_a_batch_that_cannot_be_cut(gt_world, train):
    """G9: by either side."""
    with pytest.raises(
        ChunkError, match=r"layers.*: extent 7 of the batch dimension does not divide into 4 chunks"
    ):
        train(partial(config_of, batch=7, chunk=strict("layers.*", num_chunks=4)), world=gt_world)
