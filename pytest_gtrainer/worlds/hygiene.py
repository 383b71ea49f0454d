"""What a test may change in its rank and must not hand to the next: seeds, flags, environment."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_gtrainer.environment import raw_environment

SEED = 1234
"""Of every test on every rank, in every run."""


Changes = dict[str, tuple[Any, Any]]


@contextmanager
def restored() -> Iterator[Changes]:
    """Put back what the body of a test changed in the process.

    Gives a mapping that in the end holds those changes that decide the bits of others: by name, before and after.
    """
    environ, cwd = _environ(), os.getcwd()
    limits = [resource.getrlimit(which) for which in _LIMITS]
    settings = [setting.read() for setting in _TORCH_SETTINGS]
    changes: Changes = {}
    try:
        yield changes
    finally:
        _restore_limits(limits)
        _restore_environ(environ)
        os.chdir(cwd)
        for setting, value in zip(_TORCH_SETTINGS, settings, strict=True):
            found = setting.read()
            if found != value:  # writing the determinism flags imports half of inductor
                setting.write(value)
                changes.update({setting.name: (value, found)} if setting.decides_bits else {})


def _restore_limits(limits: list[tuple[int, int]]) -> None:
    for which, limit in zip(_LIMITS, limits, strict=True):
        if resource.getrlimit(which) != limit:
            with contextlib.suppress(ValueError, OSError):  # a hard limit that was lowered stays
                resource.setrlimit(which, limit)


def _restore_environ(before: dict[bytes, bytes]) -> None:
    now = _environ()
    if now == before:
        return
    for name in now.keys() - before.keys():
        del os.environb[name]
    for name, value in before.items():
        if now.get(name) != value:
            os.environb[name] = value


def _environ() -> dict[bytes, bytes]:
    """The environment but for what pytest says of its present test."""
    environ = raw_environment()
    environ.pop(b"PYTEST_CURRENT_TEST", None)
    return environ


@dataclass(frozen=True, slots=True)
class _Setting:
    """A switch of torch's that lasts until it is set again."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    decides_bits: bool = False


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


# Of memory, of the size of a file, of open files.
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
_TORCH_SETTINGS = (
    _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting("deterministic algorithms", _determinism, _set_determinism, decides_bits=True),
)
