"""What a test may change in its rank and must not hand to the next: seeds, flags, environment."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    grad = torch.is_grad_enabled()
    try:
        yield
    finally:
        _restore_environ(environ)
        os.chdir(cwd)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        torch.set_grad_enabled(grad)


def _restore_environ(environ: dict[str, str]) -> None:
    if os.environ != environ:
        os.environ.clear()
        os.environ.update(environ)
