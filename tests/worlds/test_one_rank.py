"""``--gt-one-rank``: tests of one rank in pytest's own process, where a debugger is.

Otherwise as on a rank.
"""

import os
import signal
import sys

import pexpect
import pytest

pytestmark = pytest.mark.second_tier

SUITE = '''
import os
import pytest
from late import dist, torch

on_one = pytest.mark.gt_world("ranks", size=1)


@on_one
def test_is_here(gt_world, gt_mesh):
    assert (gt_world.kind, gt_world.backend) == ("ranks", "gloo")
    assert (gt_world.size, gt_world.rank) == (1, 0)
    assert gt_mesh.size() == 1
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
    assert torch.get_num_threads() == 1
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.tolist() == [1.0] * 3
    with open("pid", "w") as file: print(os.getpid(), file=file)


@pytest.fixture(scope="module")
def wide():
    """The group is up before fixtures, and stays between tests."""
    return dist.new_group([0])


@on_one
@pytest.mark.parametrize("n", range(2))
def test_has_the_seed_of_all_tests(wide, n):
    with open("numbers", "a") as file: print(torch.rand(1).item(), file=file)
    dist.barrier(wide)
    os.environ["LEFT"] = "behind"
    torch.set_grad_enabled(False)


@on_one
def test_finds_what_was_restored():
    assert "LEFT" not in os.environ and torch.is_grad_enabled()


@on_one
def test_ends_its_group():
    dist.destroy_process_group()


@on_one
def test_good_after_that():
    dist.barrier()


@on_one
def test_golden(gt_golden):
    gt_golden.check(f"value {torch.arange(3).tolist()} of rank {dist.get_rank()}")


def test_without_a_world():
    assert not dist.is_initialized() and "RANK" not in os.environ


@pytest.mark.gt_world("fake", size=4)
def test_fake(gt_world):
    assert dist.get_world_size() == 4


@pytest.mark.gt_world("ranks", size=[1, 2])
def test_of_two_sizes(gt_world):
    assert gt_world.size == 1 or os.environ.get("BOTH")


@pytest.mark.gt_world("ranks", size=2)
def test_needs_two(): raise SystemExit("ran")


def twice(value):
    assert dist.get_world_size() == 1
    if value < 0: raise ValueError("below")
    return 2 * value


def test_functions(gt_ranks):
    assert gt_ranks.run(twice, 4) == [8]
    with pytest.raises(Exception, match="rank 0 raised ValueError: below") as failure:
        gt_ranks.run(twice, -1)
    assert failure.value.rank == 0 and "in twice" in failure.value.remote_traceback
    assert not dist.is_initialized()


def test_functions_on_two(gt_ranks): gt_ranks.run(twice, 4, size=2)


@on_one
def test_stops():
    mine = 40 + dist.get_rank()
    breakpoint()
    assert mine == 41
'''


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.write("test_it.py", SUITE)
    assert module_suite.run("--gt-gpus=1", "--gt-create-goldens", "-k", "golden").status == 0
    (module_suite.folder / "records").unlink()
    return module_suite.run("--gt-one-rank", "-k", "not stops", "-rs")


def test_tests_of_one_rank_run_in_the_process_of_pytest(run):
    """The golden is the one that a rank of its own has written."""
    outcomes = {name: run.outcome(name) for name in run.reports}
    skipped = {"test_needs_two", "test_functions_on_two", "test_of_two_sizes[size2]"}
    assert {name for name, outcome in outcomes.items() if outcome == "skipped"} == skipped, (
        run.output
    )
    assert {
        name: run.text(name)
        for name, outcome in outcomes.items()
        if outcome not in ("passed", "skipped")
    } == {}
    assert len(set((run.folder / "numbers").read_text().split())) == 1
    assert (
        "gtrainer: 1 CPU rank (gloo), in this process: no order of ranks shows, no GPU used"
        in run.output
    )
    assert "ranks(1, gloo on cpu)" in run.output


def test_a_larger_world_is_skipped_with_the_way_out(run):
    for size in (2,):
        assert (
            f"needs {size} ranks, --gt-one-rank gives 1: debug it on ranks with breakpoint() or "
            f"--pdb, "
            f"or let it run on one too, by size=[1, {size}]"
        ) in run.output
    assert run.left_over() == []


def test_without_it_they_run_on_ranks(suite):
    suite.write("test_it.py", SUITE)
    run = suite.run("--gt-gpus=2", "-k", "of_two_sizes or is_here", environ={"BOTH": "yes"})
    assert {run.outcome(name) for name in run.reports} == {"passed"}, run.output
    assert len(run.reports) == 3


def test_a_breakpoint_and_pdb_are_pytests_own(suite):
    suite.write("test_it.py", SUITE)
    environ = {
        **os.environ,
        "TMPDIR": str(suite.folder / "tmp"),
        "RECORDS": str(suite.records),
        "TERM": "dumb",
    }
    environ = {name: value for name, value in environ.items() if not name.startswith("PYTEST_")}
    command = [
        "-m",
        "pytest",
        f"--rootdir={suite.folder}",
        "--gt-device=cpu",
        "--gt-one-rank",
        "--pdb",
        "-k",
        "stops",
    ]
    child = pexpect.spawn(
        sys.executable,
        command,
        cwd=suite.folder,
        env=environ,
        timeout=300,
        encoding="utf8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in (
        "p mine",
        "c",
        "p mine + 1",
        "c",
    ):  # at the breakpoint, then where the test has failed
        child.expect(r"\(Pdb\) ")
        child.sendline(line)
    child.expect(pexpect.EOF)
    assert "41" in child.before
    assert "1 failed" in child.before


def test_not_under_torchrun(pytester, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1" if "SIZE" in name else "0")
    result = pytester.runpytest_subprocess("--gt-one-rank")
    result.stderr.fnmatch_lines(
        ["*--gt-one-rank: torchrun has started ranks; run pytest without it*"]
    )
