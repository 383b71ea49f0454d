"""FSDP2, tensor, sequence, expert, context and pipeline parallelism compute the unsharded model.

Each case is a combination on 8 simulated ranks, of torch's own code but for the exchange of
experts and of a context.
"""

from dataclasses import replace

import pytest

from fixtures.combinations import DEEPSEEK_V3, LLAMA3, Combination
from fixtures.models.loss import ce_step
from pytest_gtrainer import assert_same_model

ROUTED = replace(DEEPSEEK_V3, moe=replace(DEEPSEEK_V3.moe, force_load_balance=False))
GROUPED = replace(LLAMA3, n_kv_heads=2)

COMBINATIONS = {
    "dp8": Combination({"dp": 8}),
    "dp8-ac": Combination({"dp": 8}, checkpoints=True),
    "rep2-dp4": Combination({"rep": 2, "dp": 4}),
    "dp4-tp2": Combination({"dp": 4, "tp": 2}, GROUPED),
    "dp2-tp4": Combination({"dp": 2, "tp": 4}),
    "dp4-sp2": Combination({"dp": 4, "tp": 2}, sequence=True),
    "dp4-cp2-gather": Combination({"dp": 4, "cp": 2}),
    "dp4-cp2-ulysses": Combination({"dp": 4, "cp": 2}, context="ulysses"),
    "dp2-cp2-tp2-ulysses": Combination({"dp": 2, "cp": 2, "tp": 2}, context="ulysses"),
    "pp2-dp4": Combination({"pp": 2, "dp": 4}),
    "pp2-dp2-tp2": Combination({"pp": 2, "dp": 2, "tp": 2}),
    "pp2-dp2-sp2": Combination({"pp": 2, "dp": 2, "tp": 2}, sequence=True),
    "ep8": Combination({"ep": 8}, DEEPSEEK_V3),
    "dp2-ep4": Combination({"dp": 2, "ep": 4}, DEEPSEEK_V3),
    "dp4-ep2": Combination({"dp": 4, "ep": 2}, DEEPSEEK_V3),
    "dp2-ep4-routed": Combination({"dp": 2, "ep": 4}, ROUTED),
    "dp2-ep2-tp2": Combination({"dp": 2, "ep": 2, "tp": 2}, DEEPSEEK_V3),
}


# They decide, or round elsewhere, so they run more often: 20 seconds and more.
SLOW = ("dp2-ep4-routed", "dp2-tp4", "dp2-cp2-tp2-ulysses", "pp2-dp2-sp2")


def cases():
    for name, combination in COMBINATIONS.items():
        world = pytest.mark.gt_world("simulated", size=8, mesh=combination.mesh)
        marks = [world, pytest.mark.long] if name in SLOW else [world]
        yield pytest.param(combination, id=name, marks=marks)


@pytest.mark.second_tier
@pytest.mark.parametrize("combination", list(cases()))
def test_a_combination_is_the_unsharded_model(combination, gt_mesh):
    proof = assert_same_model(
        combination.parallel,
        combination.reference,
        ce_step,
        combination.batch,
        **combination.options(gt_mesh),
    )
    assert proof.is_at_least("rounds elsewhere"), str(proof)
