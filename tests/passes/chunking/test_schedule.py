"""Chunks that take turns: one's exchange runs while another computes, and no bit changes."""

import copy
from functools import partial

import pytest
import torch

from fixtures.chunking import (
    PRODUCERS,
    Case,
    check_equals_eager,
    chunked,
    strict,
    train_chunked_graph,
    train_eager_chunked,
)
from fixtures.models import deepseek_v3
from fixtures.models.expert_parallel import apply_expert_parallel
from fixtures.models.loss import ce_step
from fixtures.training import token_batches
from pytest_gtrainer import (
    ChunkError,
    assert_bitwise_different,
    assert_bitwise_equal,
    chunk_schedule_pass,
    eager_chunked,
    trace_step,
)
from pytest_gtrainer._torch.passes import ALL_TO_ALL, WAIT
from pytest_gtrainer.passes.chunking import schedule

CONFIG = strict("layers.*.moe", num_chunks=2)
MODEL = deepseek_v3.DeepSeekV3Config(
    dim=16,
    n_layers=1,
    n_dense_layers=0,
    n_heads=2,
    q_lora_rank=0,
    kv_lora_rank=8,
    ffn_dim=24,
    vocab_size=40,
    moe=deepseek_v3.MoEConfig(n_experts=4, ffn_dim=12),
)
BATCH = token_batches(MODEL.vocab_size, "cpu", batch=4, seq=8)


def model_on(mesh):
    model = deepseek_v3.DeepSeekV3(MODEL)
    model.init_weights()
    return apply_expert_parallel(model, mesh)


def by_graph(model):
    return chunked(trace_step(model, ce_step, BATCH(0, 0), chunk=CONFIG), CONFIG)


def by_eager_code(model):
    with eager_chunked(model, CONFIG):
        return trace_step(model, ce_step, BATCH(0, 0)).gm


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture
def graph(gt_mesh, kept):
    """``graph(producer)``: the chunked graph, for this test alone; it is traced once."""

    def make(producer=by_graph):
        if producer not in kept:
            kept[producer] = producer(model_on(gt_mesh["ep"]))
        return copy.deepcopy(kept[producer])

    return make


def launches_and_waits(gm, direction):
    """Return the all-to-alls in order: the chunk, and whether it is launched or waited for."""
    for node in gm.graph.nodes:
        chunk = (node.meta.get("custom") or {}).get("chunk_id")
        exchanges = node.target is ALL_TO_ALL or (
            node.target is WAIT and node.args[0].target is ALL_TO_ALL
        )
        if exchanges and bool(node.meta.get("autograd_backward")) == (direction == "bwd"):
            yield f"{'launch' if node.target is ALL_TO_ALL else 'wait'} {chunk}"


@pytest.mark.second_tier("by_eager_code")
@pytest.mark.gt_world("fake", size=2, mesh={"ep": 2})
@pytest.mark.parametrize("producer", [by_graph, by_eager_code])
def test_the_order_of_exchanges(graph, producer):
    """I3: from either producer; counts, dispatch and combine forwards, two exchanges backwards,
    last chunk first.
    """
    gm = graph(producer)
    before = list(gm.graph.nodes)
    chunk_schedule_pass(gm)
    turn = ["wait 0", "launch 0", "wait 1", "launch 1"]
    forwards = ["launch 0", "launch 1", *turn, *turn, "wait 0", "wait 1"]
    assert list(launches_and_waits(gm, "fwd")) == forwards
    backwards = [
        "launch 1",
        "launch 0",
        "wait 1",
        "launch 1",
        "wait 0",
        "launch 0",
        "wait 1",
        "wait 0",
    ]
    assert list(launches_and_waits(gm, "bwd")) == backwards
    assert sorted(before, key=id) == sorted(gm.graph.nodes, key=id)


@pytest.mark.gt_world("fake", size=2, mesh={"ep": 2})
def test_a_second_run_changes_nothing(graph):
    gm = chunk_schedule_pass(graph())
    once = list(gm.graph.nodes)
    assert list(chunk_schedule_pass(gm).graph.nodes) == once


@pytest.mark.gt_world("fake", size=2, mesh={"ep": 2})
def test_inputs_keep_their_order(graph):
    """An input of the backward that belongs to a chunk has its annotation, like the nodes of the
    chunk.
    """
    gm = graph()
    before = list(gm.graph.nodes)
    found = gm.graph.find_nodes(op="call_function", target=ALL_TO_ALL)[0].meta["custom"]
    inputs = [node for node in before if node.op == "placeholder"]
    for place, node in enumerate(inputs):
        node.meta["custom"] = {**found, "chunk_id": (place + 1) % 2}
    chunk_schedule_pass(gm)
    assert list(gm.graph.nodes)[: len(inputs)] == inputs
    assert list(gm.graph.nodes) != before


def case_on(gt_world, **fields):
    """Every rank has other tokens, so every exchange other sizes."""
    return Case(
        config=CONFIG,
        batch=lambda step: BATCH(step, gt_world.rank),
        arrange=chunk_schedule_pass,
        **fields,
    )


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"ep": 2})
def test_no_bit_changes(gt_world, gt_mesh):
    """Both producers run three steps with data-dependent splits; buffers count chunk by chunk."""
    check_equals_eager(case_on(gt_world, model=partial(model_on, gt_mesh["ep"])), *PRODUCERS)


class Noisy(torch.nn.Module):
    """Noise before and behind the experts."""

    def __init__(self, moe) -> None:
        super().__init__()
        self.inner = moe

    def forward(self, x):
        return self.inner(x + torch.rand_like(x)) + torch.rand_like(x)


def noisy_model_on(mesh):
    model = model_on(mesh)
    model.layers[0].moe = Noisy(model.layers[0].moe)
    return model


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"ep": 2})
def test_chunks_that_take_turns_regardless_of_random_numbers(gt_world, gt_mesh, monkeypatch):
    """G15, the twin: other noise, other bits; the honest schedule keeps them."""
    case = case_on(gt_world, model=partial(noisy_model_on, gt_mesh["ep"]), steps=1)
    expected = train_eager_chunked(case)
    assert_bitwise_equal(train_chunked_graph(case)[0], expected, what="noise in its order")

    def by_operands_alone(nodes, region_of, storages):
        if region_of:  # chunk_pass, which stays as it is
            return dependencies(nodes, region_of, storages)
        return {node: dict.fromkeys(node.all_input_nodes) for node in nodes}

    dependencies = schedule.dependencies
    monkeypatch.setattr(schedule, "dependencies", by_operands_alone)
    assert_bitwise_different(train_chunked_graph(case)[0], expected, what="noise in turns")


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"ep": 2})
def test_random_numbers_and_writes_keep_their_order(gt_mesh):
    """G15: also where that keeps chunks from taking turns."""
    gm = by_graph(noisy_model_on(gt_mesh["ep"]))
    effects = ("rand_like", "add_.Tensor")
    before = [node for node in gm.graph.nodes if any(name in str(node.target) for name in effects)]
    chunk_schedule_pass(gm)
    assert [node for node in gm.graph.nodes if node in set(before)] == before
    assert len(before) > 4


@pytest.mark.gt_world("fake", size=2, mesh={"ep": 2})
def test_an_exchange_that_belongs_to_no_chunk(graph):
    gm = graph()
    second = gm.graph.find_nodes(op="call_function", target=ALL_TO_ALL)[1]
    second.meta["custom"] = {"module_fqn": second.meta["custom"]["module_fqn"]}
    with pytest.raises(
        ChunkError, match=rf"{second.name} .* exchange of the chunked module layers\.0\.moe, but no"
    ):
        chunk_schedule_pass(gm)


@pytest.mark.gt_world("fake", size=2, mesh={"ep": 2})
def test_chunks_with_different_exchanges(graph):
    gm = graph()
    moved = gm.graph.find_nodes(op="call_function", target=ALL_TO_ALL)[-1]
    moved.meta["custom"] = {**moved.meta["custom"], "chunk_id": 1}
    with pytest.raises(
        ChunkError, match=r"layers\.0\.moe \(bwd\) do not have the same exchanges .*chunk 0 has"
    ):
        chunk_schedule_pass(gm)
