"""T: what goes wrong on ranks is reported as the right error of the right rank, and ends with its test."""

from __future__ import annotations

import pytest

SUITE = '''
import ctypes, os, signal, sys, time
import pytest, torch
import torch.distributed as dist

pytestmark = pytest.mark.gt_world("ranks", size=3)
rank = lambda: dist.get_rank()

class Unpicklable(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.handle = lambda: None

class AtStep(AssertionError):
    def __init__(self, *origin):
        super().__init__(f"differs at {origin}")
        self.gt_origin = origin

@pytest.fixture
def broken_on_one():
    assert rank() != 2, "the fixture broke"

@pytest.fixture
def ends_badly():
    yield
    assert rank() != 1, "the end broke"

def test_raises_while_others_wait():
    group = dist.group.WORLD
    print("written before", rank())
    assert rank() != 1, "only here"
    dist.barrier()

def test_good_after_that():
    dist.barrier()

def test_all_raise_alike():
    assert rank() == 7

def test_two_errors():
    if rank() == 0: time.sleep(0.15); raise KeyError("second")
    if rank() == 2: raise ValueError("first")

def test_origin():
    time.sleep((0, 0.05, 0.15)[rank()])
    raise AtStep(9 - rank(), rank())

def test_killed():
    print("the last words")
    if rank() == 2: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def test_good_after_a_death():
    dist.barrier()

def test_segmentation_fault():
    if rank() == 0: ctypes.string_at(0)
    dist.barrier()

def test_os_exit():
    if rank() == 1: os._exit(0)

def test_sys_exit():
    if rank() == 1: sys.exit("enough")

def test_forks_and_dies():
    if rank() == 0:
        if os.fork() == 0: time.sleep(600)
        os._exit(5)
    dist.barrier()

@pytest.mark.gt_world("ranks", size=3, timeout=2)
def test_hangs():
    def never_comes():
        time.sleep(600)
    if rank() == 1: never_comes()
    dist.all_reduce(torch.ones(1))

def test_good_after_a_hang():
    dist.barrier()

def test_skips_on_one():
    if rank() == 1: pytest.skip("not me")

def test_skips_while_others_wait():
    if rank() == 1: pytest.skip("nor me")
    dist.barrier()

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_xfails_while_others_wait():
    if rank() == 1: 1 / 0
    dist.barrier()

def test_counts_differ():
    if rank() == 0: dist.all_reduce(torch.ones(1), async_op=True)

def test_counts_differ_in_a_subgroup():
    group = dist.new_group([0, 2])
    if rank() == 2: dist.all_reduce(torch.ones(1), group=group, async_op=True)

def test_counts_agree_again():
    dist.barrier()

def test_unpicklable():
    raise Unpicklable("with a handle")

def test_pytest_exit():
    pytest.exit("I stop here")

def test_setup_fails_on_one(broken_on_one):
    dist.barrier()

def test_teardown_fails_on_one(ends_badly): pass

def test_writes_a_lot():
    print("x" * 1_000_000)
    assert rank() != 0

def test_good_at_the_end():
    dist.barrier()
'''

# test: outcome, what its report says, what it must not say
TABLE = {
    "test_raises_while_others_wait": (
        "failed",
        ["AssertionError: only here", "rank 1: AssertionError: only here", "ranks 0, 2: waited in barrier"],
        ["Connection"],
    ),
    "test_all_raise_alike": ("failed", ["assert 0 == 7"], ["waited"]),
    "test_two_errors": ("failed", ["ValueError: first", "rank 0: KeyError: 'second'", "rank 1: passed"], []),
    "test_origin": ("failed", ["differs at (7, 2)\n\ntest_it.py", "rank 0: AtStep: differs at (9, 0)"], []),
    "test_killed": (
        "failed",
        ["rank 2 was killed by SIGKILL", "the last words", "ranks 0, 1: waited in barrier"],
        [],
    ),
    "test_segmentation_fault": ("failed", ["rank 0 was killed by SIGSEGV", "in string_at"], []),
    "test_os_exit": ("failed", ["rank 1 exited with status 0"], []),
    "test_sys_exit": ("failed", ["SystemExit: enough", "ranks 0, 2: passed"], []),
    "test_forks_and_dies": ("failed", ["rank 0 exited with status 5"], []),
    "test_hangs": (
        "failed",
        [
            "rank 1 did not end within 2 s, at test_it.py",
            "in never_comes",
            "ranks 0, 2: did not end within 2 s, waiting in all_reduce",
            "--- Python stacks [ranks 0, 2] ---",
        ],
        ["_pytest"],
    ),
    "test_skips_on_one": (
        "failed",
        ["the ranks do not agree: passed (ranks 0, 2), skipped: not me (rank 1)"],
        [],
    ),
    "test_skips_while_others_wait": (
        "failed",
        ["the ranks do not agree: waited in barrier (ranks 0, 2), skipped: nor me (rank 1)"],
        [],
    ),
    "test_xfails_while_others_wait": ("xfailed", [], []),
    "test_counts_differ": (
        "failed",
        ["different numbers of collectives on all ranks: 1 (rank 0), 0 (ranks 1, 2)"],
        [],
    ),
    "test_counts_differ_in_a_subgroup": (
        "failed",
        ["different numbers of collectives on ranks 0, 2: 0 (rank 0), 1 (rank 2)"],
        [],
    ),
    "test_unpicklable": ("failed", ["Unpicklable: with a handle"], []),
    "test_pytest_exit": ("failed", ["ranks 0-2: called pytest.exit: I stop here"], []),
    "test_setup_fails_on_one": ("error", ["the fixture broke", "rank 2: AssertionError"], []),
    "test_teardown_fails_on_one": ("error", ["the end broke", "rank 1: AssertionError"], []),
    "test_writes_a_lot": ("failed", ["assert 0 != 0"], []),
    "test_good_after_that": ("passed", [], []),
    "test_good_after_a_death": ("passed", [], []),
    "test_good_after_a_hang": ("passed", [], []),
    "test_counts_agree_again": ("passed", [], []),
    "test_good_at_the_end": ("passed", [], []),
}


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.write("test_it.py", SUITE)
    return module_suite.run("--gt-gpus=3", "--durations=10")


@pytest.mark.parametrize("name", TABLE)
def test_fault(run, name):
    """T1 to T5, T7."""
    outcome, expected, unwanted = TABLE[name]
    assert run.outcome(name) == outcome, run.text(name)
    text = run.text(name)
    for line in expected:
        assert line in text
    for line in unwanted:
        assert line not in text


def test_every_test_of_the_suite_is_in_the_table(run):
    assert set(run.reports) == set(TABLE)


def test_output_is_shown_by_rank(run):
    for rank in range(3):
        assert f"Captured stdout call [rank {rank}]" in run.output
        assert f"written before {rank}" in run.output


def test_too_much_output_is_cut(run):
    output = run.reports["test_writes_a_lot"]["call"]["output"]
    assert "characters cut" in output
    assert len(output) < 80_000


def test_nothing_is_left_over(run):
    """T5: nothing is left behind, not even the child of a rank that died."""
    assert run.left_over() == []
