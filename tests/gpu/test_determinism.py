"""Determinism on a GPU: atomic sums repeat themselves under ``gt_deterministic``, and need not
without.
"""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from pytest_gtrainer import assert_run_to_run, digest
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.numerics.run_to_run import PRESSURES

OURS = [
    pressure for pressure in PRESSURES if "thread" not in pressure.name
]  # threads do no work of a GPU


def scattered() -> torch.Tensor:
    """Four million values summed into 64 places: atomics add in the order that threads arrive,
    unless forbidden.
    """
    generator = torch.Generator(device="cuda").manual_seed(0)
    index = torch.randint(0, 64, (1 << 22,), device="cuda", generator=generator)
    values = torch.randn(1 << 22, device="cuda", generator=generator)
    return torch.zeros(64, device="cuda").index_add_(0, index, values)


def multiplied() -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(0)
    a, b = torch.randn(2, 1024, 1024, device="cuda", generator=generator).bfloat16()
    return a @ b


def test_atomic_sums_differ_from_run_to_run(cuda, record_property):
    """The control: without it there is nothing to switch off."""
    found = {digest(scattered()) for _ in range(20)}
    record_property("measured", f"{len(found)} results in 20 runs")
    assert len(found) > 1


@pytest.mark.gt_world("ranks", size=1, device="cuda")
def test_atomic_sums_repeat_on_a_deterministic_rank(gt_world, gt_deterministic):
    """Also on a rank whose CUDA runs already, as it was started with cuBLAS's workspace."""
    assert torch.cuda.is_initialized()
    assert len({digest(scattered()) for _ in range(20)}) == 1


@pytest.mark.gt_world("ranks", size=1, device="cuda")
def test_a_rank_repeats_a_run_under_every_pressure(gt_world, gt_deterministic, record_property):
    """Streams that are late, other addresses, a busy core: of a deterministic run all give the same
    bits.
    """
    report = assert_run_to_run(scattered, pressures=OURS)
    record_property("measured", str(report).replace("\n", "; "))
    assert {"stream jitter", "other addresses"} <= {*report.equal}
    assert_run_to_run(multiplied, pressures=OURS)


def test_another_process_repeats_a_product(cuda, record_property):
    """Outside of a world: a process of its own is no rank of one."""
    report = assert_run_to_run(multiplied, pressures=OURS)
    record_property("measured", str(report).replace("\n", "; "))
    assert {"stream jitter", "other addresses", "another process"} <= {*report.equal}
    with pytest.raises(BitwiseDifference):
        assert_run_to_run(scattered, 20, pressures=[])


@pytest.mark.gt_world("ranks", size=1, device="cuda")
def test_switches_are_put_back(gt_world):
    """After the tests above a rank is as it was: nothing of determinism is left."""
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def run(program: str, **environ: str) -> str:
    """Return the output of a program in a process of its own, where CUDA has not started."""
    environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": "", **environ}
    if not environ["CUBLAS_WORKSPACE_CONFIG"]:
        del environ["CUBLAS_WORKSPACE_CONFIG"]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


PROGRAM = """
    import torch
    from pytest_gtrainer import deterministic, digest
    {before}
    for _ in range(3):
        with deterministic():
            a = torch.randn(300, 300, device="cuda")
            print("product", digest(a @ a))
"""


def test_cuda_that_starts_inside_a_block_is_deterministic_ever_after(cuda):
    """cuBLAS reads its workspace once: a second block in the same process is no error and gives the
    same bits.
    """
    printed = run(PROGRAM.format(before=""))
    assert printed.count("product") == 3, printed
    assert len({*printed.splitlines()}) == 1, printed


def test_a_block_that_comes_too_late_is_refused(cuda):
    """CUDA started without the workspace: the error names the variable and both ways out."""
    printed = run(PROGRAM.format(before='torch.ones(2, 2, device="cuda")'))
    assert (
        "DeterminismError: CUDA is already initialised and CUBLAS_WORKSPACE_CONFIG is None"
        in printed
    )
    assert "product" not in printed.replace("print", "")


def test_the_workspace_in_the_environment_is_in_time(cuda):
    printed = run(
        PROGRAM.format(before='torch.ones(2, 2, device="cuda")'), CUBLAS_WORKSPACE_CONFIG=":16:8"
    )
    assert printed.count("product") == 3, printed
    assert len({*printed.splitlines()}) == 1, printed
