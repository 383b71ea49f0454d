"""The bundled models, traced and bucketed: their text folds, is Python, and loses no line."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from fixtures.models import deepseek_v3, llama3
from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer.graphtext import records, render, unfold
from pytest_gtrainer.references.graph import rewrite, shard_traceably, trace_config

ARCHITECTURES = {
    "llama3": (llama3.FLAVORS, llama3_training, 600),
    "deepseek_v3": (deepseek_v3.FLAVORS, deepseek_v3_training, 1800),
}


def text_and_records(mesh, monkeypatch, architecture: str, layers: int):
    flavors, training, _ = ARCHITECTURES[architecture]
    monkeypatch.setitem(flavors, "this", dataclasses.replace(flavors["debug"], n_layers=layers))
    config = training(mesh, "bf16_fp32", "this")
    gm = rewrite(trace_config(config, shard_traceably(config.model(), config)), config).gm
    return render(gm, mesh={"fsdp": 8}), records(gm, mesh={"fsdp": 8})


@pytest.mark.gt_world("fake", size=8)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_bucketed_model(gt_mesh, monkeypatch, architecture):
    text, lines = text_and_records(gt_mesh, monkeypatch, architecture, layers=6)
    assert unfold(text) == lines
    ast.parse(text)
    assert len(text.splitlines()) < ARCHITECTURES[architecture][2], "equal layers are told once"
    assert "with bucket(layers[i+1]" in text
    assert "fsdp = group(range(0, 8))" in text
