"""Chunking among other passes: its place, its options, buckets, and its messages."""

import copy

import pytest

from fixtures.chunking import chunked, strict, token_batch
from fixtures.models import chunkable
from fixtures.models.chunkable import net
from fixtures.models.loss import ce_step
from pytest_gtrainer import ChunkConfig, ChunkError, construct_default_graph_passes, trace_step
from pytest_gtrainer.passes.chunking import rewrite

MOE = ChunkConfig("layers.*.moe")


def test_its_place():
    """G12, M1: one frozen object is its option, in the fingerprint too."""
    passes = construct_default_graph_passes(
        n_layers=2, reshard_after_forward=True, chunk=MOE, schedule_chunks=True
    )
    names = [step.name for step in passes]
    place = names.index("chunk_pass")
    assert names[place - 1 : place + 3] == [
        "selective_activation_remat_pass",
        "chunk_pass",
        "chunk_schedule_pass",
        "reassign_collective_pgs_pass",
    ]
    assert "module_fqn='layers.*.moe'" in str(passes[place])
    assert (
        passes[place]
        != construct_default_graph_passes(n_layers=2, chunk=ChunkConfig("layers.*"))[place - 2]
    )


@pytest.mark.parametrize(
    ("config", "bucket", "message"),
    [
        (
            ChunkConfig("layers.*"),
            ["layers.0", "norm"],
            r"\[layers\.0, norm\] .* layers\.0 and, beyond .*, norm",
        ),
        (
            ChunkConfig("layers.*"),
            ["layers.1", "layers.10"],
            r"chunked layers\.1 and, beyond layers\.1, layers\.10",
        ),
        (
            MOE,
            ["layers.0.moe.router", "layers.1.norm"],
            r"layers\.0\.moe and, beyond layers\.0, layers\.1\.norm",
        ),
    ],
)
def test_buckets_that_reach_out_of_a_chunked_layer(config, bucket, message):
    """G20."""
    with pytest.raises(ChunkError, match=message):
        construct_default_graph_passes(bucket_plan=["tok_embeddings", bucket], chunk=config)


def test_buckets_within_a_layer():
    """G20: the default plan of a MoE layer holds the router with the attention."""
    passes = construct_default_graph_passes(
        n_layers=2, moe_layers=[1], expert_fsdp_degree=2, chunk=MOE
    )
    assert "chunk_pass" in [step.name for step in passes]


def test_a_pass_that_fails_leaves_both_graphs(monkeypatch):
    """D11."""
    config = strict("layers.*")
    traced = trace_step(net(chunkable.Dense)(), ce_step, token_batch(0), chunk=config)
    before = [copy.deepcopy(str(gm.graph)) for gm in (traced.gm, traced.twin)]

    def fail(*_):
        raise RuntimeError("half way")

    monkeypatch.setattr(rewrite, "finished", fail)
    with pytest.raises(RuntimeError, match="half way"):
        chunked(traced, config)
    assert [str(gm.graph) for gm in (traced.gm, traced.twin)] == before
