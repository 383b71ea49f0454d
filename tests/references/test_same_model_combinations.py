"""FSDP2, tensor, sequence, expert, context and pipeline parallelism compute the unsharded model.

Each case is a combination on simulated ranks, of torch's own code but for the exchange of experts
and of a context.
"""

from dataclasses import replace

import pytest

from fixtures.combinations import COMBINATIONS, DEEPSEEK_V3, GROUPED, LLAMA3, Combination
from fixtures.models.loss import ce_step
from pytest_gtrainer import assert_same_model

LAYER = replace(LLAMA3, n_layers=1)
ROUTED_LAYER = replace(DEEPSEEK_V3, n_layers=1, n_dense_layers=0)
FOUR_LAYERS = replace(LLAMA3, n_layers=4)
# One of each kind, with two ranks along each dimension and as few layers as it needs.
SMALL = {
    "ddp2": Combination({"dp": 2}, LAYER, replicates=True),
    "dp2": Combination({"dp": 2}, LAYER),
    "rep2-dp2": Combination({"rep": 2, "dp": 2}, LAYER),
    "dp2-tp2": Combination({"dp": 2, "tp": 2}, replace(GROUPED, n_layers=1)),
    # Extents that differ, so that a division by the wrong one shows.
    "dp3-tp2": Combination({"dp": 3, "tp": 2}, replace(GROUPED, n_layers=1)),
    "dp2-sp2": Combination({"dp": 2, "tp": 2}, LAYER, sequence=True),
    "dp2-cp2-gather": Combination({"dp": 2, "cp": 2}, LAYER),
    "dp2-cp2-ulysses": Combination({"dp": 2, "cp": 2}, LAYER, context="ulysses"),
    "cp2-tp2-ulysses": Combination({"cp": 2, "tp": 2}, LAYER, context="ulysses"),
    "pp2-dp2-tp2": Combination({"pp": 2, "dp": 2, "tp": 2}),
    "pp2-dp2-interleaved": Combination({"pp": 2, "dp": 2}, FOUR_LAYERS, stages=2),
    "pp2-tp2": Combination({"pp": 2, "tp": 2}),
    "dp2-ep2": Combination({"dp": 2, "ep": 2}, ROUTED_LAYER),
    "ep2-tp2": Combination({"ep": 2, "tp": 2}, ROUTED_LAYER),
    "pp2-ep2": Combination({"pp": 2, "ep": 2}, DEEPSEEK_V3),
}


def cases():
    """Yield the small ones, and those on 8 ranks, which take minutes."""
    for name, combination in (SMALL | COMBINATIONS).items():
        size = combination.size
        world = pytest.mark.gt_world("simulated", size=size, mesh=combination.mesh)
        marks = [world] if name in SMALL else [world, pytest.mark.long]
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
