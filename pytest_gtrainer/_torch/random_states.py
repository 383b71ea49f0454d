"""Random states of Python, NumPy and torch: read all, put all back.

Reading them starts no CUDA and draws no number. Inside ``without_modes`` the dispatch modes of a
trace are off: tensors are real.
"""

import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_gtrainer._torch import private_names

with private_names():
    from torch.utils._python_dispatch import _disable_current_modes as without_modes

ATTRIBUTES = {"torch.cuda": ("_lazy_seed_tracker",)}

__all__ = ["without_modes"]


def random_state() -> dict[str, torch.Tensor]:
    """Return every generator's state by name: ``python``, ``torch.cuda.0`` and so on.

    Nothing is started or imported for it.
    """
    version, words, gauss = random.getstate()
    states = {"python": _tensor_of([version, *words])}
    if gauss is not None:
        states["python.gauss"] = torch.tensor(gauss, dtype=torch.float64, device="cpu")
    numpy = sys.modules.get("numpy") if "numpy.random" in sys.modules else None
    if numpy is not None:
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = _tensor_of([*keys.tolist(), position, has_gauss])
        states["numpy.gauss"] = torch.tensor(cached, dtype=torch.float64, device="cpu")
    states["torch.cpu"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"torch.cuda.{index}"] = state
    return states


def _tensor_of(numbers: list[int]) -> torch.Tensor:
    """Return int64 numbers on the CPU, whatever the default device."""
    # torch.tensor takes a quarter of a millisecond for a generator, and each proof reads many.
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


UNUSUAL_SEED = 0x9E3779B9
"""No user takes it, so a program that seeds goes on from another state. It fits into 32 bits: NumPy
takes no more, and torch's generator of the CPU reads no more."""


def seed_torch(seed: int) -> None:
    """Seed torch's generators; a device that has not started gets the seed when it starts."""
    # Without an accelerator torch.manual_seed takes half a millisecond for stack traces that it
    # keeps for devices.
    on_cpu_only = torch.accelerator.current_accelerator() is None
    (torch.default_generator if on_cpu_only else torch).manual_seed(seed)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put every generator back; one that was made inside the block stays as it is."""
    states = GeneratorStates.now()
    try:
        yield
    finally:
        states.put_back()


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """States of all generators, to be put back in this process or, pickled, in another one.

    Attributes:
        waiting: the seeds that wait for CUDA to start.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor] | None
    waiting: dict[str, Any]

    @classmethod
    def now(cls, *, cuda: bool = True) -> "GeneratorStates":
        """Read the states of all generators; without ``cuda`` only those of the CPU."""
        return cls(
            python=random.getstate(),
            numpy=numpy.random.get_state() if (numpy := numpy_or_none()) is not None else None,
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state_all() if cuda and torch.cuda.is_initialized() else None,
            waiting=dict(waiting_seeds()) if cuda else {},
        )

    def put_back(self) -> None:
        """Set every generator that was read; one that was made later stays as it is."""
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        if self.numpy is not None and (numpy := numpy_or_none()) is not None:
            numpy.random.set_state(self.numpy)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        waiting_seeds().update(self.waiting)


def waiting_seeds() -> dict[str, Any]:
    """Return the seeds that wait for CUDA to start: torch's table, not a copy."""
    return vars(torch.cuda._lazy_seed_tracker)


def numpy_or_none() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
