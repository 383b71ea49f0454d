"""T: each fault on ranks is reported as the right error of the right rank, and ends there."""

import socket
import time
from pathlib import Path

import pytest

from tests.worlds.conftest import Suite

PLAIN_IDS = "disable_test_id_escaping_and_forfeit_all_rights_to_community_support"


# test: outcome, what its report says, what it must not say
TABLE = {
    "test_raises_while_others_wait": (
        "failed",
        [
            "AssertionError: only here",
            "rank 1: AssertionError: only here",
            "ranks 0, 2: waited in barrier",
        ],
        ["Connection"],
    ),
    "test_all_raise_alike": ("failed", ["assert 0 == 7"], ["waited"]),
    "test_origin": (
        "failed",
        ["differs at (7, 2)\n\ntest_faults.py", "rank 0: AtStep: differs at (9, 0)"],
        [],
    ),
    "test_killed": (
        "failed",
        ["rank 2 was killed by SIGKILL", "the last words", "ranks 0, 1: waited in barrier"],
        [],
    ),
    "test_segmentation_fault": ("failed", ["rank 0 was killed by SIGSEGV", "in string_at"], []),
    "test_hangs": (
        "failed",
        [
            "rank 1 did not end within 2 s, at test_faults.py",
            "in never_comes",
            "in rests_beside",
            "ranks 0, 2: did not end within 2 s, waiting in all_reduce",
            "--- Python stacks [ranks 0, 2] ---",
            "--- next ---\nIf the test is only slow: --gt-timeout=SECONDS",
            'pytest -n 0 "test_faults.py::test_hangs"',
        ],
        ["_pytest"],
    ),
    "test_skips_on_one": (
        "failed",
        ["the ranks do not agree: passed (ranks 0, 2), skipped: not me (rank 1)"],
        [],
    ),
    "test_xfails_while_others_wait": ("xfailed", [], []),
    "test_counts_differ": (
        "failed",
        ["different numbers of collectives on all ranks: 1 (rank 0), 0 (ranks 1, 2)"],
        [],
    ),
    "test_unpicklable": ("failed", ["Unpicklable: with a handle"], []),
    "test_pytest_exit": ("failed", ["ranks 0-2: called pytest.exit: I stop here"], []),
    "test_setup_fails_on_one": ("error", ["the fixture broke", "rank 2: AssertionError"], []),
    "test_teardown_fails_on_one": ("error", ["the end broke", "rank 1: AssertionError"], []),
    "test_writes_10_megabytes": ("failed", ["assert 0 != 0", "ranks 1, 2: passed"], []),
    "test_different_collectives": (
        "failed",
        [
            "rank 0 called barrier at test_faults.py:",
            " in test_different_collectives, ranks 1, 2 called all_reduce of float32[1000] at "
            "test_faults.py:",
        ],
        [],
    ),
    **{f"test_odd_ids[{word}]": ("passed", [], []) for word in ("a b", "x/y", "..", "🙂")},
    "test_fp8_all_to_all": ("failed", ["Invalid scalar type"], []),
    "test_good_after_fp8": ("passed", [], []),
    "test_changes_its_process": ("failed", ["rank 1: KeyError: 'after the changes'"], []),
    "test_finds_it_unchanged": ("passed", [], []),
    "test_leaves_groups": ("passed", [], []),
    "test_no_space_left": ("failed", ["rank 0: OSError: [Errno 27] File too large"], []),
    "test_good_within_no_limits": ("passed", [], []),
    "test_shares_memory_and_dies": ("failed", ["rank 0 was killed by SIGKILL"], []),
    "test_leaves_a_daemon": ("failed", ["rank 0 exited with status 0"], []),
    "test_kills_its_forkserver": ("failed", ["was lost with the process that had forked it"], []),
    "test_good_on_a_new_forkserver": ("passed", [], []),
    "test_call_and_teardown_fail": (
        "failed",
        ["assert 0 == 7", "ValueError: the end of all broke"],
        [],
    ),
    "test_call_and_teardown_fail_on_other_ranks": (
        "failed",
        ["assert 0 == 7", "the end broke"],
        [],
    ),
    "test_missing_golden_before_a_subtest": (
        "failed",
        ["test_missing_golden_before_a_subtest.txt is missing"],
        [],
    ),
    "test_expects_a_failed_collective": ("passed", [], []),
    "test_good_after_an_expected_failure": ("passed", [], []),
    "test_somebody_takes_a_slot": ("passed", [], []),
    "test_waits_in_vain": (
        "failed",
        [
            "waited 0.5 s for 3 of 3 slots (cpu0, cpu1, cpu2), held are: cpu0 by process",
            "(somebody else); end their",
        ],
        [],
    ),
    "test_somebody_gives_it_back": ("passed", [], []),
    "test_somebody_dies_with_all_slots": ("passed", [], []),
    "test_good_after_a_stale_lease": ("passed", [], []),
    "test_control_differs_on_one": ("passed", [], []),
    "test_control_differs_on_none": (
        "failed",
        ["test_faults.py:454: the control run is equal on all ranks"],
        [],
    ),
    "test_control_differs_on_one_of_all": (
        "failed",
        ["ControlFailed: swapped", "rank 1: passed"],
        [],
    ),
    "test_good_after_that": ("passed", [], []),
    "test_good_after_a_death": ("passed", [], []),
    "test_good_after_a_hang": ("passed", [], []),
    "test_counts_agree_again": ("passed", [], []),
    "test_good_at_the_end": ("passed", [], []),
}

# More of the same classes, in a run of its own.
MORE = {
    "test_two_errors": (
        "failed",
        ["ValueError: first", "rank 0: KeyError: 'second'", "rank 1: passed"],
        [],
    ),
    "test_os_exit": ("failed", ["rank 1 exited with status 0"], []),
    "test_sys_exit": ("failed", ["SystemExit: enough", "ranks 0, 2: passed"], []),
    "test_forks_and_dies": ("failed", ["rank 0 exited with status 5"], []),
    "test_hangs_and_holds_the_gil": (
        "failed",
        ["rank 1 did not end within 2 s, at test_faults.py", "in test_hangs_and_holds_the_gil"],
        [],
    ),
    "test_stops_itself": (
        "failed",
        ["rank 1 did not end within 3 s, stopped by a signal, as SIGSTOP is one", "-CONT"],
        [],
    ),
    "test_skips_while_others_wait": (
        "failed",
        ["the ranks do not agree: waited in barrier (ranks 0, 2), skipped: nor me (rank 1)"],
        [],
    ),
    "test_counts_differ_in_a_subgroup": (
        "failed",
        [
            "different numbers of collectives on ranks 0, 2: 0 (rank 0), 1 (rank 2)",
            "; rank 2 alone called all_reduce of float32[1] at test_faults.py:",
        ],
        [],
    ),
    "test_writes_in_another_encoding": ("failed", ["assert 1 != 1"], []),
    "test_exception_of_this_file": ("failed", ["Local: mine", "rank 2: Local: mine"], []),
    "test_one_never_reaches_the_barrier": (
        "failed",
        ["ranks 0, 2 wait in barrier at test_faults.py:", "on all ranks: rank 1 ended without it"],
        [],
    ),
    "test_skips_in_a_fixture_on_one": (
        "failed",
        ["the ranks do not agree: passed (ranks 0, 2), skipped: no such thing here (rank 1)"],
        [],
    ),
    "test_xpasses_strictly_on_one": ("xfailed", [], []),
    "test_no_space_left_for_output": ("failed", ["rank 0: OSError: [Errno 27] File too large"], []),
    "test_out_of_memory_by_a_limit": (
        "failed",
        ["rank 0: RuntimeError", "ranks 1, 2: waited in barrier"],
        [],
    ),
    "test_pytest_exit_on_one": (
        "failed",
        ["rank 2: called pytest.exit: rank 2 has had enough", "ranks 0, 1: waited in barrier"],
        [],
    ),
    "test_leaves_a_child": ("failed", ["rank 0 exited with status 0"], []),
    "test_forks_and_goes_on": ("passed", [], []),
    "test_judged_by_itself_after_a_fork": ("failed", ["assert 0 == 7"], []),
    "test_missing_golden_in_teardown": (
        "error",
        ["test_missing_golden_in_teardown.txt is missing"],
        [],
    ),
    "test_compiles": ("passed", [], []),
    "test_finds_nothing_compiled": ("passed", [], []),
}


def suite_run(suite, *chosen):
    """Run the suite in a worker, which leases slots.

    The rendezvous port of the environment is taken, so no process may use it.
    """
    suite.take("ranks_faults")
    suite.write("pytest.ini", f"[pytest]\n{PLAIN_IDS} = true\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        return suite.run(
            "-n1", "--gt-gpus=3", "--gt-lease-timeout=0.5", *chosen, environ=rendezvous
        )


def of_both_runs(test):
    """Parametrise a test over the faults of both runs, those of ``MORE`` in the second tier."""
    more = [pytest.param("run_of_more", name, marks=pytest.mark.second_tier) for name in MORE]
    cases = [("run", name) for name in TABLE] + more
    return pytest.mark.parametrize(("which", "name"), cases)(test)


@pytest.fixture(scope="module")
def run(module_suite):
    return suite_run(module_suite, *(f"--deselect=test_faults.py::{name}" for name in MORE))


@pytest.fixture(scope="module")
def run_of_more(tmp_path_factory):
    names = ["test_raises_while_others_wait", *MORE]
    return suite_run(
        Suite(tmp_path_factory.mktemp("more") / "suite"),
        *(f"test_faults.py::{name}" for name in names),
    )


@of_both_runs
def test_fault(request, which, name):
    """T1, T2, T3, T4, T5, T7."""
    run = request.getfixturevalue(which)
    outcome, expected, unwanted = (TABLE | MORE)[name]
    assert run.outcome(name) == outcome, run.text(name)
    text = run.text(name)
    for line in expected:
        assert line in text
    for line in unwanted:
        assert line not in text


@of_both_runs
def test_nothing_is_left_after_a_fault(request, which, name):
    """T5: at most the forkserver and three ranks run, with their ports; no slot is held, no file or
    folder is kept.
    """
    run = request.getfixturevalue(which)
    first, now = run.footprint("test_raises_while_others_wait"), run.footprint(name)
    assert now["processes"] <= 1 + 3
    assert now["strays"] == []
    assert now["locks"] == (
        ["slot-cpu0"] if name in ("test_somebody_takes_a_slot", "test_waits_in_vain") else []
    )
    assert now["ports"] <= first["ports"]
    assert now["files"] <= first["files"] + 1  # a test holds a lease itself
    assert now["folders"] <= first["folders"]


@pytest.mark.second_tier
def test_nothing_is_left_over_by_more_faults(run_of_more):
    """T5."""
    assert set(run_of_more.reports) == {"test_raises_while_others_wait", *MORE}
    assert run_of_more.left_over() == []


def test_every_test_of_the_suite_is_in_the_table(run):
    assert set(run.reports) == set(TABLE)


def test_output_is_shown_by_rank(run):
    for rank in range(3):
        assert f"Captured stdout call [rank {rank}]" in run.output
        assert f"written before {rank}" in run.output


def test_too_much_output_is_cut(run):
    output = run.reports["test_writes_10_megabytes"]["call"]["output"]
    assert "characters cut" in output
    assert len(output) < 80_000


def test_what_a_test_left_is_attributed_to_it(run):
    """K3, T8: in the summary, a line a topic."""
    assert (
        "left      1 a process group of ranks 0, 1 by test_faults.py::test_leaves_groups"
        in run.output
    )
    assert (
        "test_changes_its_process changed matmul precision from ('highest', 'none', 'none') to"
        in run.output
    )


def test_a_hung_test_counts_as_one_in_its_world(run):
    assert "worlds    1 test in ranks(3, gloo on cpu)" in run.output


def test_a_hung_test_has_taken_the_time_that_it_took(run):
    """Although none of its ranks has come to a report."""
    assert 2 <= run.reports["test_hangs"]["call"]["duration"] < 60


def test_a_broken_teardown_is_told_beside_a_failed_call(run):
    for name in ("test_call_and_teardown_fail", "test_call_and_teardown_fail_on_other_ranks"):
        assert [run.reports[name][when]["outcome"] for when in ("call", "teardown")] == [
            "failed",
            "failed",
        ]


def test_nothing_is_left_over(run):
    """T5: nothing is left behind, not even the child of a rank that died."""
    assert run.left_over() == []


def test_no_shared_memory_is_left_over(run):
    """T5: a rank is killed with its children, but not the trackers that remove what it shared."""
    names = (run.folder / "shared").read_text().split()
    assert len(names) == 6
    end = time.monotonic() + 60
    while (
        left := [name for name in names if Path("/dev/shm", name).exists()]
    ) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []
