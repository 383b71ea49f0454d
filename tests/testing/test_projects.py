"""``run_project``: what the tests of a project came to, read by a test of a plugin."""

import pytest

from pytest_gtrainer.testing import run_project

pytestmark = pytest.mark.second_tier

SUITE = """
import pytest, torch
from pytest_gtrainer import Record, assert_bitwise_equal

def record(value):
    record = Record(world_size=1, rank=0)
    record.add(0, 0, "loss", "loss", torch.tensor(value))
    return record

def test_bits():
    assert_bitwise_equal(record(1.0), record(1.0), what="the same twice")
    assert_bitwise_equal(record(1.0), record(2.0), what="ours against theirs")

@pytest.mark.gt_world("fake", size=8)
def test_golden(gt_world, gt_golden):
    gt_golden.check("a text")

def test_skipped():
    pytest.skip("not here")

@pytest.fixture
def broken():
    raise RuntimeError("in the set-up")

def test_broken(broken): pass

@pytest.mark.parametrize("n", [1, 2])
def test_fine(n): pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    return run_project(folder, "-q", files={"tests/test_it.py": SUITE})


def test_verdicts_and_the_message_of_a_failure(run):
    found = run["test_bits"]
    assert found.outcome == "failed"
    assert found.verdicts == ("the same twice: equal", "ours against theirs: different")
    assert "first at step 0, rank 0, loss" in found.message
    assert [line.split(":")[0] for line in found.digests] == [
        "the same twice, step 0",
        "ours against theirs, step 0",
    ]


def test_worlds_and_goldens(run):
    found = run["tests.test_it::test_golden"]
    assert (found.outcome, found.world) == ("failed", "fake(8)")
    (golden,) = found.goldens
    assert golden.endswith(": missing")
    assert "is missing" in found.message


def test_other_outcomes(run):
    assert (run["test_skipped"].outcome, run["test_broken"].outcome) == ("skipped", "error")
    assert "not here" in run["test_skipped"].message
    assert "in the set-up" in run["test_broken"].message
    assert (run["test_fine[1]"].outcome, run["test_fine[1]"].message) == ("passed", "")
    assert run.status == 1
    assert "1 error" in run.output


def test_a_name_that_no_test_has_names_those_there_are(run):
    with pytest.raises(KeyError, match=r"0 tests are called 'test_fine'.*test_fine\[1\]"):
        run["test_fine"]


def test_a_run_that_does_not_begin_is_told(tmp_path):
    run = run_project(tmp_path, "--gt-gpus=none")
    assert run.status == pytest.ExitCode.USAGE_ERROR
    with pytest.raises(KeyError, match="--gt-gpus=none"):
        run["test_it"]


BROKEN_TEARDOWN = """
import pytest

@pytest.fixture
def breaks():
    yield
    raise OSError("the end")

@pytest.fixture
def broken(breaks):
    raise OSError("the beginning")

def test_both(breaks): raise ValueError("the call")
def test_teardown(breaks): pass
def test_setup(broken): pass
@pytest.mark.xfail
def test_known(breaks): raise ValueError("the call")
def test_skips(breaks): pytest.skip("the call")
"""


@pytest.fixture(scope="module")
def run_with_broken_teardown(tmp_path_factory):
    files = {"test_it.py": BROKEN_TEARDOWN, "pytest.ini": "[pytest]\n"}
    return run_project(tmp_path_factory.mktemp("teardown"), files=files)


@pytest.mark.parametrize(
    ("name", "outcome", "causes"),
    [
        ("test_both", "failed", ["the call", "and in its tear-down:", "the end"]),
        ("test_teardown", "error", ["the end"]),
        ("test_setup", "error", ["the beginning", "and in its tear-down:", "the end"]),
        ("test_known", "skipped", []),
        ("test_skips", "error", ["the end"]),
    ],
)
def test_the_call_stands_before_the_tear_down(run_with_broken_teardown, name, outcome, causes):
    test = run_with_broken_teardown[name]
    assert test.outcome == outcome
    places = [test.message.find(cause) for cause in causes]
    assert -1 not in places, test.message
    assert places == sorted(places)


RUNS_TWICE = """
def pytest_collection_modifyitems(items):
    items += items[:]
"""
FAILS_FIRST = """
runs = []

def test_flaky():
    runs.append(1)
    assert len(runs) > 1

def test_steady(): pass
"""


def test_of_a_test_that_runs_twice_a_failure_counts(tmp_path):
    run = run_project(
        tmp_path, files={"conftest.py": RUNS_TWICE, "test_it.py": FAILS_FIRST}, timeout=120
    )
    assert run.status == 1
    assert run["test_flaky"].outcome == "failed"
    assert "assert 1 > 1" in run["test_flaky"].message
    assert run["test_steady"].outcome == "passed"
