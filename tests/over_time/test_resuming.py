"""``assert_resumes`` on the trainer of ``examples/trainer``: each piece of state that is dropped is
named.
"""

import runpy
import sys

import pytest
import torch

from pytest_gtrainer import NotResumed, assert_resumes
from pytest_gtrainer.over_time.resuming import _distance
from tests.over_time.trainers import SCRIPT


@pytest.fixture(scope="module")
def make():
    script = runpy.run_path(str(SCRIPT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--batch=4", "--layers=1"])
        options = script["parse"]()
    return lambda: script["Trainer"](options)


def resumes(make, load, **how):
    arguments = {"at": 2, "steps": 4} | how
    return assert_resumes(
        make,
        lambda trainer, folder: trainer.save(folder),
        load,
        beside=lambda trainer: {"ema": trainer.ema},
        **arguments,
    )


def test_a_trainer_that_saves_all(make):
    """Z3: on one process; random states are put back afterwards."""
    before = torch.get_rng_state()
    result = resumes(make, lambda trainer, folder: trainer.load(folder))
    assert result.steps == [2, 3]
    assert result.compared > 150
    assert result.dropped.keys() == {
        *("batches.position", "ema", "model", "optimizer", "random states", "schedule")
    }
    assert result.dropped["schedule"] == (
        "step 3, optimiser: param_groups.0.lr, rank 0: 0.01 in A, 0.005 in B"
    )
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.second_tier("a weight", "the average", "random", "data", "learning")
@pytest.mark.parametrize(
    ("drop", "named"),
    [
        (
            lambda trainer: trainer.optimizer.state.clear(),
            "step 2, load: embeddings.weight.step: only in A",
        ),
        (
            lambda trainer: trainer.model.head.weight.data.mul_(2),
            "step 2, load: head.weight, rank 0",
        ),
        (
            lambda trainer: trainer.ema.head.weight.data.mul_(2),
            "step 2, load: beside ema.head.weight, rank 0",
        ),
        (lambda trainer: torch.manual_seed(7), "step 2, random: torch.cpu, rank 0"),
        (
            lambda trainer: setattr(trainer.batches, "position", 0),
            "step 2, data: input [0][0], rank 0",
        ),
        (
            lambda trainer: trainer.optimizer.param_groups[0].update(lr=0.5),
            "step 2, optimiser: param_groups.0.lr, rank 0: 0.0075 in A, 0.5 in B",
        ),
    ],
    ids=["moments", "a weight", "the average", "random states", "data position", "learning rate"],
)
def test_each_piece_of_state_that_is_dropped(make, drop, named):
    """Z3: by step, phase and name."""

    def load(trainer, folder):
        trainer.load(folder)
        drop(trainer)

    with pytest.raises(NotResumed) as error:
        resumes(make, load)
    assert f"first difference: {named}" in str(error.value)


def test_checks_that_cannot_fail(make):
    with pytest.raises(ValueError, match="at=4 of steps=4: a run is saved after its first step"):
        resumes(make, lambda trainer, folder: trainer.load(folder), at=4)

    class Still:
        """Its steps change nothing, so a load that does nothing is as good."""

        def __init__(self, moves=1):
            self.model, self.moves = torch.nn.Linear(2, 2), moves
            torch.nn.init.zeros_(self.model.weight)
            torch.nn.init.zeros_(self.model.bias)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
            torch.manual_seed(0)

        def step(self):
            for _ in range(self.moves):
                self.model(torch.ones(1, 2)).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

        def nothing(self, folder):
            pass

    with pytest.raises(NotResumed, match="so this check cannot fail"):
        assert_resumes(Still, Still.nothing, Still.nothing, at=1, steps=3)
    with pytest.raises(NotResumed, match="0 of 3 steps were recorded: each step"):
        assert_resumes(lambda: Still(0), Still.nothing, Still.nothing, at=1, steps=3)


@pytest.mark.second_tier
def test_a_piece_whose_loss_nobody_would_see(make):
    """Z6: an average beside the model that is not named."""

    def without_the_average(**how):
        return assert_resumes(
            make,
            lambda trainer, folder: trainer.save(folder),
            lambda trainer, folder: trainer.load(folder),
            at=1,
            steps=3,
            **how,
        )

    with pytest.raises(NotResumed, match="loaded without ema is equal, so this check does not see"):
        without_the_average()
    assert "ema" not in without_the_average(unseen=["ema"]).dropped


def test_the_distance_of_weights():
    """Z6: an empty weight is nowhere, a missing one or NaN is beyond each bound."""
    expected = {"empty": torch.ones(0, 3), "w": torch.tensor([2.0, -4.0])}
    assert _distance(dict(expected), expected) == (0.0, "")
    assert _distance(expected | {"w": torch.tensor([2.0, -3.0])}, expected) == (0.25, "w")
    assert _distance({}, expected) == (float("inf"), "w")
    assert _distance({"w": torch.tensor([2.0, torch.nan])}, expected) == (float("inf"), "w")
