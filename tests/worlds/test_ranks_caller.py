"""``gt_ranks.run``: the test stays in the parent, a function runs on the ranks."""

import re

import pytest

pytestmark = pytest.mark.second_tier


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.take("ranks_caller")
    return module_suite.run("--gt-gpus=4", "-rs")


def test_functions_on_ranks(run):
    wrong = {
        name: run.text(name)
        for name in run.reports
        if run.outcome(name) not in ("passed", "skipped")
    }
    assert wrong.keys() == {"test_fails", "test_death_between_calls"}, wrong
    assert "rank 1: exited with status 3 after its last test" in wrong["test_death_between_calls"]
    assert len(run.reports) == 32
    assert run.outcome("test_size_too_large") == "skipped"
    assert "needs 5 ranks, --gt-gpus gives 4: --gt-gpus=5 lets it run" in run.output
    call = run.reports["test_results_in_the_order_of_ranks"]["call"]
    verdicts = [fact for fact in call["facts"] if fact["kind"] == "verdict"]
    assert verdicts == [{"kind": "verdict", "outcome": "equal"}] * 2
    assert call["output"] == "".join(
        f"[rank {rank}] summed {n}\n" for n in (2.0, 1.0) for rank in range(3)
    )
    assert run.left_over() == []


def test_a_failed_call_shows_the_remote_traceback_and_none_of_our_frames(run):
    assert "in raises_on" in run.text("test_fails")
    assert "caller.py" not in run.text("test_fails")


def test_a_long_wait_names_the_ranks_that_are_waited_for(run):
    """A line every so often, where the run has a terminal."""
    where = r"at test_functions.py:\d+ in hangs_on \(rank 0\), waiting in barrier \(rank 1\)"
    line = r"gtrainer: test_functions.py::test_limit has run for \d s of 1.5: " + where
    assert re.search(line, run.output), run.output


def test_worlds_of_many_sizes_stay_within_a_limit(run):
    """Idle ranks are kept up to twice the slots; the least recently used go first."""
    sizes = enumerate([1, 2, 3, 1, 2, 3, 4, 1])
    pids = [
        run.reports[f"test_many_sizes[{turn}-{size}]"]["call"]["output"] for turn, size in sizes
    ]
    assert pids[0] == pids[3] == pids[7]
    assert pids[1:3] == pids[4:6]
