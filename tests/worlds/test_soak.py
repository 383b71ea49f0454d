"""Many tests on ranks in one run, one in ten with a fault: every verdict right, nothing left over, memory flat."""

from __future__ import annotations

import statistics

import pytest

SUITE = """
import os, signal, sys, time
import pytest, torch, torch.distributed as dist

def raises(rank): assert rank != 1, "only here"
def raises_everywhere(rank): raise KeyError("everywhere")
def is_killed(rank): rank == 0 and os.kill(os.getpid(), signal.SIGKILL)
def exits(rank): rank == 1 and os._exit(3)
def exits_python(rank): rank == 1 and sys.exit("enough")
def skips(rank): rank == 0 and pytest.skip("not me")
def counts_differ(rank): rank == 0 and dist.all_reduce(torch.ones(1), async_op=True)
def ends_its_group(rank): dist.destroy_process_group(); raise ValueError("after that")
def leaves_groups(rank): dist.new_group([0, 1]); raise ValueError("with groups")
def hangs(rank): rank == 1 and time.sleep(600)

FAULTS = [raises, is_killed, raises_everywhere, exits, skips, exits_python,
          counts_differ, ends_its_group, leaves_groups, hangs]

SIZES = [pytest.mark.gt_world("ranks", size=size) for size in (2, 3)]

@pytest.mark.parametrize("n", [pytest.param(n, marks=SIZES[n // 3 % 2]) for n in range({count})])
def test_it(n):
    fault = FAULTS[n // 10 % len(FAULTS)] if n % 10 == 5 else None
    if fault is not None:
        fault(dist.get_rank())
        if fault is counts_differ: return
    value = torch.ones(100)
    dist.all_reduce(value)
    assert value.tolist() == [dist.get_world_size()] * 100
"""

# What the report of each fault says, in the order of FAULTS.
SAID = [
    "rank 1: AssertionError: only here",
    "rank 0 was killed by SIGKILL",
    "KeyError: 'everywhere'",
    "rank 1 exited with status 3",
    "skipped: not me (rank 0)",
    "SystemExit: enough",
    "different numbers of collectives on all ranks: 1 (rank 0)",
    "ValueError: after that",
    "ValueError: with groups",
    "rank 1 did not end within 10 s",
]


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_soak(suite, count):
    """T1 to T7, again and again, on two workers."""
    suite.write("test_it.py", SUITE.replace("{count}", str(count)))
    process = suite.start("-n2", "--gt-gpus=4", "--gt-timeout=10", "-p", "no:randomly")
    run = suite.run_together(process, limit=3000)
    assert {n: verdict(run, n) for n in range(count)} == {n: expected(n) for n in range(count)}
    assert run.left_over() == []
    for what in ("kib", "kib_of_ranks", "processes", "files"):
        for worker in ("gw0", "gw1"):
            taken = [each[what] for each in run.footprints if each["worker"] == worker]
            early, late = thirds(taken)
            print(f"{worker} {what}: {early:.0f} in the second third, {late:.0f} in the last of {len(taken)} tests")
            assert late <= 1.1 * early + (10_000 if "kib" in what else 4)


def expected(n):
    return SAID[n // 10 % len(SAID)] if n % 10 == 5 else "passed"


def verdict(run, n):
    """What is expected if the report says it; else what came."""
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
