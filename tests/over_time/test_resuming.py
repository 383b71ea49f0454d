"""``assert_resumes`` on the trainer of ``examples/trainer``: each piece of state that is dropped is
named.
"""

import copy
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

from pytest_gtrainer import NotResumed, assert_resumes
from pytest_gtrainer.over_time.resuming import _distance, _write_weights
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


class Plain:
    """A trainer with further state, which no weight depends on within a few steps.

    ``forget`` names the attribute that is not loaded.
    """

    def __init__(self, forget=""):
        torch.manual_seed(0)
        self.forget = forget
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.average = copy.deepcopy(self.model)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [50])
        self.count, self.best, self.last_loss = 0, None, None
        self.norm, self.totals = torch.zeros(4), {"rows": 0, "sums": torch.zeros(2)}
        self.plain = SimpleNamespace(epoch=0)
        self.history = [0.0]

    def step(self):
        loss = self.model(torch.randn(3, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            for own, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
                own.lerp_(theirs, 0.1)
            self.norm.add_(self.model.weight[0])
            self.totals["sums"].add_(self.model.bias)
        self.last_loss = loss.item()  # made anew in each step
        self.count += 1
        self.plain.epoch += 1
        self.totals["rows"] += 3
        self.history[0] += loss.item()
        self.best = min(loss.item(), self.best or 100.0)

    def save(self, folder):
        kept = {name: value for name, value in vars(self).items() if name != "last_loss"}
        torch.save((copy.deepcopy(kept), torch.get_rng_state()), folder)

    def load(self, folder):
        kept, random = torch.load(folder, weights_only=False)
        torch.set_rng_state(random)
        for name in ("model", "optimizer", "average", "schedule"):
            if name != self.forget:
                getattr(self, name).load_state_dict(kept[name].state_dict())
        for name in ("count", "best", "norm", "totals", "plain", "history"):
            if name != self.forget:
                setattr(self, name, kept[name])


FORGOTTEN = {
    "average": "average",
    "schedule": "schedule",
    "count": "count",
    "best": "best",
    "norm": "norm",
    "totals": "totals.rows of the trainer .*, and so are totals.sums: ",
    "plain": "plain.epoch",
    "history": "history.0",
}


@pytest.mark.parametrize("forget", FORGOTTEN)
def test_a_piece_that_the_load_forgets(forget):
    """Z3: no step of this run depends on it."""
    words = FORGOTTEN[forget]
    if " " not in words:
        words += " of the trainer is not as it was saved"
    with pytest.raises(NotResumed, match=words):
        assert_resumes(lambda: Plain(forget), Plain.save, Plain.load, at=2, steps=4)


def test_pieces_that_only_the_end_shows():
    """Their controls differ after the last step; what each step makes anew needs no load."""
    result = assert_resumes(Plain, Plain.save, Plain.load, at=2, steps=4)
    assert result.dropped["average"] == "average after the last step"
    assert result.dropped["schedule"] == "schedule after the last step"
    assert set(result.dropped) >= {"count", "norm", "totals.sums", "plain.epoch", "history.0"}
    assert_resumes(lambda: Plain("count"), Plain.save, Plain.load, at=2, steps=4, unseen=["count"])


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
class Unread(Plain):
    """It loads what each step makes anew."""

    def load(self, folder):
        super().load(folder)
        self.last_loss = torch.load(folder, weights_only=False)[0]["norm"].sum().item()


def test_a_piece_whose_loss_nobody_would_see(make):
    """Z6: a control that is equal."""

    def check(**how):
        return assert_resumes(Start, Plain.save, Unread.load, at=2, steps=4, **how)

    class Start(Unread):
        def __init__(self):
            super().__init__()
            self.last_loss = 0.0

    with pytest.raises(NotResumed, match="without last_loss is equal, so this check does not see"):
        check()
    assert "last_loss" not in check(unseen=["last_loss"]).dropped


def test_the_distance_of_weights():
    """Z6: an empty weight is nowhere, a missing one or NaN is beyond each bound."""
    expected = {"empty": torch.ones(0, 3), "w": torch.tensor([2.0, -4.0])}
    assert _distance(dict(expected), expected) == (0.0, "")
    assert _distance(expected | {"w": torch.tensor([2.0, -3.0])}, expected) == (0.25, "w")
    assert _distance({}, expected) == (float("inf"), "w")
    assert _distance({"w": torch.tensor([2.0, torch.nan])}, expected) == (float("inf"), "w")


def test_weights_of_names_that_differ_in_that_of_a_wrapper(tmp_path):
    model = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"l": torch.nn.Linear(1, 1)})})
    model["l"] = torch.nn.Linear(1, 1)
    _write_weights(model, tmp_path / "weights")
    assert len(torch.load(tmp_path / "weights")) == 4
