"""Random numbers: every rank has a generator state of its own, though the process has one generator.

A state is a value like any other: uniform while all ranks have drawn the same, then per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pytest_gtrainer.worlds.simulated.interpreter.values import PerRank


class RandomStates:
    """The states of all ranks; a run continues from them, and leaves them where its ranks got to.

    Args:
        states: one state for all ranks, or one for each; by default the one that the process has now.
    """

    def __init__(self, states: torch.Tensor | Sequence[torch.Tensor] | None = None) -> None:
        if states is None:
            states = torch.get_rng_state()
        self.states: Any = states if isinstance(states, torch.Tensor) else PerRank(states)

    @classmethod
    def seeded(cls, seeds: Sequence[int]) -> RandomStates:
        """Every rank as after ``torch.manual_seed`` with its seed."""
        return cls([torch.Generator().manual_seed(seed).get_state() for seed in seeds])

    @classmethod
    def of_ranks(cls, states: Sequence[torch.Tensor]) -> RandomStates:
        """These states, one of each rank, as one where all are equal."""
        alike = all(torch.equal(states[0], state) for state in states)
        return cls(states[0] if alike else states)

    def copy(self) -> RandomStates:
        """The same states, to continue from apart from these."""
        return RandomStates(self.states.clone() if self.uniform else list(self.states))

    @property
    def uniform(self) -> bool:
        return type(self.states) is not PerRank

    @contextmanager
    def drawn_uniformly(self) -> Iterator[None]:
        """What is drawn inside, all ranks draw alike."""
        torch.set_rng_state(self.states)
        yield
        self.states = torch.get_rng_state()

    @contextmanager
    def drawn_by(self, rank: int, size: int) -> Iterator[None]:
        """What is drawn inside, ``rank`` draws."""
        if self.uniform:
            self.states = PerRank([self.states] * size)
        torch.set_rng_state(self.states[rank])
        yield
        self.states[rank] = torch.get_rng_state()


@contextmanager
def generator_kept() -> Iterator[None]:
    """The process's own generator is as before at the end."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
