"""Ranks in a run with other plugins and with the options that stop, select and debug."""

import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.second_tier

# Installed by `make env` where only these tests see them: they would shuffle and time out all other
# tests, too.
BESIDE = Path(sys.prefix) / "beside"

SUITE = """
import random, time
import pytest
from late import dist, torch

pytestmark = pytest.mark.gt_world("ranks", size=2)

@pytest.mark.timeout(1.5)
def test_hangs():
    if dist.get_rank() == 1: time.sleep(600)
    dist.barrier()

def test_draws_alike():
    drawn = [None, None]
    dist.all_gather_object(drawn, (random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]

@pytest.mark.parametrize("n", range(3))
def test_fails(n): assert dist.get_rank() == 0
"""


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.write("test_it.py", SUITE)
    options = (
        "--timeout=100",
        "-p",
        "randomly",
        "--pdb",
        "--maxfail=3",
        "-p",
        "no:cacheprovider",
        "--durations=3",
    )
    path = os.pathsep.join(filter(None, [str(BESIDE), os.environ.get("PYTHONPATH")]))
    return module_suite.run(*options, environ={"PYTHONPATH": path})


def test_the_plugins_are_there(run):
    assert "randomly-" in run.output, (
        "make env installs pytest-randomly and pytest-timeout beside the environment"
    )
    assert "Using --randomly-seed=" in run.output


def test_maxfail_counts_tests_not_ranks(run):
    failed = [name for name in run.reports if run.outcome(name) == "failed"]
    assert len(failed) == 3
    assert "stopping after 3 failures" in run.output


def test_a_time_limit_of_another_plugin_ends_the_test(suite):
    """It shows where the ranks are, and nothing of what waits for them."""
    suite.write("test_it.py", SUITE)
    path = os.pathsep.join(filter(None, [str(BESIDE), os.environ.get("PYTHONPATH")]))
    run = suite.run("-p", "no:randomly", "-k", "test_hangs", environ={"PYTHONPATH": path})
    text = run.text("test_hangs")
    assert "rank 1 did not end: Timeout (>1.5s)" in text
    assert "test_it.py:10 in test_hangs" in text
    for own in ("pool.py", "team.py", "watch.py"):
        assert own not in text


def test_ranks_draw_the_same_numbers(run):
    assert (
        run.outcome("test_draws_alike") == "passed" if "test_draws_alike" in run.reports else True
    )


def test_pdb_is_not_entered_where_there_is_no_terminal(run):
    assert "has failed on rank 1: --pdb has no terminal here" in run.output
    assert "(Pdb" not in run.output


def test_nothing_is_left_over(run):
    assert run.left_over() == []
