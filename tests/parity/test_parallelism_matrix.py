"""The kinds of parallelism that people train with, all combined: the rewritten graph against eager
``fully_shard``.

On 4 and 8 ranks, and on simulated nodes of 8, where the order of a sum shows: two, and also eight,
of DeepSeek-V3 with fewer cells, as each takes minutes. A control of every cell must differ:
payloads in another order or, where that does not show, gradients reduced in bf16. CONTRIBUTING.md
has the command for all cells; ``make test`` and ``make check`` run some.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.training import Parallelism, deepseek_v3_training, llama3_training
from pytest_gtrainer import Rule, Sweep, Verdict, World, assert_parity, train_graph
from pytest_gtrainer.numerics.compare import compare
from pytest_gtrainer.numerics.sweep import Cell
from pytest_gtrainer.references.replicas import texts_of_ranks

MODELS = {
    "llama3": llama3_training,
    "deepseek_v3": deepseek_v3_training,
    "deepseek_v3_wide": deepseek_v3_training,
}
FLAVORS = {"llama3": "debug", "deepseek_v3": "debug_small"}
SIMULATED = {  # shards are alike
    16: {"llama3": "debug", "deepseek_v3": "debug_sixteen"},
    64: {"llama3": "debug_64", "deepseek_v3_wide": "debug_64"},
}
TENSOR = {"none": None, "tp": {}, "tp_sp": {"sequence": True}}
SHARED: dict[str, tuple[Any, ...]] = {
    "shard": ("fsdp", "hsdp"),
    "context": ("none", "gather", "ulysses"),
    "precision": ("fp32", "bf16_fp32"),
    "reshard": (False, True),
    "world": (4, 8, 16),
}
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama3": {"tensor": ("none", "tp", "tp_sp"), **SHARED, "world": (4, 8, 16, 64)},
    "deepseek_v3": {"tensor": ("none", "tp", "tp_sp"), "experts": (False, True), **SHARED},
    "deepseek_v3_wide": {
        "tensor": ("none", "tp", "tp_sp"),
        "experts": (False, True),
        "shard": ("fsdp", "hsdp"),
        "context": ("none", "ulysses"),
        "precision": ("bf16_fp32",),
        "reshard": (True,),
        "world": (64,),
    },
}
CONTEXTS = ("gather", "ulysses")
TPS = ("tp", "tp_sp")
NESTED = Rule(
    "refused",
    {"experts": True, "shard": "hsdp"},
    reason="submeshes beside a 2-D mesh are not supported",
)
PARITY = Rule("equal", to="eager fully_shard of the same cell, and its control is different")


def _rules(name: str) -> tuple[Rule, ...]:
    if name == "deepseek_v3_wide":
        return (NESTED, PARITY)
    no_experts = {"experts": False} if name == "deepseek_v3" else {}
    few = "two data ranks, and more dimensions than these ranks have"
    rules = [
        Rule("not judged", {"world": 4, "shard": "hsdp", "tensor": TPS}, reason=few),
        Rule(
            "not judged",
            {"world": 4, "shard": "hsdp", "context": CONTEXTS, **no_experts},
            reason=few,
        ),
        Rule(
            "not judged", {"world": 4, "tensor": TPS, "context": CONTEXTS, **no_experts}, reason=few
        ),
        Rule(
            "not judged",
            {"world": 8, "shard": "hsdp", "tensor": TPS, "context": CONTEXTS, **no_experts},
            reason=few,
        ),
    ]
    if name == "deepseek_v3":
        rules[0:0] = [
            Rule("not judged", {"experts": True, "world": 4, "tensor": TPS}, reason=few),
            Rule("not judged", {"experts": True, "world": 4, "shard": "hsdp"}, reason=few),
            NESTED,
        ]
    # a causal mask begins at the rank's own place in the gathered sequence
    for world in (world for world, flavors in SIMULATED.items() if name in flavors):
        rules.append(
            Rule(
                "refused",
                {"world": world, "context": "gather"},
                reason="the graph depends on the rank",
            )
        )
    return (*rules, PARITY)


SWEEPS = {name: Sweep(f"{name} in parallel", axes, _rules(name)) for name, axes in AXES.items()}
DIAGONAL = {  # in the second tier; the first has tests/parity/test_tensor_parallel.py
    "llama3": [
        "tp_sp-fsdp-none-fp32-reshard_on-world4",
        "tp-fsdp-gather-bf16_fp32-reshard_off-world8",
    ],
    "deepseek_v3": [
        "tp-experts_on-fsdp-none-bf16_fp32-reshard_off-world8",
        "tp_sp-experts_off-fsdp-none-fp32-reshard_on-world4",
        "none-experts_on-hsdp-none-fp32-reshard_off-world8",
    ],
    "deepseek_v3_wide": [],
}


def mesh_of(cell: Cell) -> dict[str, int]:
    """Dimensions of the cell's world, outermost first; the one that shards takes what ranks the
    others leave.
    """
    settings = dict(cell.settings)
    experts = settings.get("experts", False)
    inner = {
        "cp": settings["context"] != "none" and not experts,
        "tp": settings["tensor"] != "none",
    }
    dims = {"replicate": 2} if settings["shard"] == "hsdp" else {}
    last = {
        **({"ep": 2} if experts else {}),
        **{name: 2 for name, wanted in inner.items() if wanted},
    }
    rest = settings["world"]
    for extent in (*dims.values(), *last.values()):
        rest //= extent
    return {**dims, "efsdp" if experts else "dp": rest, **last}


def _cells() -> list[Any]:
    params = []
    for name, sweep in SWEEPS.items():
        for cell in sweep.cells:
            marks = [] if str(cell) in DIAGONAL[name] else [pytest.mark.long]
            if sweep.rule(cell).claim != "not judged":
                kind, nodes = (
                    ("simulated", cell["world"] // 8)
                    if cell["world"] in SIMULATED
                    else ("ranks", 1)
                )
                marks.append(
                    pytest.mark.gt_world(kind, size=cell["world"], nodes=nodes, mesh=mesh_of(cell))
                )
            params.append(pytest.param(name, cell, id=f"{name}-{cell}", marks=marks))
    return params


def test_the_diagonal_stands_for_cells():
    cells = {f"{name}-{cell}" for name, sweep in SWEEPS.items() for cell in sweep.cells}
    assert {f"{name}-{cell}" for name, chosen in DIAGONAL.items() for cell in chosen} <= cells


@pytest.mark.second_tier("llama3", "deepseek_v3-tp")
@pytest.mark.filterwarnings("ignore::pytest_gtrainer.references.replicas.ReplicaWarning")
@pytest.mark.parametrize(("name", "cell"), _cells())
def test_parallelism(name: str, cell: Cell, request: pytest.FixtureRequest):
    with SWEEPS[name].judging(cell) as judge:
        world = request.getfixturevalue("gt_world")
        context = None if cell["context"] == "none" else cell["context"]
        flavor = SIMULATED.get(cell["world"], FLAVORS)[name]
        parallel = Parallelism(TENSOR[cell["tensor"]], context)

        def config(mesh, **changes):
            return MODELS[name](
                mesh, cell["precision"], flavor, parallel=parallel, steps=2, **changes
            )

        def reduced_in_bf16(mesh):
            built = config(mesh)
            return replace(
                built, steps=1, mp_policy=replace(built.mp_policy, reduce_dtype=torch.bfloat16)
            )

        parity = assert_parity(
            config, world, reshard_after_forward=cell["reshard"], invisible="report"
        )
        judge(parity.graph, parity.eager)
        if _differs(world, parity.control):  # payloads in another order have other bits
            return
        control = train_graph(reduced_in_bf16, world=world)
        gradients = {str(key): value for key, value in control.items() if key.phase == "gradient"}
        assert _differs(
            world, compare(gradients, {key: _by_name(parity.graph)[key] for key in gradients})
        )


def _differs(world: World, control: Verdict) -> bool:
    """On some rank."""
    return "different" in (
        texts_of_ranks(control.outcome) if world.kind == "ranks" else [control.outcome]
    )


def _by_name(record):
    return {str(key): value for key, value in record.items()}
