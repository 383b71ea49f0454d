"""``assert_resumes`` on the trainer of ``examples/trainer``: each piece of state that is dropped is
named.
"""

import copy
import itertools
import os
import re
import runpy
import sys
from array import array
from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import partial
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pytest_gtrainer import NotResumed, assert_resumes
from pytest_gtrainer.over_time import resuming
from pytest_gtrainer.over_time.pieces import differing, pieces_of
from pytest_gtrainer.over_time.resuming import (
    _checked,
    _distance,
    _refuse_forgotten,
    _write_weights,
)
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
    if ", data: " in named:
        last = str(error.value).splitlines()[-1]
        assert last == "not as it was saved after the load: batches.position"


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
    "average": r"average\['bias'\] of the trainer .*, and so are average\['weight'\]: ",
    "schedule": r"schedule\['_step_count'\] of the trainer .* schedule\['last_epoch'\]: ",
    "count": "count",
    "best": "best",
    "norm": "norm",
    "totals": r"totals\['rows'\] of the trainer .*, and so are totals\['sums'\]: .*=\['totals'\]",
    "plain": "plain.epoch",
    "history": r"history\[0\]",
}


@pytest.mark.parametrize("forget", FORGOTTEN)
def test_a_piece_that_the_load_forgets(forget):
    """Z3: no step of this run depends on it."""
    words = FORGOTTEN[forget]
    if " " not in words:
        words += " of the trainer is not as it was saved"
    with pytest.raises(NotResumed, match=words):
        assert_resumes(lambda: Plain(forget), Plain.save, Plain.load, at=2, steps=4)


class Meter:
    def __init__(self):
        self.count, self.sums = 0, {"rows": torch.zeros(1)}

    def add(self):
        self.count += 1
        self.sums["rows"] += 1


@dataclass(slots=True)
class Slotted:
    count: int = 0

    def add(self):
        self.count += 1


def add_to_each(meters):
    for meter in meters:
        meter.add()


def loader():
    rows = TensorDataset(torch.zeros(8, 1))
    return DataLoader(rows, sampler=DistributedSampler(rows, 1, 0))


class Stopping:
    """Its state dict leaves out what it keeps."""

    def __init__(self):
        self._best = 0.0

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def add(self):
        self._best += 1.0


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self._calls = 0


def momentum_of_all():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state["global"]["sum"] = torch.zeros(1)
    return optimizer


STATES = {
    "what a state dict leaves out": (Stopping, lambda state: state.add(), "state._best"),
    "a private attribute of a module": (
        Counting,
        lambda state: setattr(state, "_calls", state._calls + 1),
        "state._calls",
    ),
    "an optimizer's state of no parameter": (
        momentum_of_all,
        lambda state: state.state["global"]["sum"].add_(1),
        "state['state']['global']['sum']",
    ),
    "a span of time": (
        lambda: [timedelta(0), Decimal(0), array("i", [0]), bytearray(b"0")],
        lambda state: state.__setitem__(2, array("i", [1])),
        "state[2]",
    ),
    "a dict of dicts": (
        lambda: {"train": {"rows": 0}},
        lambda state: state["train"].update(rows=state["train"]["rows"] + 1),
        "state['train']['rows']",
    ),
    "tensors in a dict of dicts": (
        lambda: {"model": {"w": torch.zeros(2), "b": torch.zeros(1)}},
        lambda state: state["model"]["b"].add_(1),
        "state['model']['b']",
    ),
    "a list in a dict": (lambda: {"all": []}, lambda state: state["all"].append(1), "state['all']"),
    "a list of lists": (lambda: [[torch.zeros(1)]], lambda s: s[0][0].add_(1), "state[0][0]"),
    "a deque": (lambda: deque(maxlen=2), lambda state: state.append(len(state)), "state"),
    "a full deque": (
        lambda: deque([0, 1], maxlen=2),
        lambda state: state.append(state[-1] + 1),
        "state[0]",
    ),
    "a set": (set, lambda state: state.add(len(state)), "state"),
    "a counter": (Counter, lambda state: state.update("a"), "state['a']"),
    "an array": (lambda: np.zeros(3), lambda state: np.add(state, 1, out=state), "state"),
    "a tuple": (lambda: (1, torch.zeros(1)), lambda state: state[1].add_(1), "state[1]"),
    "objects in a list": (lambda: [Slotted(), Meter()], add_to_each, "state.0.count"),
    "an object in a tuple": (lambda: (0, Meter()), lambda s: s[1].add(), "state.1.count"),
    "an object of an object": (
        lambda: SimpleNamespace(meter=Meter()),
        lambda state: state.meter.add(),
        "state.meter.count",
    ),
    "a key that is no text": (lambda: {0: Meter()}, lambda state: state[0].add(), "state[0].count"),
    "the sampler of a loader": (
        loader,
        lambda state: state.sampler.set_epoch(state.sampler.epoch + 1),
        "state.sampler.epoch",
    ),
    "torch's generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda state: torch.rand(1, generator=state),
        "state",
    ),
    "Python's generator": (lambda: Random(3), lambda state: state.random(), "state[1][0]"),
    "NumPy's generator": (
        lambda: np.random.default_rng(3),
        lambda state: state.random(),
        "state['state']['state']",
    ),
    "an attribute of a module": (
        lambda: nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.0)),
        lambda state: setattr(state[1], "p", state[1].p + 0.01),
        "state.1.p",
    ),
}


def differences(before, after):
    assert before.keys() == after.keys()
    return [
        name + place
        for name, piece in before.items()
        for place in differing(piece.state, after[name].state)
    ]


def test_attributes_that_hold_no_state():
    """A class, a list that holds itself, tensors without values and without strides."""
    loop = [torch.zeros(1)]
    loop.append(loop)
    sparse = torch.eye(3).to_sparse()
    trainer = SimpleNamespace(kind=nn.Linear, loop=loop, sparse=sparse)
    trainer.meta = torch.zeros(1, device="meta")
    before = pieces_of(trainer)
    assert not differences(before, pieces_of(trainer))
    assert "kind" not in before
    trainer.loop[0] += 1
    trainer.sparse = sparse * 2
    assert differences(before, pieces_of(trainer)) == ["sparse", "loop.0"]


@pytest.mark.parametrize("of", STATES)
def test_state_at_any_place_is_a_piece(of):
    """Z3: deep, in any container, in objects, in generators; it can be put back."""
    make, advance, place = STATES[of]
    trainer = SimpleNamespace(model=nn.Linear(1, 1), state=make())
    before = pieces_of(trainer)
    advance(trainer.state)
    after = pieces_of(trainer)
    assert place in differences(before, after)
    for piece in before.values():
        piece.put_back()
    assert not differences(before, pieces_of(trainer))


def test_a_deep_piece_that_the_load_forgets():
    class Metered(Plain):
        def __init__(self):
            super().__init__()
            self.meters = {"train": [Meter()]}

        def step(self):
            super().step()
            self.meters["train"][0].add()

    with pytest.raises(NotResumed, match=r"meters\.train\.0\.count of .*, and so are .*sums"):
        assert_resumes(Metered, Plain.save, Plain.load, at=2, steps=4)


class Optimizer(torch.optim.SGD):
    """It keeps more in its state dict than moments."""

    calls = 0

    def step(self, closure=None):
        super().step(closure)
        self.calls += 1

    def state_dict(self):
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state):
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Extra(nn.Linear):
    calls = 0

    def forward(self, rows):
        self.calls += 1
        return super().forward(rows)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("of", ["model", "optimizer"])
def test_what_a_state_dict_holds_beside_weights_and_moments(of):
    class Beside(Plain):
        def __init__(self):
            super().__init__()
            if of == "model":
                self.model = Extra(4, 2)
            kind = torch.optim.SGD if of == "model" else Optimizer
            self.optimizer = kind(self.model.parameters(), lr=0.1)
            self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [50])

    words = {"model": r"model\['_extra_state'\]", "optimizer": r"optimizer\['calls'\]"}
    with pytest.raises(NotResumed, match=words[of]):
        assert_resumes(Beside, Plain.save, Plain.load, at=2, steps=4)


class Saving:
    """A save that ends when somebody asks for its result."""

    def __init__(self, trainer, folder, error=None):
        self.unfinished, self.folder, self.error = f"{folder}.unfinished", folder, error
        Plain.save(trainer, self.unfinished)

    def result(self):
        if self.error is not None:
            raise self.error
        os.rename(self.unfinished, self.folder)


def test_a_save_that_goes_on_while_training_does_is_waited_for():
    """As that of ``dcp.async_save``; what goes wrong in it is not lost."""
    assert_resumes(Plain, Saving, Plain.load, at=2, steps=4)
    failing = partial(Saving, error=OSError("the disk is full"))
    with pytest.raises(OSError, match="the disk is full"):
        assert_resumes(Plain, failing, Plain.load, at=2, steps=4)


def test_names_of_pieces_that_are_no_names_of_files():
    class Slashed(Plain):
        def __init__(self):
            super().__init__()
            self.meters = {"a/b": Meter(), "..": Meter()}

        def step(self):
            super().step()
            add_to_each(self.meters.values())

        def load(self, folder):
            super().load(folder)
            self.meters = torch.load(folder, weights_only=False)[0]["meters"]

    result = assert_resumes(Slashed, Plain.save, Slashed.load, at=2, steps=4)
    assert {"meters.a/b.count", "meters....count"} <= result.dropped.keys()


def test_a_trainer_without_a_model_or_its_steps():
    with pytest.raises(TypeError, match=r"make\(\) returned Linear without model, optimizer, step"):
        assert_resumes(lambda: nn.Linear(1, 1), Plain.save, Plain.load, at=2, steps=4)


def test_a_bound_without_other_worlds():
    with pytest.raises(ValueError, match=r"bound=0\.1 is for other worlds, and there are none"):
        assert_resumes(Plain, Plain.save, Plain.load, at=2, steps=4, bound=0.1)


def test_modules_that_a_load_leaves_in_evaluation():
    class Evaluates(Plain):
        def load(self, folder):
            super().load(folder)
            self.model.eval()

    with pytest.raises(NotResumed, match=r"model\.training of the trainer is not as it was saved"):
        assert_resumes(Evaluates, Plain.save, Evaluates.load, at=2, steps=4)


def test_pieces_that_only_the_end_shows():
    """Their controls differ after the last step; what each step makes anew needs no load."""
    result = assert_resumes(Plain, Plain.save, Plain.load, at=2, steps=4)
    assert result.dropped["average"] == "average after the last step"
    assert result.dropped["schedule"] == "schedule after the last step"
    assert set(result.dropped) >= {"count", "norm", "totals", "plain.epoch", "history"}
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


class Epochs:
    """Trains on a few batches again and again, and forgets how far it has come."""

    def __init__(self, batches):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = itertools.cycle([torch.randn(3, 4) for _ in range(batches)])

    def step(self):
        self.model(next(self.data)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder):
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder)

    def load(self, folder):
        model, optimizer = torch.load(folder)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class SkippingEpochs(Epochs):
    """It makes the position anew from the number of steps, so it forgets nothing."""

    def load(self, folder):
        super().load(folder)
        for _ in range(3):
            next(self.data)


def test_a_save_at_the_end_of_an_epoch_shows_no_position():
    """An iterator holds it, so only the data say that it is lost."""
    words = "the inputs of the model in step 3, the first one after the save, and in all later ones"
    for made in (Epochs, SkippingEpochs):
        with pytest.raises(NotResumed, match=f"{words} are those from step 0 on"):
            assert_resumes(lambda made=made: made(3), made.save, made.load, at=3, steps=6)
    with pytest.raises(NotResumed, match="step 3, data"):
        assert_resumes(lambda: Epochs(2), Epochs.save, Epochs.load, at=3, steps=6)
    assert_resumes(lambda: Epochs(1), Epochs.save, Epochs.load, at=3, steps=6)
    arguments = SkippingEpochs.save, SkippingEpochs.load
    assert_resumes(lambda: SkippingEpochs(2), *arguments, at=3, steps=6)


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


INFINITE = float("inf")


@pytest.mark.parametrize(
    ("expected", "actual", "far"),
    [
        ([[0.0, 0.0]], [[0.0, 0.5]], (0.5, "w0")),  # of a weight of zeros the distance itself
        ([[2.0, -4.0]], [[2.0, -4.0]], (0.0, "")),
        ([[2.0, -4.0]], [[1.0, -3.0]], (0.25, "w0")),
        ([[2.0], [8.0], [1.0]], [[1.0], [1.0], [0.5]], (0.875, "w1")),
        ([[1.0], [1.0]], [[0.5], [0.5]], (0.5, "w0")),
        ([[1.0], [1.0]], [[0.0], [float("nan")]], (INFINITE, "w1")),
        ([[1.0], [1.0]], [[0.0]], (INFINITE, "w1")),
        ([[1.0]], [[1.0], [9.0]], (0.0, "")),
        ([[INFINITE]], [[1.0]], (INFINITE, "w0")),
    ],
)
def test_the_furthest_weight_is_named_by_its_worst_element(expected, actual, far):
    sides = []
    for given in (actual, expected):
        sides.append({f"w{place}": torch.tensor(each) for place, each in enumerate(given)})
    assert _distance(*sides) == far


@pytest.mark.parametrize("bound", [0.0, -1.0, INFINITE, float("nan")])
def test_a_bound_is_a_finite_number_above_0(bound):
    words = f"bound={bound}: give a finite number above 0, as bound=1e-5"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        _checked(None, bound)


@pytest.mark.parametrize(
    ("worlds", "bound", "words"),
    [
        ([3], None, ""),
        ([1], 0.5, ""),
        ([3, 2, 1], 0.5, ""),
        ([], None, "worlds=[]: give numbers of ranks, of the 3 of this test"),
        ([4], None, "worlds=[4]: give numbers of ranks, of the 3 of this test"),
        ([2, 0], 0.5, "worlds=[2, 0]: give numbers of ranks, of the 3 of this test"),
        ([True], None, "worlds=[True]: give numbers of ranks, of the 3 of this test"),
        (
            [2, 1],
            None,
            "worlds=[2, 1] with bound=None: other worlds round otherwise, so state how far weights "
            "may be: bound=1e-5",
        ),
    ],
)
def test_worlds_are_numbers_of_ranks_of_the_test(monkeypatch, worlds, bound, words):
    assert _checked(None, None) == [None]
    needs = f'worlds={worlds or [1]} needs ranks: mark the test gt_world("ranks", size='
    with pytest.raises(ValueError, match=f"^{re.escape(needs)}{max(worlds or [1])}"):
        _checked(worlds or [1], bound)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    if not words:
        assert _checked(worlds, bound) == worlds
        return
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        _checked(worlds, bound)


@pytest.mark.parametrize(
    ("names", "more"),
    [
        ("a", ""),
        ("ba", ", and so are b"),
        ("dcba", ", and so are b, c, d"),
        ("edcba", ", and so are b, c, d and 1 more"),
    ],
)
def test_pieces_that_were_forgotten_are_named_in_order(names, more):
    words = (
        "a of the trainer is not as it was saved, neither after the load nor after the last step"
        f"{more}: save and load it; if no step depends on it, unseen=['a']"
    )
    with pytest.raises(NotResumed, match=f"^{re.escape(words)}$"):
        _refuse_forgotten([(name, "") for name in sorted(names)], ["z"])
    _refuse_forgotten([], [])
    _refuse_forgotten([("a", "[0]"), ("a", "[1]")], ["a"])
    _refuse_forgotten([("timer.begun", ""), ("timer.lap.last", ""), ("timer[0].x", "")], ["timer"])
    with pytest.raises(NotResumed, match="timers of the trainer"):
        _refuse_forgotten([("timers", ""), ("timer.begun", "")], ["timer"])
    with pytest.raises(NotResumed, match=r"b\[1\] of the trainer .*, and so are c: .*=\['b'\]"):
        _refuse_forgotten([("a", "[0]"), ("b", "[1]"), ("c", "")], ["a"])


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_first_failure_of_a_world_in_time_is_the_cause(tmp_path, monkeypatch, rank):
    """Others fail because its groups are gone; ranks beyond the world only wait."""
    times = [(5.0, 0, "KeyError: 0"), (3.0, 1, "ValueError: x"), (None, 2, ""), (None, 3, "")]
    ran = []

    def gather(own):
        if isinstance(own, int):
            return [own] * 4
        assert own[:2] == ((own[0] and times[rank][0]), rank)
        assert (own[0] is not None) == (rank < 2)
        return times

    def work():
        ran.append(rank)
        if rank < 2:
            raise ValueError("x")

    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    monkeypatch.setattr("torch.distributed.FileStore", lambda path, size: (path, size))
    monkeypatch.setattr(resuming, "gather_objects", gather)
    monkeypatch.setattr(resuming, "new_group_names", lambda: 7)
    monkeypatch.setattr(resuming, "real_group_beside", lambda *given: nullcontext())
    monkeypatch.setattr(resuming.time, "time", lambda: times[rank][0])
    with pytest.raises(NotResumed, match=r"^rank 1 of a world of 3 failed: ValueError: x$"):
        resuming._in_world(3, tmp_path, work)
    assert ran == ([rank] if rank < 3 else [])
    del times[:2]
    if rank > 1:
        resuming._in_world(3, tmp_path, work)


def test_weights_of_names_that_differ_in_that_of_a_wrapper(tmp_path):
    model = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"l": torch.nn.Linear(1, 1)})})
    model["l"] = torch.nn.Linear(1, 1)
    _write_weights(model, tmp_path / "weights")
    assert len(torch.load(tmp_path / "weights")) == 4


@pytest.mark.parametrize(("first", "last", "done"), [(0, 3, 0), (2, 3, 0), (2, 5, 1)])
def test_steps_that_record_nothing_are_counted(tmp_path, first, last, done):
    model = torch.nn.Linear(1, 1)
    trainer = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()), left=done)

    def step():
        if trainer.left:
            trainer.left -= 1
            model(torch.ones(1, 1)).sum().backward()
            trainer.optimizer.step()

    trainer.step = step
    runs = resuming._Runs(None, None, None, 1, 5, None, tmp_path)
    words = (
        f"{done} of {last - first} steps were recorded: each step() is to call backward and step "
        "the optimizer of the trainer once"
    )
    with pytest.raises(NotResumed, match=f"^{re.escape(words)}$"):
        runs._train(trainer, "resumed", first, last)
