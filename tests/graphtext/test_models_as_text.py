"""The bundled models, traced and bucketed: their text folds, is Python, and loses no line."""

import ast
import copy
import dataclasses
import difflib
import re
from pathlib import Path

import pytest

from fixtures.models import deepseek_v3, llama3
from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer.graph.nodes import node_fqn
from pytest_gtrainer.graphtext import constants, header, lines_of, parse, render, unfold
from pytest_gtrainer.numerics.compare import assert_bitwise_different, assert_bitwise_equal
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import GraphRun, rewrite, shard_traceably, trace_config
from tests.graphtext.same import assert_same_graph

pytestmark = pytest.mark.second_tier

ARCHITECTURES = {
    "llama3": (llama3.FLAVORS, llama3_training, 600),
    "deepseek_v3": (deepseek_v3.FLAVORS, deepseek_v3_training, 1800),
}


def text_and_records(mesh, monkeypatch, architecture: str, layers: int):
    flavors, training, _ = ARCHITECTURES[architecture]
    monkeypatch.setitem(flavors, "this", dataclasses.replace(flavors["debug"], n_layers=layers))
    config = training(mesh, "bf16_fp32", "this")
    gm = rewrite(trace_config(config, shard_traceably(config.model(), config)), config).gm
    return render(gm, mesh={"fsdp": 8}), lines_of(gm, mesh={"fsdp": 8})


@pytest.mark.gt_world("fake", size=8)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_told_and_read_back(gt_mesh, monkeypatch, architecture):
    """Traced, and bucketed: operators, operands, metadata, and with them what the passes do."""
    flavors, training, most_lines = ARCHITECTURES[architecture]
    monkeypatch.setitem(flavors, "this", dataclasses.replace(flavors["debug"], n_layers=4))
    config = training(gt_mesh, "bf16_fp32", "this")
    traced = trace_config(config, shard_traceably(config.model(), config))
    again = traced.with_graph(read_back(traced.gm))
    assert_same_graph(again.gm, traced.gm)
    bucketed, bucketed_again = rewrite(traced, config), rewrite(again, config)
    assert render(bucketed_again.gm) == render(bucketed.gm)
    assert_same_graph(read_back(bucketed.gm), bucketed.gm)
    text = render(bucketed.gm, mesh={"fsdp": 8})
    assert unfold(text) == lines_of(bucketed.gm, mesh={"fsdp": 8})
    ast.parse(text)
    assert len(text.splitlines()) < most_lines, "equal layers are shown once"
    assert "with bucket(layers[i+1]" in text
    assert "fsdp = group(range(0, 8))" in text


@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize(
    "architecture", ["llama3", pytest.param("deepseek_v3", marks=pytest.mark.long)]
)
def test_a_model_read_back_trains_to_the_same_bits(gt_mesh, architecture):
    """On real ranks; in the twin one number of the text is another."""
    training = ARCHITECTURES[architecture][1]
    config = training(gt_mesh, "fp32", "debug_odd", steps=2)
    expected = GraphRun(config)
    again, other = with_another_model(expected), with_another_model(expected)
    again.traced = again.traced.with_graph(read_back(again.traced.gm))
    text = render(other.traced.gm)
    changed = text.replace(", 1e-05)", ", 2e-05)")
    assert changed != text
    other.traced = other.traced.with_graph(parse(changed, constants=constants(other.traced.gm)))
    record = expected.run()
    assert_bitwise_equal(again.run(), record)
    assert_bitwise_different(other.run(), record)


def with_another_model(run: GraphRun) -> GraphRun:
    """A model of its own, with the same weights, for the same graph: tracing is what takes time."""
    other = copy.copy(run)
    other.model = shard_traceably(new_model(run.config), run.config)
    return other


def read_back(gm):
    text = render(gm)
    again = parse(text, constants=constants(gm))
    assert render(again) == text
    return again


@pytest.mark.long
@pytest.mark.gt_world("fake", size=8)
def test_the_text_of_126_layers_is_readable(gt_mesh, monkeypatch):
    text, lines = text_and_records(gt_mesh, monkeypatch, "llama3", layers=126)
    assert unfold(text) == lines
    assert len(text.splitlines()) <= 700
    assert change_in(text, layer=63) == changed_layer(63, of=126)


def test_a_change_in_one_layer_unfolds_just_that_one():
    golden = Path(__file__).parents[2] / "golden/tests/parity/test_llama3_8b"
    text = (golden / "test_llama3_8b_under_64_ranks_is_pinned.fxgraph").read_text()
    assert change_in(text, layer=16) == changed_layer(16, of=32)


def changed_layer(layer: int, of: int) -> list[str]:
    """All lines that a golden of so many layers loses and gains."""
    return [
        f"-for i in fwd.layers[1:{of - 1}]:  # x{of - 2}",
        f"+for i in fwd.layers[1:{layer}]:  # x{layer - 1}",
        f"+for i in fwd.layers[{layer}]:  # as fwd.layers[1], but for",
        "+  like(fwd.layers[1])",
        "+  with L.attention_norm:",
        "+    add = aten.add.Tensor(mean, 2e-05)",
        f"+for i in fwd.layers[{layer + 1}:{of - 1}]:  # x{of - layer - 2}, as fwd.layers[1]",
        "+  like(fwd.layers[1])",
    ]


def change_in(text: str, layer: int) -> list[str]:
    """Return the changed lines of a text, without types, when one number of one layer changes."""
    gm = parse(text)
    norm = next(
        n
        for n in gm.graph.nodes
        if 1e-05 in n.args and node_fqn(n) == f"layers.{layer}.attention_norm"
    )
    norm.args = (*norm.args[:-1], 2e-05)
    old, new = (header.body(each).splitlines() for each in (text, render(gm, mesh={"fsdp": 8})))
    changes = [
        line
        for line in difflib.unified_diff(old, new, n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    return [re.sub(r": f32\[.*\] =", " =", line) for line in changes]
