"""The states of all generators: as tensors for a record, and put back."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy
import pytest
import torch

from pytest_gtrainer import compare
from pytest_gtrainer._torch.random_states import (
    GeneratorStates,
    random_state,
    random_states_kept,
    waiting_seeds,
)
from pytest_gtrainer.numerics.determinism import seed_everything

DRAWS = {
    "python": lambda: random.random(),
    "python.gauss": lambda: random.gauss(),
    "numpy": lambda: numpy.random.rand(),
    "numpy.gauss": lambda: numpy.random.randn(),
    "torch.cpu": lambda: torch.rand(1),
}


@pytest.mark.parametrize("generator", DRAWS)
def test_a_number_that_is_drawn_changes_the_state_of_its_generator(generator: str):
    """L4: the half of a pair that a normal distribution keeps for later is part of it."""

    def drawn(draw: Callable[[], object] | None) -> dict[str, torch.Tensor]:
        with random_states_kept():
            random.seed(0)
            numpy.random.seed(0)
            if draw is not None:
                draw()
            return random_state()

    verdict = compare(drawn(DRAWS[generator]), drawn(None))
    changed = {
        key.name for key in (*verdict.only_actual, *(each.key for each in verdict.differences))
    }
    assert changed == {generator, generator.partition(".gauss")[0]}
    assert compare(drawn(DRAWS[generator]), drawn(DRAWS[generator])).outcome == "equal"


@pytest.mark.parametrize("seed", [-1, 2**32, 5 + 2**64])
def test_a_gpu_that_runs_is_seeded_at_once(seed: int, monkeypatch: pytest.MonkeyPatch):
    """The GPU is played. Any integer is a seed: torch takes 64 bits of it, NumPy 32, Python all."""
    given = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", given.append)
    with random_states_of_the_cpu_kept():
        seed_everything(seed)
        assert (given[-1], torch.initial_seed()) == (seed % 2**64, seed % 2**64)
        assert numpy.random.rand() == numpy.random.RandomState(seed % 2**32).rand()
        assert random.random() == random.Random(seed).random()


@contextmanager
def random_states_of_the_cpu_kept() -> Iterator[None]:
    """Also while a test plays a GPU, which has no states."""
    states = GeneratorStates.now(cuda=False)
    yield
    states.put_back()


def test_a_world_on_the_cpu_leaves_the_seeds_that_wait_for_cuda_alone():
    """One that was put back would undo a seed that the block has set for later."""
    states = GeneratorStates.now(cuda=False)
    assert (states.cuda, states.waiting) == (None, {})
    with random_states_kept():
        torch.cuda.manual_seed(7)
        waiting = dict(waiting_seeds())
        states.put_back()
        assert dict(waiting_seeds()) == waiting
        assert GeneratorStates.now().waiting == waiting != {}


@pytest.mark.parametrize("generator", DRAWS)
def test_states_are_put_back_after_an_exception(generator: str):
    before = random_state()
    with pytest.raises(KeyError), random_states_kept():
        raise KeyError(DRAWS[generator]())
    assert compare(random_state(), before).outcome == "equal"


def test_the_second_number_of_pythons_gauss_is_kept_in_full():
    """Python draws two at a time, in double precision."""
    with random_states_kept():
        random.seed(0)
        random.gauss()
        kept = random_state()["python.gauss"]
        assert kept.dtype is torch.float64
        assert float(kept) == random.gauss()
