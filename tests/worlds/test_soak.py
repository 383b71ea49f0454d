"""Many tests on ranks in one run, one in ten with a fault: every verdict right, nothing left over,
memory flat.
"""

import os
import re
import statistics
import time

import pytest

from tests.worlds.conftest import Suite

pytestmark = pytest.mark.second_tier

SUITE = """
import ctypes, os, signal, sys, time
import pytest
from late import dist, torch

class Unpicklable(Exception):
    handle = staticmethod(lambda: None)

def raises(rank): assert rank != 1, "only here"
def is_killed(rank): rank == 0 and os.kill(os.getpid(), signal.SIGKILL)
def hangs(rank): rank == 1 and time.sleep(600)
def counts_differ(rank): rank == 0 and dist.all_reduce(torch.ones(1), async_op=True); return True
def skips(rank): rank == 0 and pytest.skip("not me")
def exits(rank): rank == 1 and os._exit(3)
def raises_everywhere(rank): raise KeyError("everywhere")
def exits_python(rank): rank == 1 and sys.exit("enough")
def ends_its_group(rank): dist.destroy_process_group(); raise ValueError("after that")
def leaves_groups(rank): dist.new_group([0, 1]); raise ValueError("with groups")
def is_at_fault(rank): rank == 0 and ctypes.string_at(0)
def is_unpicklable(rank): raise Unpicklable("with a handle")
def forks_and_exits(rank):
    if rank == 0: os.fork() and os._exit(5) or time.sleep(600)
def writes_much(rank): print("x" * 10**6); assert rank != 0, "after all that"
def exits_pytest(rank): rank == 1 and pytest.exit("no more")
def goes_elsewhere(rank): rank == 0 and dist.barrier()

FAULTS = [raises, is_killed, hangs, counts_differ, skips, exits, raises_everywhere, exits_python,
          ends_its_group, leaves_groups, is_at_fault, is_unpicklable, forks_and_exits, writes_much,
          exits_pytest, goes_elsewhere]

def fault_of(n): return FAULTS[n // 10 % len(FAULTS)] if n % 10 == 5 else None

def on_ranks(n):
    limit = 2 if fault_of(n) in (hangs, goes_elsewhere) else None
    return pytest.mark.gt_world("ranks", size=2 + n // 3 % 2, timeout=limit)

@pytest.mark.parametrize("n", [pytest.param(n, marks=on_ranks(n)) for n in range({count})])
def test_it(n):
    rank, size, fault = dist.get_rank(), dist.get_world_size(), fault_of(n)
    if fault is not None and fault(rank): return
    begun = time.monotonic()
    value = torch.ones(100)
    dist.all_reduce(value)
    assert value.tolist() == [size] * 100
    if n in (3, 9, 21, 27, 33, 39): time.sleep(0.5)  # so that other workers run three ranks, too
    if rank == 0:
        with open("at-work", "a") as file: print(begun, time.monotonic(), size, file=file)
"""

# What the report of each fault says, in the order of FAULTS.
SAID = [
    "rank 1: AssertionError: only here",
    "rank 0 was killed by SIGKILL",
    "rank 1 did not end within 2 s",
    "different numbers of collectives on all ranks: 1 (rank 0)",
    "skipped: not me (rank 0)",
    "rank 1 exited with status 3",
    "KeyError: 'everywhere'",
    "SystemExit: enough",
    "ValueError: after that",
    "ValueError: with groups",
    "rank 0 was killed by SIGSEGV",
    "Unpicklable: with a handle",
    "rank 0 exited with status 5",
    "rank 0: AssertionError: after all that",
    "rank 1: called pytest.exit: no more",
    "rank 0 called barrier at test_it.py:",
]

LAST = """
import os, signal
import pytest
from late import dist

def test_called(gt_ranks): assert len(set(gt_ranks.run(os.getpid, size=2))) == 2

@pytest.mark.gt_world("ranks", size=2)
def test_kills_its_worker():
    if dist.get_rank() == 0:
        worker = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]
        os.kill(int(worker), signal.SIGKILL)
    dist.barrier()

@pytest.mark.parametrize("n", range(3))
@pytest.mark.gt_world("ranks", size=4)
def test_after_that(n): dist.barrier()
"""


@pytest.fixture(scope="module", params=[40, pytest.param(1000, marks=pytest.mark.long)])
def count(request):
    return request.param


@pytest.fixture(scope="module")
def run(count, tmp_path_factory):
    """Run ``count`` tests on two workers and four slots; in the end a worker dies."""
    suite = Suite(tmp_path_factory.mktemp("soak") / "suite")
    suite.write("test_it.py", SUITE.replace("{count}", str(count)))
    suite.write("test_last.py", LAST)
    started = suite.start("-n2", "--gt-gpus=4", "-p", "no:randomly", environ={"RECORD_MEMORY": "1"})
    return suite.run_together(started, limit=3000)


def test_every_verdict_is_right(run, count):
    """T1 to T5, T7: again and again."""
    assert {n: verdict(run, n) for n in range(count)} == {n: expected(n) for n in range(count)}


def test_never_more_ranks_are_at_work_than_there_are_slots(run):
    spans = [
        [float(word) for word in line.split()]
        for line in (run.folder / "at-work").read_text().splitlines()
    ]
    at_once = [
        sum(size for begun, ended, size in spans if begun <= moment <= ended)
        for moment, _, _ in spans
    ]
    assert len(spans) > 30
    assert 2 <= max(at_once) <= 4


def test_ranks_under_xdist(run):
    assert "gtrainer: 4 CPU ranks (gloo), no GPU used, shared by the workers" in run.output
    assert run.outcome("test_called") == "passed"


def test_a_killed_worker_takes_its_ranks_along(run):
    """T6: the others go on with the next tests, on slots that are free again."""
    assert re.search(
        r"worker 'gw\d' crashed while running 'test_last.py::test_kills_its_worker'", run.output
    )
    assert [run.outcome(f"test_after_that[{n}]") for n in range(3)] == ["passed"] * 3


def test_nothing_is_left_over(run):
    end = time.monotonic() + 60
    while run.left_over() and time.monotonic() < end:
        time.sleep(0.1)
    assert run.left_over() == []


@pytest.mark.parametrize("what", ["kib", "kib_of_ranks", "processes", "files", "ports"])
def test_nothing_grows(run, what):
    """Private memory of workers and of ranks, processes, open files and ports: the last third
    against the second.
    """
    for worker in ("gw0", "gw1"):
        taken = [each[what] for each in run.footprints if each["worker"] == worker]
        early, late = thirds(taken)
        print(
            f"{worker} {what}: {early:.0f} in the second third, {late:.0f} in the last of "
            f"{len(taken)} tests"
        )
        assert late <= 1.1 * early + (10_000 if "kib" in what else 4)


GREEN = """
import time
import pytest
from late import dist, torch

def on_ranks(n): return pytest.mark.gt_world("ranks", size=2 + n // 3 % 3)

@pytest.mark.parametrize("n", [pytest.param(n, marks=on_ranks(n)) for n in range({count})])
def test_it(n):
    "Ranks are late in turns; some are for longer than the parent waits between its looks."
    rank, size = dist.get_rank(), dist.get_world_size()
    late = n % size == rank
    if n % 20 == 7 and late: time.sleep(1.3)
    if n % 20 == 17 and late:
        end = time.monotonic() + 1.3
        while time.monotonic() < end: torch.ones(64, 64) @ torch.ones(64, 64)
    ahead = dist.all_reduce(torch.ones(10), async_op=True)
    if n % 25 == 3 and not late: time.sleep(0.8)
    ahead.wait()
    if n % 4 == 1 and rank == 0: dist.send(torch.ones(3), 1)
    if n % 4 == 1 and rank == 1: dist.recv(torch.ones(3), 0)
    if n % 5 == 2:
        pair = dist.new_group([0, 1])
        if rank < 2: dist.barrier(pair)
    dist.barrier()
"""


@pytest.mark.parametrize("count", [pytest.param(1000, marks=pytest.mark.long)])
def test_slow_ranks_raise_no_alarm(suite, count):
    """T3: run it beside other work, which makes ranks slow at any place."""
    suite.write("test_it.py", GREEN.replace("{count}", str(count)))
    begun = time.monotonic()
    run = suite.run_together(suite.start("-n2", "--gt-gpus=8", "-p", "no:randomly"), limit=3000)
    print(
        f"{count} green tests: {time.monotonic() - begun:.0f} s, load {os.getloadavg()[1]:.1f} "
        f"over 5 minutes"
    )
    assert {name: run.text(name) for name in run.reports if run.outcome(name) != "passed"} == {}
    assert len(run.reports) == count
    assert run.left_over() == []


def expected(n):
    return SAID[n // 10 % len(SAID)] if n % 10 == 5 else "passed"


def verdict(run, n):
    """Return the expected outcome if the report names it, else the reported one."""
    name = f"test_it[{n}]"
    if name not in run.reports:
        return "no report"
    outcome, text = run.outcome(name), run.text(name)
    if outcome == "failed":
        return expected(n) if expected(n) in text else text
    return outcome


def thirds(values):
    """Medians of the second and of the last third: the first warms up."""
    third = len(values) // 3
    return statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :])
