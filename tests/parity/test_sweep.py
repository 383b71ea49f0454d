"""The settings that decide bits, all combined: the rewritten graph against eager ``fully_shard``, for both models.

On two nodes, where the order of a payload shows: the cells in execution order must differ, or the net shows nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fixtures.models.chunked_loss import chunked_ce_step
from fixtures.training import deepseek_v3_training, llama3_training, token_batches
from pytest_gtrainer import Rule, Sweep, train_eager
from pytest_gtrainer.numerics.sweep import Cell
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.worlds.simulated.graph_training import SimulatedGraphRun

MODELS = {"llama3": llama3_training, "deepseek_v3": deepseek_v3_training}
AXES: dict[str, tuple[Any, ...]] = {
    "attention": ("sdpa", "flex"),
    "cuda_graph": (False, True),
    "batch": (1, 2),
    "loss_chunks": (1, 2),
    "remat": (False, True),
    "early_accumulation": (False, True),
    "order": ("managed", "execution"),
    "world": (4, 8),
}
RULES = (
    Rule("not judged", {"cuda_graph": True}, reason="CUDA graphs need a GPU"),
    Rule("not judged", {"attention": "flex"}, reason="torch has no backward of FlexAttention on CPU"),
    Rule("not judged", {"early_accumulation": True}, reason="only chunked blocks do: see tests/passes/chunking"),
    Rule("different", {"order": "execution"}, reason="a ring adds an element in an order that depends on its place"),
    Rule("equal", to="eager fully_shard of the same cell"),
)
SWEEPS = {name: Sweep(name, AXES, RULES) for name in MODELS}
STEPS = {"llama3": 2, "deepseek_v3": 1}
SHORT = {  # batch, loss_chunks, remat
    "llama3": {(1, 1, False), (2, 2, True)},
    "deepseek_v3": {(1, 2, True)},
}


def _cells() -> list[Any]:
    params = []
    for name, sweep in SWEEPS.items():
        for cell in sweep.cells:
            marks = [] if _is_short(name, cell) else [pytest.mark.long]
            if sweep.rule(cell).claim != "not judged":
                marks.append(pytest.mark.gt_world("simulated", size=cell["world"], nodes=2))
            params.append(pytest.param(name, cell, id=f"{name}-{cell}", marks=marks))
    return params


def _is_short(name: str, cell: Cell) -> bool:
    settings = (cell["batch"], cell["loss_chunks"], cell["remat"])
    first = min(SHORT[name])
    return cell["world"] == 4 and (settings == first if cell["order"] == "execution" else settings in SHORT[name])


def configuration(name: str, cell: Cell, mesh) -> TrainConfig:
    built = MODELS[name](mesh, "fp32", steps=STEPS[name])
    changes: dict[str, Any] = {"batch": token_batches(built.model().config.vocab_size, "cpu", batch=cell["batch"])}
    if cell["loss_chunks"] > 1:  # which reads the head itself
        *others, last = built.bucket_plan
        changes |= {"step": chunked_ce_step(cell["loss_chunks"]), "bucket_plan": [*others, [*last, "loss"]]}
    return replace(built, **changes)


@pytest.mark.parametrize(("name", "cell"), _cells())
def test_sweep(name: str, cell: Cell, request: pytest.FixtureRequest):
    with SWEEPS[name].judging(cell) as judge:
        world = request.getfixturevalue("gt_world")

        def config(mesh):
            return configuration(name, cell, mesh)

        graph = SimulatedGraphRun(config, world, payload_order=cell["order"], reshard_after_forward=cell["remat"])
        judge(graph.run(), train_eager(config, world=world))
