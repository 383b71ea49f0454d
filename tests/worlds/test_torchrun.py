"""The same test files under ``torchrun -m pytest``: one launcher, and two as on two nodes."""

from __future__ import annotations

import re
import socket
import time

import pytest

from tests.worlds.conftest import Suite

SUITE = '''
import os, signal, time
import pytest, torch
import torch.distributed as dist
from pytest_gtrainer import facts
from pytest_gtrainer.ranks import watch

def written(text):
    with open(os.path.join(os.path.dirname(__file__), "progress"), "a") as file: file.write(text + "\\n")

watch.TELL_EVERY = 0.5
terminal = facts.watching({"progress": written})
terminal.__enter__()

on = lambda size, **more: pytest.mark.gt_world("ranks", size=size, **more)
PIDS = set()

@pytest.fixture(scope="module")
def expensive():
    return {"pid": os.getpid()}

@on(3)
@pytest.mark.xdist_group("ours")
def test_collective(gt_world, expensive, tmp_path):
    value = torch.tensor([float(gt_world.rank)])
    dist.all_reduce(value)
    assert value.item() == 3 and dist.get_world_size() == gt_world.size == 3
    assert expensive == {"pid": os.getpid()} and tmp_path.is_dir()
    PIDS.add(os.getpid())
    print("wrote", gt_world.rank)

@on(3)
def test_same_processes(expensive):
    assert PIDS == {os.getpid()} == {expensive["pid"]}

def test_without_ranks():
    assert not dist.is_initialized()

@pytest.mark.gt_world("fake", size=8)
def test_fake(gt_world):
    assert dist.get_world_size() == 8

@on(2)
def test_smaller_than_the_world():
    assert dist.get_world_size() == 2
    dist.barrier()

@on(4)
def test_larger_than_the_world(): raise SystemExit

def called(number):
    dist.barrier()
    return dist.get_rank() * number

def test_functions(gt_ranks):
    assert gt_ranks.run(called, 2) == [0, 2, 4]
    assert not dist.is_initialized()

@on(3)
def test_golden(gt_golden):
    gt_golden.check("text")

@on(3)
def test_raises_while_others_wait():
    assert dist.get_rank() != 1, "only here"
    dist.barrier()

@on(3)
def test_skips_on_one():
    if dist.get_rank() == 2: pytest.skip("not me")

@on(3)
def test_skips_everywhere():
    pytest.skip("nobody")

@on(3)
@pytest.mark.xfail(strict=True)
def test_xfails_on_one():
    assert dist.get_rank() == 0

@on(3)
def test_subtest_fails(subtests):
    with subtests.test("a"):
        assert dist.get_rank() != 0

@on(3, timeout=1.5)
@pytest.mark.parametrize("who", [0, 2])
def test_hangs(who):
    if dist.get_rank() == who: time.sleep(600)
    dist.barrier()

@on(3)
def test_struck_by_a_limit_of_another_kind():
    def strike(*_): raise TimeoutError("enough of this")
    if dist.get_rank() > 0: time.sleep(600)
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.5)

@on(3)
def test_counts_differ():
    if dist.get_rank() == 0: dist.all_reduce(torch.ones(1), async_op=True)

@on(3)
def test_good_after_that():
    dist.barrier()

@on(3)
def test_killed():
    if dist.get_rank() == 2: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@on(3)
def test_never_run(): pass
'''

# test: outcome, what its report says
TABLE = {
    "test_collective": ("passed", []),
    "test_same_processes": ("passed", []),
    "test_without_ranks": ("passed", []),
    "test_fake": ("passed", []),
    "test_smaller_than_the_world": ("passed", []),
    "test_larger_than_the_world": ("skipped", ["needs 4 ranks, torchrun has started 3"]),
    "test_functions": ("passed", []),
    "test_golden": ("failed", ["test_golden.txt is missing"]),
    "test_raises_while_others_wait": ("failed", ["rank 1: AssertionError: only here", "ranks 0, 2: waited in barrier"]),
    "test_skips_on_one": ("failed", ["the ranks do not agree: passed (ranks 0, 1), skipped: not me (rank 2)"]),
    "test_skips_everywhere": ("skipped", []),
    "test_xfails_on_one": ("xfailed", []),
    "test_subtest_fails": ("failed", ["rank 0: AssertionError: assert 0 != 0", "ranks 1, 2: passed"]),
    "test_hangs[0]": ("failed", ["rank 0 did not end within 1.5 s, at test_it.py", "ranks 1, 2: did not end within"]),
    "test_hangs[2]": ("failed", ["rank 2 did not end within 1.5 s, at test_it.py", "waiting in barrier"]),
    "test_struck_by_a_limit_of_another_kind": ("failed", ["TimeoutError: enough of this"]),
    "test_counts_differ": ("failed", ["different numbers of collectives on all ranks: 1 (rank 0), 0 (ranks 1, 2)"]),
    "test_good_after_that": ("passed", []),
    "test_killed": ("failed", ["rank 2 was killed by SIGKILL", "ranks 0, 1: waited in barrier"]),
}


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.write("test_it.py", SUITE)
    return module_suite.run("-p", "no:randomly", "--strict-markers", launcher=("--standalone", "--nproc-per-node=3"))


@pytest.mark.parametrize("name", TABLE)
def test_under_torchrun(run, name):
    """T1 to T4, T7; a rank that dies ends the run, as torchrun replaces none, and its test is reported first.

    Marks are strict, and ranks know those of plugins that they do without: xdist's in ``test_collective``.
    """
    outcome, expected = TABLE[name]
    assert run.outcome(name) == outcome, run.text(name)
    for line in expected:
        assert line in run.text(name)


def test_one_report_for_all(run):
    assert set(run.reports) == set(TABLE)
    assert run.output.count("test session starts") == 1
    assert "3 CPU ranks (gloo), started by torchrun, no GPU used" in run.output
    assert "rank 2 has ended, and torchrun replaces none" in run.output
    assert run.reports["test_collective"]["call"]["output"] == "wrote 0\nwrote 1\nwrote 2\n"


def test_a_long_wait_names_the_ranks_that_are_waited_for(run):
    """Told by rank 0, which may be one of those that hang, for its terminal."""
    lines = (run.folder / "progress").read_text()
    for who in (0, 2):
        where = rf"test_it.py:\d+ in test_hangs \(rank {who}\)"
        assert re.search(rf"test_hangs\[{who}\] has run for \d s of 1.5: .*{where}", lines), lines


def test_the_exit_code_is_one_for_all(run):
    assert run.status == 1


def test_nothing_is_left_over(run):
    assert run.left_over() == []


ON_TWO_NODES = """
import os
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.gt_world("ranks", size=2)

def test_nodes():
    groups = [None, None]
    dist.all_gather_object(groups, (os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], os.getppid()))
    assert [group[:2] for group in groups] == [("0", "0"), ("1", "0")]
    assert groups[0][2] != groups[1][2]

def test_fails_there():
    assert dist.get_rank() == 0

def test_ends_there():
    if dist.get_rank() == 1: os._exit(3)
    dist.barrier()
"""


def test_two_nodes(suite, tmp_path):
    """Two launchers meet on loopback; a rank of the other node is reported on, and its end noticed.

    Each has a temporary folder of its own: in one, the processes of the other would be waited for as strays.
    """
    suite.write("test_it.py", ON_TWO_NODES)
    second = Suite(tmp_path / "second")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launcher = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}")
    run = suite.run_together(
        suite.start(launcher=(*launcher, "--node-rank=0")),
        suite.start(launcher=(*launcher, "--node-rank=1"), environ={"TMPDIR": str(second.folder / "tmp")}),
    )
    outcomes = {name: run.outcome(name) for name in run.reports}
    assert outcomes == {"test_nodes": "passed", "test_fails_there": "failed", "test_ends_there": "failed"}, run.output
    assert "rank 1: AssertionError: assert 1 == 0" in run.text("test_fails_there")
    assert "rank 1 has ended; torchrun tells how" in run.text("test_ends_there")
    assert run.status != 0
    _wait_until_nothing_is_left(suite)
    _wait_until_nothing_is_left(second)


def _wait_until_nothing_is_left(suite):
    end = time.monotonic() + 60
    while suite.left_over() and time.monotonic() < end:
        time.sleep(0.1)
    assert suite.left_over() == []


def test_the_death_of_rank_0_ends_all(suite):
    """T2: who reports for all cannot report on itself, so the others say at which test, and leave at once."""
    suite.write(
        "test_it.py",
        """
        import os, signal, time
        import pytest, torch.distributed as dist
        @pytest.mark.gt_world("ranks", size=3)
        def test_kills_rank_0():
            if dist.get_rank() == 0: os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank() == 1: time.sleep(60)  # its test has not ended, so its output is captured
            dist.barrier()
        """,
    )
    run = suite.run(launcher=("--standalone", "--nproc-per-node=3"))
    for rank in (1, 2):
        line = "rank 0, which reports for all ranks, was killed by SIGKILL, when test_it.py::test_kills_rank_0 ran"
        assert f"gtrainer: {line}: rank {rank} ends too" in run.output, run.output
    assert run.status != 0
    _wait_until_nothing_is_left(suite)


def test_the_death_of_rank_0_is_seen_without_the_help_of_a_rank_that_dies_too(suite):
    """T2: rank 2 kills rank 0 and itself, before any thread of it could tell of that."""
    suite.write(
        "test_it.py",
        """
        import os, signal, time
        import pytest, torch, torch.distributed as dist
        @pytest.mark.gt_world("ranks", size=3)
        def test_kills_rank_0():
            pid = torch.tensor([os.getpid()])
            dist.broadcast(pid, 0)
            if dist.get_rank() == 2:
                for each in (int(pid), os.getpid()): os.kill(each, signal.SIGKILL)
            time.sleep(60)
        """,
    )
    run = suite.run(launcher=("--standalone", "--nproc-per-node=3"))
    line = "rank 0, which reports for all ranks, was killed by SIGKILL, when test_it.py::test_kills_rank_0 ran"
    assert f"gtrainer: {line}: rank 1 ends too" in run.output, run.output
    _wait_until_nothing_is_left(suite)


def test_a_test_that_rank_0_cannot_end_is_told(suite):
    """T3: its main thread alone could report to pytest; the line is not captured with the test's output."""
    suite.write(
        "test_it.py",
        """
        import time
        import pytest
        @pytest.mark.gt_world("ranks", size=2, timeout=2)
        def test_never_ends(gt_world):
            while gt_world.rank == 0:
                try: time.sleep(60)
                except BaseException: pass
        """,
    )
    run = suite.run(launcher=("--standalone", "--nproc-per-node=2"))
    line = "gtrainer: test_it.py::test_never_ends FAILED and cannot be ended on rank 0; the run ends here"
    assert line in run.output, run.output
    assert "rank 0 did not end within 2 s" in run.output
    assert run.status != 0
    _wait_until_nothing_is_left(suite)


@pytest.mark.long
def test_ctrl_c_ends_all_ranks(suite):
    """T6."""
    suite.write(
        "test_it.py",
        """
        import time
        import pytest, torch.distributed as dist
        @pytest.mark.gt_world("ranks", size=2)
        def test_waits():
            open(f"started{dist.get_rank()}", "w").close()
            if dist.get_rank() == 0: time.sleep(600)
            dist.barrier()
        """,
    )
    process = suite.start(launcher=("--standalone", "--nproc-per-node=2"))
    end = time.monotonic() + 120
    while len(list(suite.folder.glob("started*"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in output
    _wait_until_nothing_is_left(suite)


ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("-n2", "torchrun has started the 4 ranks of this run, and xdist would start processes of its own: leave out"),
        ("--gt-gpus=8", "--gt-gpus=8: torchrun has started 4 ranks; promise at most 4"),
    ],
)
def test_what_torchrun_cannot_have(pytester, monkeypatch, argument, sentence):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    result = pytester.runpytest_inprocess(argument, "--gt-device=cpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{sentence}*"])
