"""Check that a run that was saved and loaded continues the same run."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from pytest_gtrainer import facts
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer.over_time.comparing import Comparison, compare_runs
from pytest_gtrainer.over_time.files import read_run
from pytest_gtrainer.over_time.recorder import record_training


class NotResumed(facts.FailedCheck):
    """A resumed run is not the run that was saved; the message names the first difference."""


@facts.check
def assert_resumes(
    make: Callable[[], Any],
    save: Callable[[Any, Path], object],
    load: Callable[[Any, Path], object],
    *,
    at: int,
    steps: int,
    beside: Callable[[Any], Mapping[str, nn.Module]] | None = None,
) -> Comparison:
    """Check that training goes on with the same bits after a save and a load.

    One trainer takes ``steps`` steps and is saved after ``at`` of them. Another one is loaded and
    takes the rest. Directly after the load, weights, moments, buffers and random states are
    compared, then every phase of each step: data, losses, gradients, options. As a control a third
    one takes a step without a load, and must differ. On ranks, every rank must call this.

    Args:
        make: makes a trainer: ``model``, ``optimizer`` (or several), and ``step()``. It is called
            three times.
        save: writes the state of a trainer into a folder, which all ranks share.
        load: reads it into a new trainer.
        at: the number of steps before the save, at least 1.
        steps: the number of steps of the whole run, more than ``at``.
        beside: of a trainer, other modules with state by name, as an average of the weights.

    Returns:
        The comparison, with the number of values that were compared.

    Raises:
        NotResumed: the runs differ, or the control does not.
        ValueError: there is no step before the save, or none after it.
    """
    if not 0 < at < steps:
        raise ValueError(
            f"at={at} of steps={steps}: a run is saved after its first step and before its last"
        )
    with tempfile.TemporaryDirectory() as own, random_states_kept():
        folder = Path(_of_first_rank(own))

        def run(name: str, first: int, last: int, *, is_loaded: bool) -> None:
            trainer = make()
            if is_loaded:
                load(trainer, folder / "saved")
            modules = beside(trainer) if beside is not None else {}
            with record_training(
                trainer.model, trainer.optimizer, folder / name, beside=modules
            ) as recorder:
                for step in range(first, last):
                    trainer.step()
                    if name == "whole" and step + 1 == at:
                        save(trainer, folder / "saved")
            if recorder.recorded != last - first:
                raise NotResumed(
                    f"{recorder.recorded} of {last - first} steps were recorded: each step() is to "
                    "call backward and step the optimizer of the trainer once"
                )

        run("whole", 0, steps, is_loaded=False)
        run("resumed", at, steps, is_loaded=True)
        run("not loaded", 0, 1, is_loaded=False)
        _of_first_rank("all ranks have written")
        whole = read_run(folder / "whole")
        result = compare_runs(whole, read_run(folder / "resumed"), at=at)
        control = compare_runs(whole, read_run(folder / "not loaded"), at=at)
        _of_first_rank("all ranks have read")
    if result.status:
        raise NotResumed(str(result))
    if not control.status:
        raise NotResumed(
            "a new trainer is equal to the one that was saved, so this check cannot fail: save it "
            "after steps that change it"
        )
    return result


def _of_first_rank(text: str) -> str:
    """Return the text of the first rank. On ranks this waits for all of them."""
    if not dist.is_initialized():
        return text
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert texts[0] is not None
    return texts[0]
