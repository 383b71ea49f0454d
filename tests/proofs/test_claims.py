"""Prove on the bundled models, kind by kind, what the project says is equal.

Two ranks have one order to add in; four ranks on two nodes have several.
"""

from dataclasses import replace

import pytest
import torch

from fixtures.chunking import strict, trace_by_eager_code, trace_by_graph
from fixtures.models.chunkable import VOCAB
from fixtures.models.chunked_loss import chunked_ce_step
from fixtures.models.loss import cross_entropy_sum
from fixtures.training import deepseek_v3_training, llama3_training, token_batches
from pytest_gtrainer import (
    ChunkConfig,
    apply_graph_passes,
    bind_options,
    canonicalize_graph_pass,
    chunk_pass,
    chunk_schedule_pass,
    deduplicate_fsdp_unshard_chains_pass,
    dense_flex_attention,
    eager_chunked,
    get_default_transformer_block_buckets,
    prove,
    reduce_scatter_before_all_reduce_pass,
    trace_step,
)
from pytest_gtrainer._torch.graph_bytes import bytes_of, graphs_of
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer.numerics.determinism import ActivationCheckpointConfig
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import rewrite, shard_traceably, trace_config
from tests.passes.chunking.test_equals_eager_chunking import BLOCKS, MOE, case_of

TRAININGS = {"llama3": llama3_training, "deepseek_v3": deepseek_v3_training}
VOCABULARY = 136
FLAVORS = {"llama3": "debug_odd", "deepseek_v3": "debug_odd_small"}


def world(size, **mesh):
    return pytest.mark.gt_world("simulated", size=size, mesh=mesh or {"fsdp": size}, nodes=2)


def inputs_of(gm, size, vocabulary=VOCABULARY):
    """Return inputs of each rank: numbers of its own, and its own tokens."""
    generator = torch.Generator().manual_seed(0)
    of_ranks = []
    for _ in range(size):
        own = []
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            if value.is_floating_point():
                drawn = torch.randn(value.shape, generator=generator).to(value.dtype)
            elif node.meta["gt_input"]["kind"] == "input":
                drawn = torch.randint(vocabulary, value.shape, generator=generator)
            else:
                drawn = torch.zeros(value.shape, dtype=value.dtype)  # a counter
            own.append(drawn)
        of_ranks.append(own)
    return of_ranks


def traced(config, prepare=lambda model: None, **options):
    """Return the graph of a step as it is traced, before any pass."""
    model = shard_traceably(new_model(config), config)
    prepare(model)
    if not options:
        return trace_config(config, model)
    return trace_step(model, config.step, config.inputs(0), **options)


def rewritten(step, *passes, **options):
    return apply_graph_passes(step.gm, step.example_inputs, passes, **options)


# --- each claim returns the graph that is made, and the one that it is equal to


def pipeline(config):
    step = traced(config)
    return rewrite(step, config).gm, step.gm


def pipeline_again(config):
    return rewrite(traced(config), config).gm, rewrite(traced(config), config).gm


def execution_order(config):
    step = traced(config)
    return rewrite(step, config, payload_order="execution").gm, rewrite(step, config).gm


def deduplicated(config):
    step = traced(config, reuse_gathers=False)
    return rewritten(step, canonicalize_graph_pass, deduplicate_fsdp_unshard_chains_pass), step.gm


def canonicalised(config):
    step = traced(config)
    return rewritten(step, canonicalize_graph_pass), step.gm


def resharded(config):
    step = traced(config)
    return rewrite(step, config, reshard_after_forward=True).gm, rewrite(step, config).gm


def checkpointed(config):
    again = replace(config, activation_checkpoint=ActivationCheckpointConfig())
    return traced(again).gm, traced(config).gm


def handed_over(config):
    """Return the graph as another rank reads it, and the original."""
    step = traced(config)
    device = torch.device("cpu")
    written = bytes_of([step.gm], (step.example_inputs,), device)
    (read,), _ = graphs_of(written, new_fake_mode(), device)
    return read, step.gm


def chunked(config, number=2, early=False, schedule=False):
    chunks = ChunkConfig("layers.*", num_chunks=number, early_grad_accumulation=early)
    step = traced(replace(config, chunk=chunks, trace_once=False))
    passes = [bind_options(chunk_pass, config=chunks)] + [chunk_schedule_pass] * schedule
    actual = rewritten(step, *passes, twin=step.twin)
    return actual, traced(config, lambda model: eager_chunked(model, chunks)).gm


def chunked_early(config):
    """Each chunk reads a weight once, so both ways add chunks in one order."""
    batch = token_batches(VOCABULARY, "cpu", batch=4)
    return chunked(replace(config, batch=batch), number=4, early=True)


def chunked_and_scheduled(config):
    return chunked(config, schedule=True)


def chunked_loss(config):
    return traced(replace(config, step=chunked_ce_step(4))).gm, traced(config).gm


def chunked_loss_in_the_pipeline(config):
    layers = len(new_model(config).layers)
    plan = get_default_transformer_block_buckets(layers, chunked_loss_enabled=True)
    own = replace(config, step=chunked_ce_step(4), bucket_plan=plan)
    step = traced(own)
    return rewrite(step, own).gm, step.gm


def accumulated(config):
    def step(model, tokens, labels):
        losses = []
        for part, wanted in zip(tokens.split(1), labels.split(1), strict=True):
            logits = model(part).flatten(0, 1)
            losses.append(cross_entropy_sum(logits, wanted.flatten()) / labels.numel())
        return sum(losses[1:], losses[0])

    return traced(replace(config, step=step)).gm, traced(config).gm


# By claim, its kind on two ranks and on four.
CLAIMS = {
    pipeline: ("identical", "reordered"),
    pipeline_again: ("identical", "identical"),
    execution_order: ("identical", "reordered"),
    deduplicated: ("identical", "identical"),
    canonicalised: ("identical", "identical"),
    resharded: ("identical", "identical"),
    checkpointed: ("identical", "identical"),
    handed_over: ("identical", "identical"),
    chunked: ("identical", "identical"),
    chunked_early: ("identical", "identical"),
    chunked_and_scheduled: ("identical", "identical"),
    chunked_loss: ("reordered", "reordered"),
    chunked_loss_in_the_pipeline: ("identical", "reordered"),
    accumulated: ("reordered", "reordered"),
}


QUICK = (pipeline,)
# test_on_two_nodes proves that four ranks get the same bits, which says more than two ranks can.
HELD_ON_NODES = [claim for claim, (_, four) in CLAIMS.items() if four == "identical"]
# They change what a rank adds by itself. Orders among ranks are those of ``pipeline``.
HELD_ON_TWO_RANKS = (chunked_loss, accumulated)


def check(claim, kind, model, precision, gt_mesh, gt_world):
    config = TRAININGS[model](gt_mesh, precision, FLAVORS[model], trace_once=False)
    actual, expected = claim(config)
    inputs = inputs_of(expected, gt_world.size)
    proof = prove(actual, expected, inputs=inputs, world=gt_world)
    assert proof.kind == kind, str(proof)
    assert proof.compared >= gt_world.size * 20


@pytest.mark.second_tier(*(claim.__name__ for claim in CLAIMS if claim not in QUICK))
@world(2)
@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(claim, id=claim.__name__, marks=[pytest.mark.long] * (claim in HELD_ON_NODES))
        for claim in CLAIMS
    ],
)
def test_on_two_ranks(claim, gt_mesh, gt_world):
    check(claim, CLAIMS[claim][0], "llama3", "fp32", gt_mesh, gt_world)


@pytest.mark.second_tier
@world(4)
@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(
            claim, id=claim.__name__, marks=[pytest.mark.long] * (claim in HELD_ON_TWO_RANKS)
        )
        for claim in CLAIMS
    ],
)
def test_on_two_nodes(claim, gt_mesh, gt_world):
    check(claim, CLAIMS[claim][1], "llama3", "fp32", gt_mesh, gt_world)


# A gradient that is added in bfloat16 is rounded after every part.
ROUNDED = {chunked_loss: "rounds elsewhere", accumulated: "rounds elsewhere"}


@pytest.mark.long
@world(4)
@pytest.mark.parametrize("model", TRAININGS)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_with_mixed_precision(claim, model, gt_mesh, gt_world):
    if claim is checkpointed and model == "deepseek_v3":
        pytest.skip("torch's checkpoint cannot be traced where sizes depend on a router")
    kind = ROUNDED.get(claim, CLAIMS[claim][1])
    check(claim, kind, model, "bf16_fp32", gt_mesh, gt_world)


# --- replicas of shards


def swapped(config):
    step = traced(config)
    return rewritten(step, reduce_scatter_before_all_reduce_pass), step.gm


def bucketed_in_replicas(config):
    return pipeline(config)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=4, mesh={"replicate": 2, "shard": 2}, nodes=2)
@pytest.mark.parametrize(
    "claim",
    [
        # test_mistakes proves it on a smaller model, as "replicas, right".
        pytest.param(swapped, id="swapped", marks=pytest.mark.long),
        pytest.param(bucketed_in_replicas, id="bucketed_in_replicas"),
    ],
)
def test_replicas_of_shards(claim, gt_mesh, gt_world):
    check(claim, "reordered", "llama3", "fp32", gt_mesh, gt_world)


# --- chunks in one process


SLOW = (
    "sdpa",
    "flex",
    "plain",
    "moe between",
    "moe loop",
    "weight shared",
    "chunked",
    "moe grouped",
)


SECOND = (
    *SLOW,
    "checkpointed",
    "offloaded",
    "rematerialised",
    "dropout",
    "factories",
    "moe passed",
    "moe before",
    "cast",
    "weight used",
    "transposed",
)


def chunkings():
    """Yield blocks with numbers of chunks.

    Four chunks have a first, a last and those between, and an order of additions; two have neither.
    Numbers of two chunks are compared in test_equals_eager_chunking, and those of experts in a
    loop.
    """
    for name in [*BLOCKS, *(f"moe {name}" for name in MOE)]:
        for chunks in (2, 4):
            is_long = name == "moe loop" or (chunks == 2 and name.startswith(SECOND))
            marks = [pytest.mark.long] * is_long
            yield pytest.param(name, chunks, marks=marks)


@pytest.mark.second_tier(*SECOND)
@pytest.mark.parametrize(("name", "chunks"), chunkings())
def test_chunks_against_eager_chunking(name, chunks):
    """So proven for any numbers, what is tested for some."""
    given = BLOCKS.get(name) or MOE[name.removeprefix("moe ")]
    root = "layers.*.moe" if name.startswith("moe ") else "layers.*"
    with dense_flex_attention():
        case = case_of(given, strict(root, num_chunks=chunks), torch.float32, steps=1)
        actual = trace_by_graph(case, case.new_model()).gm
        expected = trace_by_eager_code(case, case.new_model()).gm
        (inputs,) = inputs_of(expected, 1, VOCAB)
        proof = prove(actual, expected, inputs=inputs)
    assert proof.kind == "identical", str(proof)
