"""What a test may change in its rank and must not hand to the next: seeds, flags, environment."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

SEED = 1234


def seed_everything() -> None:
    """The same random numbers on every rank, for every test, in every run."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


@contextmanager
def restored() -> Iterator[None]:
    """Put back what the body of a test changed in the process."""
    environ, cwd = dict(os.environ), os.getcwd()
    before = [setting.read() for setting in _TORCH_SETTINGS]
    try:
        yield
    finally:
        _restore_environ(environ)
        os.chdir(cwd)
        for setting, value in zip(_TORCH_SETTINGS, before, strict=True):
            if setting.read() != value:  # writing the determinism flags imports half of inductor
                setting.write(value)


def _restore_environ(environ: dict[str, str]) -> None:
    if os.environ != environ:
        os.environ.clear()
        os.environ.update(environ)


@dataclass(frozen=True, slots=True)
class _Setting:
    """A switch of torch's that lasts until it is set again."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_TORCH_SETTINGS = (
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(torch.get_num_threads, torch.set_num_threads),
    _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(_determinism, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
)
