"""What a process has once and every rank has for itself: random numbers, default dtype, RANK in the environment.

It is swapped when the turn goes from one rank to another, so that seeds, and draws, in the code of
a rank are what they would be in a process of its own. Not told apart are torch's other
switches (deterministic algorithms, backend flags), the working directory, modules and their globals.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Random numbers and default dtype of a rank."""

    torch_random: torch.Tensor
    python_random: tuple[Any, ...]
    numpy_random: Any
    default_dtype: torch.dtype


class SwappedStates:
    """The state of every rank that has not the turn; all start with the caller's."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._states = [read_state()] * size

    def save(self, rank: int) -> None:
        """Keep what the process has now as the rank's."""
        self._states[rank] = read_state()

    def load(self, rank: int) -> None:
        """Give the process the rank's."""
        write_state(self._states[rank])
        os.environ.update(zip(_VARIABLES, map(str, (rank, rank, self._size, self._size)), strict=True))


@contextmanager
def state_kept() -> Iterator[None]:
    """Put the caller's random numbers back at the end."""
    state = read_state()
    try:
        yield
    finally:
        write_state(state)


def read_state() -> ProcessState:
    """What the process has now."""
    numpy = sys.modules.get("numpy")
    return ProcessState(
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state() if numpy else None,
        torch.get_default_dtype(),
    )


def write_state(state: ProcessState) -> None:
    """Give it to the process."""
    torch.set_rng_state(state.torch_random)
    random.setstate(state.python_random)
    _write_numpy(state.numpy_random)
    if torch.get_default_dtype() != state.default_dtype:
        torch.set_default_dtype(state.default_dtype)


def _write_numpy(wanted: Any) -> None:
    if wanted is None:
        return
    numpy = sys.modules["numpy"].random
    name, key, *position = numpy.get_state()
    if (name, position) != (wanted[0], list(wanted[2:])) or not (key == wanted[1]).all():
        numpy.set_state(wanted)  # slow, and rarely needed: few trainers draw from it between collectives
