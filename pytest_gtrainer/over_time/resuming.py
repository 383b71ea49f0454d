"""Check that a run that was saved and loaded continues the same run."""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_gtrainer import facts
from pytest_gtrainer._torch.fake_groups import new_group_names, real_group_beside
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer._torch.wrapped_modules import name_without_wrappers
from pytest_gtrainer.numerics.bits import is_dtensor
from pytest_gtrainer.over_time.comparing import Comparison, compare_runs
from pytest_gtrainer.over_time.files import RecordedRun, read_run
from pytest_gtrainer.over_time.pieces import Piece, differing, pieces_of
from pytest_gtrainer.over_time.recorder import record_training
from pytest_gtrainer.worlds.gathering import gather_objects


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
    worlds: Sequence[int] | None = None,
    bound: float | None = None,
    unseen: Sequence[str] = (),
) -> Comparison:
    """Check that training goes on with the same bits after a save and a load.

    One trainer takes ``steps`` steps and is saved after ``at`` of them. Another one is loaded and
    takes the rest. Directly after the load, weights, moments, buffers and random states are
    compared, then every phase of each step: data, losses, gradients, options.

    Pieces of state are attributes of the trainer, and of objects in it and in its lists and dicts,
    that have a ``state_dict``, are generators of random numbers, or are made of tensors, arrays,
    numbers and texts; and random states. A piece is *forgotten* if it differs after the load and
    after the last step. One that each step computes anew is fine.

    Controls must differ: a trainer that was not loaded; and for each piece that the load changes,
    one that was loaded without it. Where data repeat, as in epochs, those after the save must not
    be those of the first steps: a lost position would not show. On ranks, every rank must call
    this.

    Args:
        make: makes a trainer: ``model``, ``optimizer`` (or several), and ``step()``. It is called
            for each run.
        save: writes the state of a trainer into a folder, which all ranks share. If it returns a
            future, as ``dcp.async_save`` does, training goes on while the state is written.
        load: reads it into a new trainer.
        at: the number of steps before the save, at least 1.
        steps: the number of steps of the whole run, more than ``at``.
        beside: of a trainer, other modules with state by name, as an average of the weights.
        worlds: in a test on ranks, numbers of ranks. The first one trains, saves and resumes with
            the same bits; the others resume what it has saved. Each world is the first ranks of the
            test, with groups of its own, so ``make`` makes its meshes. A rank that fails ends the
            groups, and all ranks raise its error.
        bound: with other worlds, which round sums otherwise: how far a weight may be after the last
            step, relative to the largest element of its tensor. What is loaded, data and options
            must have the same bits there, too.
        unseen: names of pieces that no step depends on, as a counter that is only printed; the name
            of an object, ``"metrics"``, stands for all pieces in it.

    Returns:
        The comparison, with the number of values that were compared, and in ``dropped`` the first
        difference for each piece.

    Raises:
        NotResumed: the runs differ, or a control does not; or a rank has failed.
        TypeError: what ``make`` returns is no trainer.
        ValueError: there is no step before the save, or none after it; or worlds that this test
            does not have; or a bound without worlds.
    """
    _check_steps(at, steps)
    sizes = _checked(worlds, bound)
    facts.check_callable(make=make, save=save, load=load)
    with tempfile.TemporaryDirectory() as own, random_states_kept():
        folder = Path(_of_first_rank(own))
        runs = _Runs(make, save, load, at, steps, beside, folder)
        _in_world(sizes[0], folder, runs.in_first_world)
        for size in sizes[1:]:
            _in_world(size, folder, partial(runs.in_other_world, f"in {size}"))
        _wait_for_all_ranks()  # before one reads what another writes
        whole = read_run(folder / "whole")
        result = compare_runs(whole, read_run(folder / "resumed"), at=at)
        control = compare_runs(whole, read_run(folder / "not loaded"), at=at)
        faults = []
        if result.status:
            faults.append(str(result))
        for size in sizes[1:]:
            faults += _faults_of_other_world(whole, folder, f"in {size}", at, bound or 0.0)
        if not control.status:
            faults.append(
                "a new trainer is equal to the one that was saved, so this check cannot fail: save "
                "it after steps that change it"
            )
        faults += _said_of_repeated_data(whole, at, steps)
        forgotten = _of_all_ranks(runs.forgotten)
        _wait_for_all_ranks()  # before the folder goes
        if faults:
            raise NotResumed(faults[0] + _spell_forgotten(forgotten))
        _refuse_forgotten(forgotten, unseen)

        _in_world(sizes[0], folder, runs.without_pieces)
        _wait_for_all_ranks()  # before one reads what another writes
        seen_at_end = _of_all_ranks(runs.seen_at_end)
        for place, name in enumerate(_of_all_ranks(runs.changed)):
            without = read_run(folder / "without" / str(place))
            comparison = compare_runs(whole, without, at=at)
            if comparison.status:
                result.dropped[name] = ", ".join(map(str, comparison.differences[:1]))
            elif name in seen_at_end:
                result.dropped[name] = f"{name} after the last step"
            elif not _is_among(name, unseen):
                faults.append(
                    f"a trainer that was loaded without {name} is equal, so this check does "
                    "not see that piece: take more steps, or name a module in beside; if no step "
                    f"depends on it, unseen=[{name!r}]"
                )
        _wait_for_all_ranks()  # before the folder goes
    if faults:
        raise NotResumed(faults[0])
    return result


def _is_among(name: str, unseen: Sequence[str]) -> bool:
    """Return whether a piece, or an object that it is in, is named."""
    return any(f"{name}.".startswith((f"{each}.", f"{each}[")) for each in unseen)


def _spell_forgotten(forgotten: Sequence[tuple[str, str]]) -> str:
    """Return a line with the pieces that the load has forgotten, which may be the cause."""
    names = list(dict.fromkeys(name + place for name, place in forgotten))
    if not names:
        return ""
    return f"\nnot as it was saved after the load: {facts.spell_some(names, 8)}"


def _refuse_forgotten(forgotten: Sequence[tuple[str, str]], unseen: Sequence[str]) -> None:
    """Fail if a piece was forgotten; ``forgotten`` are names of pieces, each with a place in it."""
    left = [each for each in forgotten if not _is_among(each[0], unseen)]
    if not left:
        return
    names = [name + place for name, place in left]
    more = f", and so are {facts.spell_some(names[1:])}" if len(names) > 1 else ""
    raise NotResumed(
        f"{names[0]} of the trainer is not as it was saved, neither after the load nor after the "
        f"last step{more}: save and load it; if no step depends on it, unseen=[{left[0][0]!r}]"
    )


def _said_of_repeated_data(whole: RecordedRun, at: int, steps: int) -> list[str]:
    """Return why a position in the data that is lost would not show; [] if it would.

    A trainer that does not load its position begins again with the data of the first step. Where
    an epoch ends at the save, these are the data that come next.
    """
    data = [whole.steps.get(step, {}).get("data", {}) for step in range(steps)]
    if all(each == data[0] for each in data) or data[at:] != data[: steps - at]:
        return []
    return [
        f"the inputs of the model in step {at}, the first one after the save, and in all later "
        "ones are those from step 0 on, so a position in the data that is lost would not show: "
        f"save at another step than at={at}, within an epoch"
    ]


class _Runs:
    """The trainers of one check, and the folders of their records."""

    def __init__(
        self,
        make: Callable[[], Any],
        save: Callable[[Any, Path], object],
        load: Callable[[Any, Path], object],
        at: int,
        steps: int,
        beside: Callable[[Any], Mapping[str, nn.Module]] | None,
        folder: Path,
    ) -> None:
        self.make, self.save, self.load, self.beside = make, save, load, beside
        self.at, self.steps, self.folder = at, steps, folder
        # Names of pieces: the load changes them, the load forgets them, each with a place in it,
        # and they differ after the last step if they were not loaded.
        self.changed: list[str] = []
        self.forgotten: list[tuple[str, str]] = []
        self.seen_at_end: list[str] = []
        self._saved: dict[str, Piece] = {}
        self._ended: dict[str, Piece] = {}

    def in_first_world(self) -> None:
        """Train through, then load what was saved, and train to the same end."""
        trainer = self.make()
        missing = [name for name in ("model", "optimizer", "step") if not hasattr(trainer, name)]
        if missing:
            raise TypeError(
                f"make() returned {type(trainer).__name__} without {', '.join(missing)}: a "
                "trainer has model, optimizer (or several) and step()"
            )
        self._train(trainer, "whole", 0, self.steps)
        self._ended = pieces_of(trainer)
        _write_weights(trainer.model, self.folder / "whole.weights")

        trainer = self.make()
        before = pieces_of(trainer)
        self.load(trainer, self.folder / "saved")
        after = pieces_of(trainer)
        for name, piece in before.items():
            if name in after and not piece.equals(after[name]):
                self.changed.append(name)

        self._train(trainer, "resumed", self.at, self.steps)
        ended = pieces_of(trainer)
        for name, piece in self._saved.items():
            if not _differ(name, self._ended, ended):
                continue
            for place in _differ(name, self._saved, after):
                if not place.startswith(piece.recorded):
                    self.forgotten.append((name, place))

        # A control: a trainer that loads nothing has to train otherwise.
        self._train(self.make(), "not loaded", 0, 1)

    def without_pieces(self) -> None:
        # Ranks may differ in what a load changes, as in a position of their own.
        self.changed = _of_all_ranks(self.changed)
        for place, name in enumerate(self.changed):
            trainer = self.make()
            before = pieces_of(trainer)
            self.load(trainer, self.folder / "saved")
            # Every rank trains, as a step communicates, also one that does not have this piece.
            if name in before:
                before[name].put_back()
            self._train(trainer, f"without/{place}", self.at, self.steps)
            if _differ(name, self._ended, pieces_of(trainer)):
                self.seen_at_end.append(name)

    def in_other_world(self, name: str) -> None:
        trainer = self.make()
        self.load(trainer, self.folder / "saved")
        self._train(trainer, name, self.at, self.steps)
        _write_weights(trainer.model, self.folder / f"{name}.weights")
        trainer = self.make()
        self._train(trainer, f"{name}, not loaded", self.at, self.steps)
        _write_weights(trainer.model, self.folder / f"{name}, not loaded.weights")

    def _train(self, trainer: Any, name: str, first: int, last: int) -> None:
        modules = self.beside(trainer) if self.beside is not None else {}
        saving: Any = None
        with record_training(
            trainer.model, trainer.optimizer, self.folder / name, beside=modules
        ) as recorder:
            for step in range(first, last):
                trainer.step()
                if name == "whole" and step + 1 == self.at:
                    self._saved = pieces_of(trainer)
                    saving = self.save(trainer, self.folder / "saved")
        if hasattr(saving, "result"):
            saving.result()
        if recorder.recorded != last - first:
            raise NotResumed(
                f"{recorder.recorded} of {last - first} steps were recorded: each step() is to "
                "call backward and step the optimizer of the trainer once"
            )


def _differ(name: str, expected: Mapping[str, Piece], actual: Mapping[str, Piece]) -> list[str]:
    """Return the places at which a piece has other bits; the whole, "", if one side lacks it."""
    if name not in expected or name not in actual:
        return [""]
    return list(differing(expected[name].state, actual[name].state))


def _check_steps(at: int, steps: int) -> None:
    for name, number in (("at", at), ("steps", steps)):
        facts.check_type(number, int, name, "a whole number of steps")
    if not 0 < at < steps:
        raise ValueError(
            f"at={at} of steps={steps}: a run is saved after its first step and before its last"
        )


def _checked(worlds: Sequence[int] | None, bound: float | None) -> Sequence[int | None]:
    """Return the sizes of the worlds, checked; None for the world as it is."""
    if bound is not None and not 0 < bound < math.inf:
        raise ValueError(f"bound={bound}: give a finite number above 0, as bound=1e-5")
    if worlds is None:
        if bound is not None:
            raise ValueError(
                f"bound={bound} is for other worlds, and there are none: give worlds=(4, 2), or "
                "leave it out"
            )
        return [None]
    if not dist.is_initialized() or dist.get_backend() == "fake":
        raise ValueError(
            f'worlds={worlds} needs ranks: mark the test gt_world("ranks", size={max(worlds)})'
        )
    size = dist.get_world_size()
    if not worlds or any(type(each) is not int or not 0 < each <= size for each in worlds):
        raise ValueError(f"worlds={worlds}: give numbers of ranks, of the {size} of this test")
    if len(worlds) > 1 and bound is None:
        raise ValueError(
            f"worlds={worlds} with bound=None: other worlds round otherwise, so state how far "
            "weights may be: bound=1e-5"
        )
    return list(worlds)


def _in_world(size: int | None, folder: Path, work: Callable[[], None]) -> None:
    """Call ``work()`` on the first ``size`` ranks, in groups of their own; all raise what one
    raises. Every rank must call it.
    """
    if size is None:
        work()
        return
    rank = dist.get_rank()
    failure: Exception | None = None
    failed_at: float | None = None
    names = max(gather_objects(new_group_names()))
    if rank < size:
        store = dist.FileStore(str(folder / f"store {names}"), size)
        try:
            with real_group_beside(dist.get_backend(), store, rank, size, names):
                try:
                    work()
                except Exception:
                    failed_at = time.time()  # before its groups go, by which the others fail, too
                    raise
        except Exception as error:
            failure = error
            if failed_at is None:
                failed_at = time.time()
    # The first failure is the cause of the others: its groups are gone.
    times = gather_objects((failed_at, rank, f"{type(failure).__name__}: {failure}"))
    failures = sorted(each for each in times if each[0] is not None)
    if failures:
        _, first, text = failures[0]
        raise NotResumed(f"rank {first} of a world of {size} failed: {text}") from failure


def _write_weights(model: nn.Module, path: Path) -> None:
    """Write all weights from the first rank."""
    weights = {}
    for name, parameter in model.named_parameters():
        tensor: Any = parameter.detach()
        if is_dtensor(tensor):
            tensor = tensor.full_tensor()
        weights[name_without_wrappers(model, name)] = tensor.cpu()
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(weights, path)


def _faults_of_other_world(
    whole: RecordedRun, folder: Path, name: str, at: int, bound: float
) -> list[str]:
    """Return what is wrong with a run that was resumed by other ranks."""
    result = compare_runs(whole, read_run(folder / name), at=at, rounds=True)
    if result.status:
        return [str(result)]
    expected = torch.load(folder / "whole.weights", weights_only=True)
    faults = []
    for side, must_be_near in ((name, True), (f"{name}, not loaded", False)):
        actual = torch.load(folder / f"{side}.weights", weights_only=True)
        far, where = _distance(actual, expected)
        if must_be_near and not far <= bound:
            faults.append(
                f"resumed {name} ranks, {where} is {far:.3g} from the whole run's after the last "
                f"step, beyond the bound {bound:g}; what was loaded is equal"
            )
        if not must_be_near and far <= bound:
            faults.append(
                f"a new trainer that was not loaded is within the bound {bound:g} {name} ranks, "
                "too: state a smaller one"
            )
    return faults


def _distance(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """Return the largest relative distance of a weight, and its name; NaN counts as infinite."""
    largest, where = 0.0, ""
    for name, tensor in expected.items():
        far = math.inf
        if not tensor.numel():
            continue
        if name in actual:
            scale = tensor.abs().max().item() or 1.0
            far = (actual[name].double() - tensor.double()).abs().max().item() / scale
        if not far <= largest:
            largest, where = (far if far == far else math.inf), name
    return largest, where


def _of_all_ranks(names: list[Any]) -> list[Any]:
    """Return the names that any rank has, in one order. Every rank must call it."""
    if not dist.is_initialized():
        return sorted(names)
    return sorted(set().union(*gather_objects(names)))


def _wait_for_all_ranks() -> None:
    if dist.is_initialized():
        gather_objects(None)


def _of_first_rank(text: str) -> str:
    """Return the text of the first rank. Every rank must call it."""
    if not dist.is_initialized():
        return text
    first: str = gather_objects(text)[0]
    return first
