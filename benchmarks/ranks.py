"""Tests on ranks against torch's own harnesses, gloo on CPU.

    python -m benchmarks.ranks [--sizes 2 4 8] [--rounds 5] [--skip cpu cold]

In one pytest run for each size, in turns: empty tests on warm ranks, the pytest protocol included,
and tests that all-reduce 1 MB; both of ``MultiProcContinuousTest``, whose ranks run no pytest; the
bare collective, in a loop on the same ranks; and empty tests without ranks, since every rank runs
that protocol. Then the CPU time of a file of 20 tests, against 20 times a test of
``MultiProcessTestCase``, and the cold start of 8 ranks against importing what they need. Times are
on the clock, but for the CPU time: on a machine with other things to do, look at ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.paired import Goal, report
from pytest_gtrainer.ranks.pool import PRELOAD

CONFTEST = """
import json, os, time

TIMES, STARTED = {}, {}

class Clock:
    def pytest_runtest_logstart(self, nodeid):
        STARTED[nodeid] = time.perf_counter()

    def pytest_runtest_logfinish(self, nodeid):
        name = nodeid.split("::")[-1].split("[")[0].rstrip("0123456789_")
        TIMES.setdefault(name, []).append(time.perf_counter() - STARTED[nodeid])

    def pytest_sessionfinish(self):
        with open(os.environ["BENCH_TIMES"], "w") as file:
            json.dump(TIMES, file)

def pytest_configure(config):
    if "gt_rank" not in getattr(config, "workerinput", {}):
        config.pluginmanager.register(Clock())
"""

IN_TURNS = """
import json, subprocess, sys, time
import pytest, torch, torch.distributed as dist

EACH = range({each})
VALUE = torch.ones(2**18)  # made once: a test that makes its own also pays for the pages
on_ranks = pytest.mark.gt_world("ranks", size={size})

@pytest.fixture(scope="module")
def yardstick():
    command = [sys.executable, "-m", "benchmarks.torch_harness", "continuous"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    def run(name):
        print(name, len(EACH), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())
    run("test_empty")
    yield run
    process.communicate()

@on_ranks
@pytest.mark.parametrize("n", EACH)
def test_warm_up(n): dist.all_reduce(torch.ones(2**18))
"""

ROUND = """
def test_yardstick_{round}(yardstick):
    for name in ("test_empty", "test_all_reduce"):
        with open(f"{{name}}.{size}", "a") as file: print(*yardstick(name), sep="\\n", file=file)

@pytest.mark.parametrize("n", EACH)
def test_plain_{round}(n): pass

@on_ranks
@pytest.mark.parametrize("n", EACH)
def test_empty_{round}(n): pass

@on_ranks
def test_bare_{round}():
    times = []
    for _ in EACH:
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(VALUE)
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        with open("bare.{size}", "a") as file: print(*times, sep="\\n", file=file)

@on_ranks
@pytest.mark.parametrize("n", EACH)
def test_all_reduce_{round}(n): dist.all_reduce(VALUE)
"""

TWENTY = """
import pytest, torch.distributed as dist
@pytest.mark.gt_world("ranks", size={size})
@pytest.mark.parametrize("n", range(20))
def test_empty(n): pass
"""


def pytest_run(folder: Path, source: str, size: int) -> dict[str, list[float]]:
    """Run a test file; seconds by test, parameters and rounds taken together."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(textwrap.dedent(source))
    (folder / "pytest.ini").write_text("[pytest]\n")
    environ = {**os.environ, "BENCH_TIMES": str(folder / "times"), "BENCH_RANKS": str(size)}
    environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--gt-device=cpu",
        f"--gt-gpus={size}",
        "-p",
        "no:randomly",
    ]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    times: dict[str, list[float]] = json.loads((folder / "times").read_text())
    return times


def in_turns(size: int, rounds: int, each: int) -> bool:
    """Empty tests and all-reduces, ours and theirs."""
    source = IN_TURNS.format(each=each, size=size)
    source += "".join(ROUND.format(round=number, size=size) for number in range(rounds))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        taken = pytest_run(folder, source, size)
        written = ("test_empty", "test_all_reduce", "bare")
        theirs, their_all_reduce, bare = (
            statistics.median(_numbers(folder / f"{what}.{size}")) for what in written
        )
    empty, all_reduce = (
        statistics.median(taken["test_empty"]),
        statistics.median(taken["test_all_reduce"]),
    )
    print(f"--- {size} ranks, median of {rounds * each}")
    times = {
        "plain test, no ranks": statistics.median(taken["test_plain"]),
        "empty test": empty,
        "MultiProcContinuousTest": theirs,
        "all-reduce test": all_reduce,
        "bare all-reduce": bare,
        "MultiProcContinuousTest's": their_all_reduce,
    }
    goals = [
        Goal("empty test", "MultiProcContinuousTest", 2),
        Goal("all-reduce test", "MultiProcContinuousTest's", 1),
    ]
    return report(times, None, goals)


def _numbers(file: Path) -> list[float]:
    return [float(line) for line in file.read_text().split()]


def cpu_of(run: Callable[[], object]) -> float:
    """CPU seconds of the processes that ``run`` starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu_of_twenty(size: int) -> bool:
    def theirs() -> None:
        command = [sys.executable, "-m", "benchmarks.torch_harness", "spawned"]
        subprocess.run(
            command, check=True, env={**os.environ, "BENCH_RANKS": str(size)}, capture_output=True
        )

    def ours() -> None:
        with tempfile.TemporaryDirectory() as name:
            pytest_run(Path(name), TWENTY.format(size=size), size)

    start_up = cpu_of(
        lambda: subprocess.run(
            [sys.executable, "-c", "import benchmarks.torch_harness"], check=True
        )
    )
    one = statistics.median(cpu_of(theirs) for _ in range(3)) - start_up
    print(f"--- CPU time of 20 tests on {size} ranks, median of 3")
    twenty = statistics.median(cpu_of(ours) for _ in range(3))
    times = {"20 tests": twenty, "20 of MultiProcessTestCase": start_up + 20 * one}
    return report(times, None, [Goal("20 tests", "20 of MultiProcessTestCase", 1 / 20)])


def cold_start(rounds: int) -> bool:
    imports, starts = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {', '.join(PRELOAD)}"], check=True)
        imports.append(time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as name:
            starts.append(pytest_run(Path(name), TWENTY.format(size=8), 8)["test_empty"][0])
    print(f"--- cold start of 8 ranks, median of {rounds}")
    times = {
        "first test": statistics.median(starts),
        "an import + 1.5 s": statistics.median(imports) + 1.5,
    }
    return report(times, None, [Goal("first test", "an import + 1.5 s", 1)])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=40, help="tests of a kind in a round")
    parser.add_argument("--skip", choices=("turns", "cpu", "cold"), nargs="+", default=[])
    options = parser.parse_args()
    met = [
        in_turns(size, options.rounds, options.each)
        for size in options.sizes
        if "turns" not in options.skip
    ]
    met += [cpu_of_twenty(size) for size in (2,) if "cpu" not in options.skip]
    met += [cold_start(3)] if "cold" not in options.skip else []
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
