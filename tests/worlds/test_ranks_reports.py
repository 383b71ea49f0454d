"""What a rank says must reach the report: subtests, late goldens, broken teardowns, forks."""

import re

import pytest

HEADER = "import os, time, pytest\non_ranks = pytest.mark.gt_world('ranks', size=2)\n"


@pytest.fixture
def run(pytester, monkeypatch):
    """Run the given tests on ranks, outside of CI; ``(result, folder)``."""
    monkeypatch.delenv("CI", raising=False)

    def run(source, *options):
        pytester.makepyfile(HEADER + source)
        return pytester.runpytest_subprocess("--gt-timeout=60", *options)

    return run


def test_a_failed_subtest_fails_the_test_and_keeps_its_golden_unwritten(run, pytester):
    result = run(
        """
@on_ranks
def test_failing(subtests, gt_golden):
    with subtests.test("a"):
        assert 1 == 2
    gt_golden.check("never")

@on_ranks
def test_passing(subtests, gt_golden):
    gt_golden.check("before")
    with subtests.test("a"):
        pass
""",
        "--gt-update-goldens",
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])
    assert [path.name for path in (pytester.path / "golden").rglob("*.txt")] == ["test_passing.txt"]


def test_goldens_around_subtests_and_in_teardown_are_judged(run):
    result = run(
        """
@on_ranks
def test_before_a_subtest(subtests, gt_golden):
    gt_golden.check("text")
    with subtests.test("a"):
        pass

@pytest.fixture
def late(gt_golden):
    yield
    gt_golden.check("text")

@on_ranks
def test_in_teardown(late):
    pass
"""
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*test_before_a_subtest.txt is missing", "*test_in_teardown.txt is missing"])


def test_a_broken_teardown_is_told_beside_a_failed_call(run):
    result = run(
        """
@pytest.fixture
def broken():
    yield
    raise ValueError("teardown broke")

@on_ranks
def test_both(broken):
    assert 1 == 2

@pytest.fixture
def broken_on_one(gt_world):
    yield
    if gt_world.rank == 1:
        raise ValueError("teardown of one broke")

@on_ranks
def test_each_on_another_rank(broken_on_one, gt_world):
    if gt_world.rank == 0:
        time.sleep(0.3)
        assert 3 == 4
"""
    )
    result.assert_outcomes(failed=2, errors=2)
    result.stdout.fnmatch_lines_random(["*assert 1 == 2*", "*teardown broke*", "*assert 3 == 4*", "*of one broke*"])


def test_a_child_that_a_test_forked_answers_for_nobody(run):
    """T5: the child returns from the test into the rank's loop; the tests after it are judged by themselves."""
    result = run(
        """
@on_ranks
def test_1_forks():
    if os.fork() == 0:
        return

@on_ranks
def test_2_fails():
    assert 0

@on_ranks
def test_3_fails():
    assert 0

@on_ranks
def test_4_passes():
    pass
""",
        "-v",
    )
    told = re.findall(r"::(test_\d_\w+) (PASSED|FAILED)", result.stdout.str())
    assert told == [
        ("test_1_forks", "PASSED"),
        ("test_2_fails", "FAILED"),
        ("test_3_fails", "FAILED"),
        ("test_4_passes", "PASSED"),
    ]


def test_setup_plan_runs_nothing(run, pytester):
    result = run("@on_ranks\ndef test_never_run(gt_world):\n    open('ran', 'w').close()\n", "--setup-plan")
    assert result.ret == 0
    assert not (pytester.path / "ran").exists()
