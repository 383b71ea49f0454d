"""T6: however a run ends, no process and no folder is left behind."""

from __future__ import annotations

import signal
import time

import pytest

from pytest_gtrainer.worlds.ranks.launcher import END_LIMIT

SUITE = """
import time
import pytest, torch.distributed as dist

@pytest.mark.gt_world("ranks", size=2)
def test_waits():
    open(f"started{dist.get_rank()}", "w").close()
    if dist.get_rank() == 0: time.sleep(600)
    dist.barrier()
"""


def _wait_for(condition, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_ending_the_run_ends_its_ranks(suite, how):
    suite.write("test_it.py", SUITE)
    process = suite.start()
    try:
        _wait_for(lambda: len(list(suite.folder.glob("started*"))) == 2, "the ranks did not start")
        process.send_signal(how)
        output, _ = process.communicate(timeout=END_LIMIT + 80)
    finally:
        process.kill()
    assert how is not signal.SIGINT or "KeyboardInterrupt" in output
    _wait_for(lambda: not suite.left_over(), suite.left_over())


def test_the_forkserver_killed_fails_one_test(suite):
    """The next test gets a new forkserver."""
    suite.write(
        "test_it.py",
        """
        import os, signal, time
        import pytest, torch.distributed as dist
        pytestmark = pytest.mark.gt_world("ranks", size=2)
        def test_kills_it():
            if dist.get_rank() == 1: os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        def test_good(): dist.barrier()
        """,
    )
    run = suite.run()
    assert run.outcome("test_kills_it") == "failed"
    assert "was lost with the process that had forked it" in run.text("test_kills_it")
    assert run.outcome("test_good") == "passed"
    assert run.left_over() == []


def test_a_failure_stops_the_run_where_it_should(suite):
    """-x and --lf, and without a cache: as for any other test."""
    suite.write(
        "test_it.py",
        """
        import os
        import pytest, torch.distributed as dist
        pytestmark = pytest.mark.gt_world("ranks", size=2)
        def test_one(): dist.barrier()
        def test_two(): assert dist.get_rank() == 0
        def test_three(): dist.barrier()
        """,
    )
    first = suite.run("-x")
    assert sorted(first.reports) == ["test_one", "test_two"]
    (suite.folder / "records").unlink()
    again = suite.run("--lf")
    assert sorted(again.reports) == ["test_two"]
    assert again.left_over() == []


def test_worlds_of_many_sizes_stay_within_a_limit(suite):
    """Idle ranks are kept up to twice the slots; the least recently used go first."""
    suite.write(
        "test_it.py",
        """
        import os
        import pytest, torch.distributed as dist
        @pytest.mark.parametrize("turn, size", enumerate([1, 2, 3, 1, 2, 3, 4, 1]))
        def test_count(gt_ranks, turn, size):
            print("pids", *gt_ranks.run(os.getpid, size=size))
            forkserver = gt_ranks.run(os.getppid, size=1)[0]
            with open(f"/proc/{forkserver}/task/{forkserver}/children") as children:
                assert len(children.read().split()) <= 8
        """,
    )
    run = suite.run("--gt-gpus=4")
    assert all(run.outcome(name) == "passed" for name in run.reports), run.output
    assert len(run.reports) == 8
    pids = [run.reports[f"test_count[{turn}-{size}]"]["call"]["output"]
            for turn, size in enumerate([1, 2, 3, 1, 2, 3, 4, 1])]  # fmt: skip
    assert pids[0] == pids[3] == pids[7]
    assert pids[1:3] == pids[4:6]


def test_a_killed_worker_of_xdist_takes_its_ranks_along(suite):
    """T6: another worker goes on with the next test, on slots that are free again."""
    suite.write(
        "test_it.py",
        """
        import os, signal
        import pytest, torch.distributed as dist
        on_ranks = pytest.mark.gt_world("ranks", size=2)
        @on_ranks
        def test_1(): dist.barrier()
        @on_ranks
        def test_2():
            if dist.get_rank() == 0:
                forkserver = os.getppid()
                worker = open(f"/proc/{forkserver}/stat").read().rpartition(")")[2].split()[1]
                os.kill(int(worker), signal.SIGKILL)
            dist.barrier()
        @on_ranks
        def test_3(): dist.barrier()
        """,
    )
    run = suite.run("-n1", "--gt-gpus=2")
    assert run.outcome("test_1") == run.outcome("test_3") == "passed"
    assert "worker 'gw0' crashed while running 'test_it.py::test_2'" in run.output
    assert "gtrainer: 2 CPU ranks (gloo), no GPU used, shared by the workers" in run.output
    _wait_for(lambda: not suite.left_over(), suite.left_over())
