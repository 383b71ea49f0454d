"""Pipelines, all combined: graphs of stages in the order of torch's schedules against its own, of
eager stages.

On 4 and 8 ranks. The control of every cell reduces gradients in bf16, and must differ.
CONTRIBUTING.md has the command for all cells, ``make check`` runs some.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.pipeline import train_pipeline_eager, train_pipeline_graph
from fixtures.training import staged_training
from pytest_gtrainer import Rule, Sweep, assert_bitwise_different
from pytest_gtrainer.numerics.sweep import Cell

ZERO_BUBBLES = ("InterleavedZeroBubble", "ZBVZeroBubble")
AXES: dict[str, tuple[Any, ...]] = {
    "model": ("llama3", "deepseek_v3"),
    "schedule": ("GPipe", "1F1B", "Interleaved1F1B", *ZERO_BUBBLES),
    "precision": ("fp32", "bf16_fp32"),
    "world": (4, 8),
}
RULES = (
    Rule(
        "not judged",
        {"schedule": "ZBVZeroBubble"},
        reason="torch loses gradients here, and no other has these stages",
    ),
    Rule(
        "equal",
        {"schedule": "InterleavedZeroBubble"},
        to="torch's Interleaved1F1B: its zero bubble loses gradients",
    ),
    Rule("equal", to="torch's schedule of eager stages of fully_shard"),
)
PIPELINES = Sweep("pipelines", AXES, RULES)
DIAGONAL = (
    "deepseek_v3-1F1B-bf16_fp32-world4",
)  # in the second tier; tests/parity/test_pipeline.py has llama3


def _cells() -> list[Any]:
    params = []
    for cell in PIPELINES.cells:
        marks = [] if str(cell) in DIAGONAL else [pytest.mark.long]
        if PIPELINES.rule(cell).claim != "not judged":
            mesh = {"pp": 2, "dp": cell["world"] // 2}
            marks.append(pytest.mark.gt_world("ranks", size=cell["world"], mesh=mesh))
        params.append(pytest.param(cell, id=str(cell), marks=marks))
    return params


def test_the_diagonal_stands_for_cells():
    assert set(DIAGONAL) <= {str(cell) for cell in PIPELINES.cells}


@pytest.mark.second_tier
@pytest.mark.parametrize("cell", _cells())
def test_pipeline(cell: Cell, request: pytest.FixtureRequest):
    """Losses, gradients, weights, optimiser state and what experts have counted."""
    with PIPELINES.judging(cell) as judge:
        mesh, schedule = request.getfixturevalue("gt_mesh"), cell["schedule"]
        stages = 2 if schedule in ("GPipe", "1F1B") else 4
        config = staged_training(mesh, cell["precision"], schedule, cell["model"], stages=stages)
        eager = replace(config, schedule="Interleaved1F1B") if schedule in ZERO_BUBBLES else config
        expected = train_pipeline_eager(eager)
        judge(train_pipeline_graph(config), expected)
        policy = replace(config.train.mp_policy, reduce_dtype=torch.bfloat16)
        control = train_pipeline_graph(
            replace(config, train=replace(config.train, mp_policy=policy))
        )
        gradients = {key: tensor for key, tensor in control.items() if key.phase == "gradient"}
        assert_bitwise_different(
            gradients, {key: tensor for key, tensor in expected.items() if key in gradients}
        )
