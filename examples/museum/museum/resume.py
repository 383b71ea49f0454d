"""Run a job through, or with an interruption: saved, made anew, loaded. Both must be one run.

A job has ``step()``, which returns the loss, ``state()``, the tensors on which its next step
depends, ``save(folder)`` and ``load(folder)``.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from museum.usual import STEPS, Practice, Sides


class Job(Protocol):
    def step(self) -> Tensor: ...

    def state(self) -> dict[str, Tensor]: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


def run(
    make_job: Callable[[], Job],
    folder: Path | None = None,
    *,
    interrupted: Sequence[int] = (2,),
    steps: int = 4,
) -> dict[str, Tensor]:
    """Return the loss of each step, and before it the state: so the first difference is a cause.

    Args:
        make_job: as a new process does.
        folder: where the job is saved; None for a run that nobody interrupts.
        interrupted: before which steps.
        steps: in all.
    """
    result = {}
    job = make_job()
    for step in range(steps):
        if folder is not None and step in interrupted:
            job.save(folder / str(step))
            job = make_job()
            job.load(folder / str(step))
        for name, value in job.state().items():
            result[f"before step {step}: {name}"] = value.detach().clone()
        result[f"loss of step {step}"] = job.step().detach()
    return result


def practice(
    make_job: Callable[[bool], Job], *, ranks: int = 1, interrupted: Sequence[int] = (2,)
) -> Practice:
    """Compare the last weights of both runs, and the curve of the loss.

    Args:
        make_job: takes ``bug``. Weights are what ``state()`` calls "weight ...".
        ranks, interrupted: as of the exhibit.
    """

    def run_both(bug: bool) -> Sides:
        with tempfile.TemporaryDirectory() as own:
            results = []
            for folder in (folder_of_rank_0(Path(own)), None):
                results.append(
                    run(lambda: make_job(bug), folder, interrupted=interrupted, steps=STEPS)
                )
            if dist.is_initialized():
                dist.barrier()
        return Sides(*map(weights, results), *map(losses, results))

    return Practice(run_both, ranks)


def folder_of_rank_0(own: Path) -> Path:
    """Return where all ranks save: ``tmp_path`` is another folder on each rank."""
    folders = [own]
    if dist.is_initialized():
        dist.broadcast_object_list(folders)
    return folders[0]


def weights(result: dict[str, Any]) -> dict[str, Tensor]:
    return {name: each for name, each in result.items() if f"{STEPS - 1}: weight" in name}


def losses(result: dict[str, Any]) -> list[float]:
    return [each.item() for name, each in result.items() if name.startswith("loss")]
