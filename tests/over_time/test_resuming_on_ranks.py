"""``assert_resumes`` on real ranks: torch's DCP on disk, its async form, a plain state dict, in the
same world and in another one.
"""

import runpy
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from pytest_gtrainer import NotResumed, assert_resumes
from tests.over_time.trainers import SCRIPT

pytestmark = pytest.mark.second_tier
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Forms:
    """Ways to save and load the trainer of the example. Random states are of each rank, so another
    world has none; without dropout nothing draws.
    """

    def __init__(self):
        script = runpy.run_path(str(SCRIPT))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train.py", "--batch=4", "--dropout=0", "--layers=1"])
            self.options = script["parse"]()
        self.trainer = script["Trainer"]

    def make(self):
        return self.trainer(self.options)

    def state(self, trainer):
        state = trainer.state()
        del state[f"random.{trainer.rank}"]
        return state

    def dcp_save(self, trainer, folder):
        dcp.save(self.state(trainer), checkpoint_id=folder)

    def async_save(self, trainer, folder):
        # In a group of its own: another thread exchanges what it writes while training goes on.
        return dcp.async_save(
            self.state(trainer), checkpoint_id=folder, process_group=dist.new_group()
        )

    def dcp_load(self, trainer, folder):
        state = self.state(trainer)
        dcp.load(state, checkpoint_id=folder)
        self.put(trainer, state, None)

    def plain_save(self, trainer, folder):
        state = self.state(trainer)
        state["model"], state["optimizer"] = get_state_dict(
            trainer.model, trainer.optimizer, options=WHOLE
        )
        averages = {}
        for name, tensor in state["ema"].items():
            averages[name] = tensor.full_tensor() if dist.get_world_size() > 1 else tensor
        state["ema"] = averages
        folder.mkdir(exist_ok=True)
        if trainer.rank == 0:
            torch.save(state, folder / "state.pt")
        dist.barrier()

    def plain_load(self, trainer, folder):
        state = torch.load(folder / "state.pt", weights_only=True)
        for name, tensor in trainer.ema.state_dict().items():
            whole = state["ema"][name]
            if dist.get_world_size() > 1:
                whole = torch.distributed.tensor.distribute_tensor(
                    whole, tensor.device_mesh, tensor.placements
                )
            state["ema"][name] = whole
        self.put(trainer, state, WHOLE)

    def put(self, trainer, state, options):
        set_state_dict(
            trainer.model,
            trainer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
        trainer.ema.load_state_dict(state["ema"])
        trainer.schedule.load_state_dict(state["schedule"])
        trainer.batches.position = state["position"]


def resumes(forms, save, load, **how):
    arguments = {"at": 2, "steps": 4, "worlds": (2, 4), "bound": 1e-4} | how
    return assert_resumes(
        forms.make, save, load, beside=lambda trainer: {"ema": trainer.ema}, **arguments
    )


@pytest.mark.gt_world("ranks", size=4)
@pytest.mark.parametrize("form", ["dcp", "async", "plain"])
def test_each_form_in_each_world(gt_world, form):
    """Z6: bits in the same world, a bound in another; the test's own groups are as before."""
    forms = Forms()
    save, load = {
        "dcp": (forms.dcp_save, forms.dcp_load),
        "async": (forms.async_save, forms.dcp_load),
        "plain": (forms.plain_save, forms.plain_load),
    }[form]
    result = resumes(forms, save, load)
    assert result.steps == [2, 3]
    assert {"batches.position", "ema", "model", "optimizer", "schedule"} <= result.dropped.keys()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 4
    assert dist.get_world_size() == 4


def double_average(trainer):
    trainer.ema.head.weight.data.mul_(2)


def skip_a_batch(trainer):
    trainer.batches.position += 1


def clip_to_less(trainer):
    trainer.clip = lambda: torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-3)


@pytest.mark.gt_world("ranks", size=4)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (double_average, "first difference: step 2, load: beside ema.head.weight"),
        (skip_a_batch, "first difference: step 2, data: input"),
        (clip_to_less, "beyond the bound 0.0001; what was loaded is equal"),
    ],
)
def test_what_is_wrong_in_another_world_alone(gt_world, change, named):
    """Z6: by name directly after the load, and by the bound on the weights."""
    forms = Forms()

    def load(trainer, folder):
        forms.dcp_load(trainer, folder)
        if trainer.world == 4:
            change(trainer)

    with pytest.raises(NotResumed) as error:
        resumes(forms, forms.dcp_save, load)
    assert named in str(error.value)


@pytest.mark.gt_world("ranks", size=4)
def test_a_bound_that_all_are_within(gt_world):
    forms = Forms()
    with pytest.raises(NotResumed, match="not loaded is within the bound 1000 in 4 ranks"):
        resumes(forms, forms.dcp_save, forms.dcp_load, bound=1000.0)


@pytest.mark.gt_world("ranks", size=4)
@pytest.mark.parametrize("failing", ["save", "load", "step"])
def test_a_failure_on_one_rank(gt_world, failing):
    """Z6: nobody waits, and every rank has the error, also those outside of the world."""
    forms = Forms()

    def fail(trainer):
        if trainer.rank == 1:
            raise OSError(28, "No space left on device")

    def save(trainer, folder):
        if failing == "save":
            fail(trainer)
        forms.dcp_save(trainer, folder)

    def load(trainer, folder):
        if failing == "load":
            fail(trainer)
        forms.dcp_load(trainer, folder)
        if failing == "step":
            trainer.clip = lambda: fail(trainer)

    begin = time.monotonic()
    with pytest.raises(NotResumed, match="rank 1 of a world of 2 failed: OSError"):
        resumes(forms, save, load)
    assert time.monotonic() < begin + 60
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 4


@pytest.mark.gt_world("ranks", size=2)
def test_worlds_that_are_not_there(gt_world):
    forms = Forms()
    with pytest.raises(ValueError, match=r"worlds=\(2, 4\): give numbers of ranks, of the 2 of"):
        resumes(forms, forms.dcp_save, forms.dcp_load)
    with pytest.raises(ValueError, match="other worlds round otherwise, so state how far weights"):
        resumes(forms, forms.dcp_save, forms.dcp_load, worlds=(2, 1), bound=None)
