"""Every switch of determinism, set together and restored whole.

``deterministic`` sets what makes one run repeat another bit for bit on one machine, and on
exit, also after an exception, puts back every flag, generator and environment variable.
What cannot be honoured any more is an error, never a warning: a check that believes it is
deterministic and is not proves nothing.

Not set here yet: FlexAttention's kernel options (no max-autotune, no coordinate descent).
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACE_VALUES = (":4096:8", ":16:8")
_INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"

# Whether CUDA was first initialised inside one of our blocks: then it has the workspace,
# although the variable is gone again.
_cuda_started_here = False


class DeterminismError(RuntimeError):
    """A setting cannot be honoured in this process any more."""


@dataclass(frozen=True, slots=True)
class DebugConfig:
    """What makes a training run repeatable.

    Attributes:
        seed: for Python, NumPy and torch.
        deterministic: use deterministic algorithms, refuse operators that have none.
        deterministic_warn_only: warn about such operators instead.
        moe_force_load_balance: route tokens to experts in turn; read by the models.
    """

    seed: int = 0
    deterministic: bool = True
    deterministic_warn_only: bool = False
    moe_force_load_balance: bool = False


@dataclass(frozen=True, slots=True)
class ActivationCheckpointConfig:
    """How ``torch.utils.checkpoint`` recomputes; the fields are its arguments."""

    preserve_rng_state: bool = True
    determinism_check: Literal["default", "none"] = "default"
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``deterministic`` put in place."""

    config: DebugConfig

    @property
    def seed(self) -> int:
        """The seed in effect."""
        return self.config.seed

    def report(self) -> str:
        """The values in effect now, one a line."""
        values = {
            "seed": torch.initial_seed(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            _WORKSPACE: os.environ.get(_WORKSPACE, "unset"),
            _INDUCTOR: os.environ.get(_INDUCTOR, "unset"),
        }
        return "\n".join(f"{name:<25} {value}" for name, value in values.items())


@contextmanager
def deterministic(config: DebugConfig | None = None, *, seed: int | None = None) -> Iterator[Settings]:
    """Run a block deterministically; everything is restored on exit.

    Args:
        config: what to set; the default ``DebugConfig()`` sets everything.
        seed: instead of ``config.seed``; see ``distinct_seed`` for one per mesh dimension.

    Raises:
        DeterminismError: CUDA was initialised without the cuBLAS workspace variable.
    """
    config = config or DebugConfig()
    if seed is not None:
        config = replace(config, seed=seed)
    with ExitStack() as stack:
        stack.enter_context(_random_states())
        if config.deterministic:
            stack.enter_context(_cublas_workspace())
            stack.enter_context(_inductor())
            stack.enter_context(_cudnn())
            stack.enter_context(_algorithms(warn_only=config.deterministic_warn_only))
        seed_everything(config.seed)
        yield Settings(config)


def seed_everything(seed: int) -> None:
    """Seed Python, torch on every device, and NumPy if it is loaded or can be."""
    random.seed(seed)
    torch.manual_seed(seed % 2**64)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def distinct_seed(seed: int, places: Sequence[tuple[int, int]]) -> int:
    """A seed per coordinate on the mesh dimensions that ask for distinct ones.

    Args:
        seed: the base seed, which all other dimensions share.
        places: ``(coordinate, size)`` of this rank on each dimension that asks.

    >>> [distinct_seed(40, [(pp, 2), (ep, 3)]) for pp in range(2) for ep in range(3)]
    [40, 41, 42, 43, 44, 45]
    """
    offset = 0
    for coordinate, size in places:
        if not 0 <= coordinate < size:
            raise ValueError(f"coordinate {coordinate} is not on a mesh dimension of size {size}")
        offset = offset * size + coordinate
    return (seed + offset) % 2**64


@contextmanager
def _random_states() -> Iterator[None]:
    """Put every generator back; one that only came to life inside the block stays as it is."""
    numpy = _numpy()
    python, cpu = random.getstate(), torch.get_rng_state()
    legacy = numpy.random.get_state() if numpy is not None else None
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    queued = dict(vars(torch.cuda._lazy_seed_tracker))
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy is not None:
            numpy.random.set_state(legacy)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        # seeds that wait for CUDA to start are process state too
        vars(torch.cuda._lazy_seed_tracker).update(queued)


@contextmanager
def _cublas_workspace() -> Iterator[None]:
    """cuBLAS reads its variable when it starts; afterwards it is too late."""
    global _cuda_started_here
    started_before = torch.cuda.is_initialized()
    set_before = os.environ.get(_WORKSPACE) in _WORKSPACE_VALUES
    if started_before and not set_before and not _cuda_started_here:
        raise DeterminismError(
            f"CUDA is already initialised and {_WORKSPACE} is {os.environ.get(_WORKSPACE)!r}: "
            f"set it to {_WORKSPACE_VALUES[0]} before the process starts, or enter "
            "deterministic() before the first use of CUDA"
        )
    with _environment(_WORKSPACE, os.environ[_WORKSPACE] if set_before else _WORKSPACE_VALUES[0]):
        try:
            yield
        finally:
            _cuda_started_here |= torch.cuda.is_initialized() and not started_before


@contextmanager
def _inductor() -> Iterator[None]:
    """Inductor's own flag, without importing it (0.7 s): by its variable until it is loaded."""
    loaded = _inductor_config()
    before = loaded.deterministic if loaded is not None else None
    try:
        with _environment(_INDUCTOR, "1"):
            if loaded is not None:
                loaded.deterministic = True
            yield
    finally:
        loaded = _inductor_config()
        if loaded is not None:
            loaded.deterministic = os.environ.get(_INDUCTOR) == "1" if before is None else before


@contextmanager
def _cudnn() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def _algorithms(*, warn_only: bool) -> Iterator[None]:
    """``torch.use_deterministic_algorithms`` less its import of Inductor, see ``_inductor``."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        torch._C._set_deterministic_algorithms(True, warn_only=warn_only)
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _inductor_config() -> Any:
    return sys.modules.get("torch._inductor.config")


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
