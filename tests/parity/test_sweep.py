"""The settings that decide bits, all combined: the rewritten graph against eager ``fully_shard``,
for both models.

On two nodes, where the order of a payload shows: the cells in execution order must differ, or the
net shows nothing.
"""

from dataclasses import replace
from typing import Any

import pytest

from fixtures.models.chunked_loss import chunked_ce_step
from fixtures.training import deepseek_v3_training, llama3_training, token_batches
from pytest_gtrainer import ChunkConfig, Record, Rule, Sweep, dense_flex_attention, train_eager
from pytest_gtrainer.numerics.sweep import Cell
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.references.simulated import SimulatedGraphRun
from pytest_gtrainer.worlds.spec import World

pytestmark = pytest.mark.second_tier

MODELS = {"llama3": llama3_training, "deepseek_v3": deepseek_v3_training}
CHUNKS = {"llama3": ChunkConfig("layers.*"), "deepseek_v3": ChunkConfig("layers.*.moe", "sequence")}
FLAVORS = {"sdpa": "debug", "flex": "debug_flex"}
REWRITTEN = {"remat": (False, True), "order": ("managed", "execution")}
"""What one trace is rewritten for."""
AXES: dict[str, tuple[Any, ...]] = {
    "attention": ("sdpa", "flex"),
    "cuda_graph": (False, True),
    "batch": (2, 4),
    "loss_chunks": (1, 2),
    "early_accumulation": (False, True),
    "world": (4, 8),
    **REWRITTEN,
}
RULES = (
    Rule("not judged", {"cuda_graph": True}, reason="CUDA graphs need a GPU"),
    Rule(
        "different",
        {"order": "execution"},
        reason="a ring adds an element in an order that depends on its place",
    ),
    Rule(
        "equal",
        {"early_accumulation": True},
        to="eager fully_shard of the same cell, its blocks run in chunks",
    ),
    Rule("equal", to="eager fully_shard of the same cell"),
)
SWEEPS = {name: Sweep(name, AXES, RULES) for name in MODELS}
STEPS = {"llama3": 2, "deepseek_v3": 1}
# attention, loss_chunks, early_accumulation; of these each remat, the first in both orders
SHORT = {
    "llama3": [("sdpa", 2, True), ("flex", 1, False)],
    "deepseek_v3": [("flex", 2, False)],
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
    settings = (cell["attention"], cell["loss_chunks"], cell["early_accumulation"])
    if settings not in SHORT[name] or (cell["batch"], cell["world"]) != (2, 4):
        return False
    return cell["order"] == "managed" or (settings == SHORT[name][0] and not cell["remat"])


def configuration(name: str, cell: Cell, mesh) -> TrainConfig:
    built = MODELS[name](mesh, "fp32", FLAVORS[cell["attention"]], steps=STEPS[name])
    changes: dict[str, Any] = {
        "batch": token_batches(built.model().config.vocab_size, "cpu", batch=cell["batch"])
    }
    if cell["loss_chunks"] > 1:  # which reads the head itself
        *others, last = built.bucket_plan
        changes |= {
            "step": chunked_ce_step(cell["loss_chunks"]),
            "bucket_plan": [*others, [*last, "loss"]],
        }
    if cell["early_accumulation"]:
        changes["chunk"] = CHUNKS[name]
    return replace(built, **changes)


class Trained:
    """Both sides of all cells that differ only in how the graph is rewritten; those of one trace
    are kept.
    """

    _latest: "tuple[Any, Trained] | None" = None

    def __init__(self, name: str, cell: Cell, world: World) -> None:
        def config(mesh):
            return configuration(name, cell, mesh)

        self._run = SimulatedGraphRun(config, world)
        self.eager = train_eager(config, world=world)

    @classmethod
    def of(cls, name: str, cell: Cell, world: World) -> "Trained":
        key = name, [(axis, value) for axis, value in cell.settings if axis not in REWRITTEN]
        if cls._latest is None or cls._latest[0] != key:
            cls._latest = key, cls(name, cell, world)
        return cls._latest[1]

    def sides(self, cell: Cell) -> tuple[Record, Record]:
        run = self._run.rewritten(reshard_after_forward=cell["remat"], payload_order=cell["order"])
        return run.run(), self.eager


@pytest.mark.parametrize(("name", "cell"), _cells())
def test_sweep(name: str, cell: Cell, request: pytest.FixtureRequest):
    with SWEEPS[name].judging(cell) as judge, dense_flex_attention():
        judge(*Trained.of(name, cell, request.getfixturevalue("gt_world")).sides(cell))
