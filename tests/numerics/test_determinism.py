"""Everything that `deterministic` sets is set, and put back whatever happens."""

import os
import random
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import flex_attention

from pytest_gtrainer import DebugConfig, deterministic, flex_attention_options, mesh_seed
from pytest_gtrainer.numerics import determinism, knobs
from pytest_gtrainer.numerics.determinism import NCCL_PRESETS, DeterminismError


def snapshot() -> dict[str, Any]:
    """Return all state that ``deterministic`` may touch: knobs, variables, generators."""
    return {
        **knobs.values(),
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": str(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "seed": torch.initial_seed(),
        "waiting seeds": dict(vars(torch.cuda._lazy_seed_tracker)),
    }


@pytest.fixture(params=["as they come", "all the other way"])
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave all flags at their defaults, or set each to another value and restore it by hand."""
    import torch._inductor.config as inductor

    if request.param == "as they come":
        yield
        return
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "0")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.mkldnn, "deterministic", True)
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    with inductor.patch(deterministic=True, max_autotune=True, coordinate_descent_tuning=True):
        yield
    torch._C._set_deterministic_algorithms(False, warn_only=False)


@pytest.mark.usefixtures("state")
def test_everything_is_restored():
    """K3"""
    before = snapshot()
    with deterministic(seed=3, nccl="vllm_batch_invariant"):
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
    torch.backends.mkldnn.deterministic = False
    os.environ["TORCHINDUCTOR_MAX_AUTOTUNE"] = "2"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    raise KeyError


@pytest.mark.usefixtures("state")
def test_blocks_nest():
    """K3: the inner block puts back what the outer one set."""
    with deterministic(seed=1):
        outer = snapshot()
        with deterministic(DebugConfig(seed=2, deterministic_warn_only=True)) as inner:
            assert snapshot() != outer
            assert determinism.active() is inner, (
                "ranks and other processes get the settings of the innermost block"
            )
        assert snapshot() == outer
        assert determinism.active().seed == 1


@pytest.mark.usefixtures("state")
def test_a_block_inside_a_deterministic_one_is_deterministic():
    """Its settings say so, as its switches stay on; a block beside it is not."""
    off = DebugConfig(seed=3, deterministic=False)
    with deterministic(seed=1):
        switches = snapshot()
        with deterministic(off) as inner:
            assert inner.config.deterministic
            assert torch.are_deterministic_algorithms_enabled()
            with deterministic(off) as innermost:
                assert innermost.config.deterministic
        assert snapshot() == switches
    with deterministic(off) as alone, deterministic(off) as within:
        assert not alone.config.deterministic
        assert not within.config.deterministic


def test_what_it_sets():
    """K2"""
    import torch._inductor.config as inductor

    with deterministic() as settings:
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert torch.backends.mkldnn.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert inductor.deterministic
        assert determinism.active() is settings
    assert determinism.active() is None


def test_what_it_sets_against_a_tuned_inductor(monkeypatch: pytest.MonkeyPatch):
    """K2: no max-autotune and no coordinate descent, whatever was configured."""
    import torch._inductor.config as inductor

    names = (
        "max_autotune",
        "max_autotune_pointwise",
        "max_autotune_gemm",
        "coordinate_descent_tuning",
    )
    with inductor.patch(dict.fromkeys(names, True)):
        with deterministic():
            assert not any(getattr(inductor, name) for name in names)
        assert all(getattr(inductor, name) for name in names)


def test_options_for_compiling_flex_attention():
    """K2: options of a compiled function win over Inductor's config, so they are switched, too."""
    import torch._inductor.config as inductor

    options = flex_attention_options(DebugConfig())
    tuned = flex_attention_options(DebugConfig(deterministic=False))
    assert options == {"max_autotune": False, "coordinate_descent_tuning": False}
    assert tuned == {"max_autotune": True, "coordinate_descent_tuning": True}
    assert all(hasattr(inductor, name) for name in options)
    torch.compile(flex_attention, options=options)  # refuses options that it does not know


def test_the_report_tells_what_is_in_effect_and_what_it_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with deterministic(seed=11) as settings:
        torch.backends.cudnn.benchmark = True  # effective values, not those once set
        lines = dict(line.split(maxsplit=1) for line in settings.report().splitlines())
    assert lines["seed"] == "11"
    assert lines["torch.are_deterministic_algorithms_enabled()"] == "True  (was False)"
    assert lines["torch.backends.cudnn.benchmark"] == "True  (was False)"
    assert lines["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8  (was :0:0)"
    assert lines["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "unset")


def test_the_report_of_settings_that_were_never_entered_tells_of_no_change():
    assert "(was " not in determinism.Settings(DebugConfig()).report()


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


@pytest.mark.gt_world("fake", size=8, mesh={"pp": 2, "dp": 2, "tp": 2}, rank=5)
def test_seeds_of_a_device_mesh(gt_mesh):
    """K4: distinct over the dimensions that ask, shared over the others.

    Rank 5 is (pp 1, dp 0, tp 1).
    """
    assert mesh_seed(40, gt_mesh) == 40
    assert mesh_seed(40, gt_mesh, distinct=["pp"]) == 41
    assert mesh_seed(40, gt_mesh, distinct=["dp"]) == 40
    assert mesh_seed(40, gt_mesh, distinct=["pp", "tp"]) == 43
    assert mesh_seed(2**64 - 1, gt_mesh, distinct=["pp"]) == 0, "torch takes 64 bits"
    with pytest.raises(
        ValueError, match=r"the mesh has no dimension 'ep'; its dimensions are \('pp', 'dp', 'tp'\)"
    ):
        mesh_seed(40, gt_mesh, distinct=["ep"])


PLACES = [
    pytest.param(
        rank,
        marks=pytest.mark.gt_world("fake", size=8, mesh={"pp": 2, "dp": 2, "tp": 2}, rank=rank),
    )
    for rank in range(8)
]


@pytest.mark.parametrize("rank", PLACES)
def test_seeds_of_all_places_are_distinct(gt_mesh, rank):
    assert mesh_seed(40, gt_mesh, distinct=["pp", "dp", "tp"]) == 40 + rank


@pytest.mark.parametrize("preset", [name for name in NCCL_PRESETS if name != "as_found"])
def test_presets_of_nccl(preset: str):
    """Set by name, and gone afterwards; every variable is in the table of knobs."""
    before = dict(os.environ)
    with deterministic(nccl=preset):
        assert NCCL_PRESETS[preset].items() <= os.environ.items()
    assert dict(os.environ) == before
    assert set(NCCL_PRESETS[preset]) <= {knob.name for knob in knobs.KNOBS}


def test_presets_of_nccl_contradict_each_other():
    """None is the truth."""
    assert len({preset.get("NCCL_ALGO") for preset in NCCL_PRESETS.values()}) == 4
    with pytest.raises(
        ValueError, match="there is no NCCL preset 'best': choose one of as_found, megatron_ring"
    ):
        deterministic(nccl="best").__enter__()


def test_too_late_for_nccl_is_an_error_and_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    """K6"""
    monkeypatch.setattr(determinism, "_nccl_is_up", lambda: True)
    before = snapshot()
    with pytest.raises(
        DeterminismError, match="NCCL has communicators already, so NCCL_ALGO=Ring of the preset"
    ):
        deterministic(nccl="megatron_ring").__enter__()
    assert snapshot() == before
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    with deterministic(nccl="megatron_ring"):  # set in time
        pass


@pytest.fixture
def cuda_started(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process in which CUDA is running; its generators are left out."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: None)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
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


def test_a_workspace_that_is_not_deterministic_is_too_late_as_well(
    cuda_started: pytest.MonkeyPatch,
):
    """K6: the variable is there, and says something else."""
    cuda_started.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(
        DeterminismError, match="CUDA is already initialised and CUBLAS_WORKSPACE_CONFIG is ':0:0'"
    ):
        deterministic().__enter__()


def test_an_inductor_that_comes_inside_a_block_gets_what_it_would_have_read_outside(
    monkeypatch: pytest.MonkeyPatch,
):
    """K3: each flag by its own variable; the config is played, as this process has a real one."""
    monkeypatch.setenv("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "1")
    played = types.SimpleNamespace(deterministic=True, coordinate_descent_tuning=False)
    loaded = []
    monkeypatch.setattr(determinism, "inductor_config", lambda: played if loaded else None)
    with deterministic():
        loaded.append("now")
        variables = [
            os.environ[f"TORCHINDUCTOR_{name}"]
            for name in ("DETERMINISTIC", "COORDINATE_DESCENT_TUNING")
        ]
        assert variables == ["1", "0"], "a process that is started inside the block reads these"
    found = played.deterministic, played.coordinate_descent_tuning, played.max_autotune
    assert found == (False, True, False), (
        "deterministic, coordinate descent (its variable says 1), max-autotune"
    )


@pytest.mark.parametrize("value", [":4096:8", ":16:8"])
def test_cublas_set_in_time_is_kept(cuda_started: pytest.MonkeyPatch, value: str):
    """K6"""
    cuda_started.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    with deterministic():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == value


def test_cuda_that_started_inside_a_block_has_its_workspace(cuda_started: pytest.MonkeyPatch):
    """K6: the first deterministic test has the variable read; so the second is not too late."""
    read = []
    cuda_started.setattr(
        determinism, "_read_workspace", lambda: read.append(os.environ["CUBLAS_WORKSPACE_CONFIG"])
    )
    with cuda_started.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        with deterministic():
            patch.undo()
    with deterministic():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert read == [":4096:8"]


@pytest.mark.second_tier
def test_it_does_not_import_inductor_and_reaches_one_imported_later():
    """K2, K3"""
    probe = """
import sys, torch
from pytest_gtrainer import deterministic
with deterministic():
    assert "torch._inductor.config" not in sys.modules
    import torch._inductor.config as config
    assert config.deterministic and not config.coordinate_descent_tuning
assert not config.deterministic and config.coordinate_descent_tuning
"""
    tuned = {**os.environ, "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}
    subprocess.run([sys.executable, "-c", probe], check=True, env=tuned)


def _flags() -> tuple[bool, int, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.initial_seed(),
        "NCCL_PROTO" in os.environ,
    )


@pytest.mark.second_tier
def test_it_reaches_into_ranks(gt_ranks):
    """A call on ranks is made under the settings of the test that makes it."""
    with deterministic(seed=77, nccl="vllm_batch_invariant"):
        assert gt_ranks.run(_flags, size=2) == [(True, 77, True)] * 2
    assert {flags[0::2] for flags in gt_ranks.run(_flags, size=2)} == {(False, False)}


@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize(
    "gt_deterministic", [DebugConfig(), DebugConfig(seed=5)], indirect=True, ids=str
)
def test_the_fixture_works_on_ranks(gt_deterministic, request):
    """K1: with the configuration that the test asks for."""
    assert _flags()[:2] == (True, gt_deterministic.seed)
    assert gt_deterministic.config == request.node.callspec.params["gt_deterministic"]


@pytest.mark.gt_world("fake", size=4, rank=3)
def test_a_rank_that_a_mesh_does_not_have_has_no_seed_of_it(gt_world):
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="this rank is not on DeviceMesh"):
        mesh_seed(40, mesh)
