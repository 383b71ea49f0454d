"""FSDP2, tensor, sequence, expert, context and pipeline parallelism compute the unsharded model.

Each case is a combination on 8 simulated ranks, of torch's own code but for the exchange of
experts and of a context.
"""

import pytest

from fixtures.combinations import COMBINATIONS
from fixtures.models.loss import ce_step
from pytest_gtrainer import assert_same_model

# One of each kind; ``python -m benchmarks.same_model --combinations`` proves the others, too.
SHORT = (
    "ddp8",
    "dp8",
    "rep2-dp4",
    "dp4-tp2",
    "dp4-sp2",
    "dp4-cp2-gather",
    "dp4-cp2-ulysses",
    "pp2-dp4-interleaved",
    "pp2-dp2-tp2",
    "dp2-ep4",
    "dp2-ep2-tp2",
    "pp2-dp2-ep2",
)


def cases():
    for name, combination in COMBINATIONS.items():
        world = pytest.mark.gt_world("simulated", size=8, mesh=combination.mesh)
        marks = [world] if name in SHORT else [world, pytest.mark.long]
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
