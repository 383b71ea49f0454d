"""Planted mistakes in parallel models are found, with the module; right models are not blamed."""

from dataclasses import replace

import pytest

from benchmarks.same_model import in_floats, mesh_for
from fixtures.combinations import LLAMA3, drawn
from fixtures.models.loss import ce_step
from fixtures.same_model_mistakes import MISTAKES
from pytest_gtrainer import AnotherFunction, assert_same_model

# One of each kind; the others are for ``python -m benchmarks.same_model --mistakes``, too.
SHORT = (
    "a reduction left out",
    "a mean over the wrong count",
    "reduced behind a cast",
    "rows not reduced",
    "a norm's gradient not summed",
    "labels shifted by shard",
    "experts not divided",
    "a layer twice",
    "without synchronisation",
    "one batch for replicas",
    "a bias of each rank",
    "balanced parts, plain positions",
    "a rows' gradient averaged",
)

# Of those, the ones that models of one layer show, too.
IN_ONE_LAYER = ("a reduction left out", "labels shifted by shard", "without synchronisation")


def cases():
    for name, mistake in MISTAKES.items():
        right = mistake.right
        if name in IN_ONE_LAYER:
            right = replace(right, config=replace(LLAMA3, n_layers=1))
            mistake = replace(mistake, right=right)
        world = pytest.mark.gt_world("simulated", size=right.size, mesh=right.mesh)
        marks = [world] if name in SHORT else [world, pytest.mark.long]
        yield pytest.param(mistake, id=name, marks=marks)


@pytest.mark.second_tier
@pytest.mark.parametrize("mistake", list(cases()))
def test_a_planted_mistake_is_told(mistake, gt_mesh):
    def parallel(mesh):
        return mistake.build(mistake.right, mesh)

    reference = mistake.reference or mistake.right.reference
    given = (parallel, reference, mistake.step, mistake.batch)
    options = {"combine": mistake.combine, **mistake.right.options(gt_mesh)}
    if mistake.kind == "rounds elsewhere":
        proof = assert_same_model(*given, **options)
        assert proof.kind == mistake.kind
        assert mistake.says in str(proof)
        return
    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(*given, **options)
    assert mistake.says in str(failure.value)


SEEN = {
    "a bias of each rank": ("passes", "fails"),  # it is 0 when training begins
    "a layer twice": ("fails", "fails"),
    "experts swapped": ("fails", "fails"),  # they read counts
}


@pytest.mark.second_tier
@pytest.mark.parametrize("name", SEEN)
def test_what_floats_see_of_a_mistake(name):
    """The table of the benchmark has it beside what is told: of the loss, and of gradients."""
    mistake = MISTAKES[name]
    with mesh_for(mistake.right) as mesh:
        assert in_floats(mistake, mesh) == SEEN[name]


def sizes():
    for seed in range(8):
        combination = drawn(seed)
        world = pytest.mark.gt_world("simulated", size=combination.size, mesh=combination.mesh)
        marks = [world] if seed < 2 else [world, pytest.mark.long]
        yield pytest.param(combination, id=str(seed), marks=marks)


@pytest.mark.second_tier
@pytest.mark.parametrize("combination", list(sizes()))
def test_sizes_that_do_not_divide_raise_no_alarm(combination, gt_mesh):
    """``python -m benchmarks.same_model --sizes 200`` proves more of them."""
    proof = assert_same_model(
        combination.parallel,
        combination.reference,
        ce_step,
        combination.batch,
        **combination.options(gt_mesh),
    )
    assert proof.is_at_least("rounds elsewhere"), str(proof)
