"""Everything that `deterministic` sets is set, and put back whatever happens."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from pytest_gtrainer import DebugConfig, deterministic
from pytest_gtrainer.numerics import determinism
from pytest_gtrainer.numerics.determinism import DeterminismError, distinct_seed


def snapshot() -> dict[str, Any]:
    """All process state that ``deterministic`` may touch."""
    inductor = sys.modules.get("torch._inductor.config")
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": str(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "seed": torch.initial_seed(),
        "waiting seeds": dict(vars(torch.cuda._lazy_seed_tracker)),
        "inductor": inductor and inductor.deterministic,
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(params=["as they come", "all the other way"])
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flags at their defaults, and all set to something else (this fixture restores them by hand)."""
    import torch._inductor.config as inductor

    if request.param == "as they come":
        yield
        return
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "0")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    with inductor.patch(deterministic=True):
        yield
    torch._C._set_deterministic_algorithms(False, warn_only=False)


@pytest.mark.usefixtures("state")
def test_everything_is_restored():
    """K3"""
    before = snapshot()
    with deterministic(seed=3):
        random.random(), numpy.random.rand(), torch.rand(1)
    assert snapshot() == before


@pytest.mark.usefixtures("state")
def test_everything_is_restored_after_an_exception():
    """K3"""
    before = snapshot()
    with pytest.raises(KeyError), deterministic(DebugConfig(seed=5, deterministic_warn_only=True)):
        _meddle()
    assert snapshot() == before


def _meddle() -> None:
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(9)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    raise KeyError


@pytest.mark.usefixtures("state")
def test_blocks_nest():
    """K3: the inner block puts back what the outer one set."""
    with deterministic(seed=1):
        outer = snapshot()
        with deterministic(DebugConfig(seed=2, deterministic_warn_only=True)):
            assert snapshot() != outer
        assert snapshot() == outer


def test_what_it_sets():
    """K2"""
    import torch._inductor.config as inductor

    with deterministic() as settings:
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert inductor.deterministic
        assert "deterministic algorithms  True" in settings.report()


def test_warn_only():
    """K1"""
    with deterministic(DebugConfig(deterministic_warn_only=True)):
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_without_deterministic_only_seeds_are_set():
    """K1"""
    before = snapshot()
    with deterministic(DebugConfig(seed=4, deterministic=False)):
        inside = snapshot()
        assert inside.pop("seed") == 4
        for random_state in ("python", "numpy", "torch", "waiting seeds"):
            inside.pop(random_state)
        assert inside.items() <= before.items()


def _draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_python_numpy_and_torch_are_seeded():
    """K4"""
    runs = []
    for seed in (0, 0, 1):
        with deterministic(seed=seed) as settings:
            runs.append(_draws())
            assert settings.seed == seed
    assert runs[0] == runs[1]
    assert all(a != b for a, b in zip(runs[0], runs[2], strict=True))


@pytest.mark.parametrize("seed", [2**64 - 1, 2**32, -1])
def test_seeds_that_numpy_does_not_take(seed: int):
    with deterministic(seed=seed):
        assert torch.initial_seed() == seed % 2**64


def test_distinct_seeds_of_a_mesh():
    """K4: distinct over the dimensions that ask, shared over the others."""
    assert distinct_seed(7, []) == 7
    seeds = {distinct_seed(7, [(pp, 4), (tp, 2)]) for pp in range(4) for tp in range(2)}
    assert seeds == set(range(7, 15))
    with pytest.raises(ValueError, match="coordinate 4 is not on a mesh dimension of size 4"):
        distinct_seed(0, [(4, 4)])


@pytest.fixture
def cuda_started(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process in which CUDA is running; its generators are left out."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: None)
    monkeypatch.setattr(determinism, "_cuda_started_here", False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return monkeypatch


def test_too_late_for_cublas_is_an_error_and_changes_nothing(cuda_started: pytest.MonkeyPatch):
    """K6"""
    before = snapshot()
    with pytest.raises(
        DeterminismError, match="CUDA is already initialised and CUBLAS_WORKSPACE_CONFIG is None"
    ):
        deterministic().__enter__()
    assert snapshot() == before


@pytest.mark.parametrize("value", [":4096:8", ":16:8"])
def test_cublas_set_in_time_is_kept(cuda_started: pytest.MonkeyPatch, value: str):
    """K6"""
    cuda_started.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    with deterministic():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == value


def test_cuda_that_started_inside_a_block_has_its_workspace(cuda_started: pytest.MonkeyPatch):
    """K6: the second deterministic test of a process is not too late."""
    with cuda_started.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        with deterministic():
            patch.undo()
    with deterministic():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_it_does_not_import_inductor_and_reaches_one_imported_later():
    """K2, K3"""
    probe = """
import sys, torch
from pytest_gtrainer import deterministic
with deterministic():
    assert "torch._inductor.config" not in sys.modules
    import torch._inductor.config as config
    assert config.deterministic
assert not config.deterministic
"""
    subprocess.run([sys.executable, "-c", probe], check=True)
