"""The states of all generators: as tensors for a record, and put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from pytest_gtrainer import compare
from pytest_gtrainer.numerics.determinism import random_state, random_states_kept

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
    changed = {key.name for key in (*verdict.only_actual, *(each.key for each in verdict.differences))}
    assert changed == {generator, generator.partition(".gauss")[0]}
    assert compare(drawn(DRAWS[generator]), drawn(DRAWS[generator])).outcome == "equal"


@pytest.mark.parametrize("generator", DRAWS)
def test_states_are_put_back_after_an_exception(generator: str):
    before = random_state()
    with pytest.raises(KeyError), random_states_kept():
        raise KeyError(DRAWS[generator]())
    assert compare(random_state(), before).outcome == "equal"
