"""GPUs are counted, named and leased without starting CUDA in the process that owns the tests."""

import pytest

SUITE = """
import os, pytest, torch
@pytest.mark.gt_world("ranks", size=1)
def test_on_a_rank(gt_world):
    assert (gt_world.device, gt_world.backend) == ("cuda", "nccl")
@pytest.mark.gt_world("ranks", size=2)
def test_on_two(gt_world): pass
@pytest.mark.gt_world("ranks", size=1, device="cpu")
def test_on_the_cpu(gt_world): pass
def test_the_owner():
    assert not torch.cuda.is_initialized()
"""


def test_one_gpu_is_one_rank(cuda, pytester):
    """A test that needs more is skipped and says so.

    The pytest process itself never starts CUDA.
    """
    pytester.makepyfile(SUITE)
    run = pytester.runpytest_subprocess("-rs", "--gt-gpus=1")
    run.assert_outcomes(passed=2, skipped=2)
    text = run.stdout.str()
    assert "gtrainer: 1 CUDA rank (nccl)" in text
    assert "needs 2 ranks, --gt-gpus gives 1" in text


def test_without_a_number_all_visible_gpus_are_used(cuda, pytester):
    pytester.makepyfile(SUITE)
    assert "CUDA rank" in pytester.runpytest_subprocess("-k", "test_on_a_rank").stdout.str()


def test_a_promise_of_more_gpus_is_an_error(cuda, pytester):
    import torch

    more = torch.cuda.device_count() + 1
    pytester.makepyfile(SUITE)
    run = pytester.runpytest_subprocess(f"--gt-gpus={more}")
    assert run.ret == 4
    run.stderr.fnmatch_lines(
        [f"ERROR: --gt-gpus={more}: only * GPUs are visible; promise at most *"]
    )


def test_a_hidden_gpu_is_none(cuda, pytester, monkeypatch):
    """``CUDA_VISIBLE_DEVICES`` is obeyed: ranks run on the CPU, and the header says so."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.gt_world('ranks', size=2)\ndef test_it(gt_world): pass"
    )
    run = pytester.runpytest_subprocess("--gt-gpus=2")
    run.assert_outcomes(passed=1)
    assert "2 CPU ranks (gloo), no GPU used" in run.stdout.str()


def test_a_gpu_named_by_its_uuid(cuda, pytester, monkeypatch):
    from pytest_gtrainer.devices import visible_gpus

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_gpus()[0].uuid)
    pytester.makepyfile(SUITE)
    pytester.runpytest_subprocess("-k", "test_on_a_rank").assert_outcomes(passed=1)


def test_two_workers_share_a_gpu(cuda, pytester):
    """Under ``-n 2`` its ranks are leased: never two workers at a time, and none waits forever."""
    pytest.importorskip("xdist")
    for name in ("a", "b"):
        pytester.makepyfile(
            **{f"test_{name}": SUITE.replace("test_the_owner", f"test_owner_{name}")}
        )
    run = pytester.runpytest_subprocess("-n", "2", "--gt-gpus=1", "-k", "test_on_a_rank or owner")
    run.assert_outcomes(passed=4)


def test_a_rank_that_dies_on_the_gpu_is_named(cuda, pytester):
    """A device-side assertion poisons the context: the test fails in its words, the next one gets a
    new rank.
    """
    pytester.makepyfile("""
        import pytest, torch
        pytestmark = pytest.mark.gt_world("ranks", size=1)
        def test_asserts_on_the_device(gt_world):
            torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()
        def test_the_next_one(gt_world):
            assert torch.ones(4, device="cuda").sum().item() == 4
        def test_never_looks(gt_world):
            torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
        def test_the_last_one(gt_world):
            assert torch.ones(4, device="cuda").sum().item() == 4
    """)
    run = pytester.runpytest_subprocess("--gt-gpus=1", "-v")
    run.assert_outcomes(passed=2, failed=2)
    for name, cause in (
        ("asserts_on_the_device", "rank 0: AcceleratorError: "),
        ("never_looks", "*left running: "),
    ):
        run.stdout.fnmatch_lines(
            [f"_* test_{name} _*", f"{cause}CUDA error: device-side assert triggered*"]
        )


def test_what_was_compiled_before_does_not_keep_ranks_from_starting(cuda, pytester):
    """Ranks import beforehand the modules that the process of the tests has imported, except those
    that start CUDA or threads.
    """
    pytester.makepyfile("""
        import pytest, torch
        def test_compiles():
            assert torch.compile(torch.relu)(-torch.ones(3, device="cuda")).sum() == 0
        @pytest.mark.gt_world("ranks", size=1)
        def test_on_a_rank(gt_world):
            assert torch.compile(torch.relu)(-torch.ones(3, device="cuda")).sum() == 0
    """)
    pytester.runpytest_subprocess("--gt-gpus=1").assert_outcomes(passed=2)
