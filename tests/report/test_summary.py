"""The lines at the end of a run."""

import pytest

from pytest_gtrainer.report.terminal import summary_lines


def test_each_topic_is_one_line_and_what_did_not_happen_is_none():
    facts = [
        {"kind": "world", "world": "ranks", "size": 8, "backend": "gloo", "device": "cpu"},
        {"kind": "world", "world": "ranks", "size": 8, "backend": "gloo", "device": "cpu"},
        {"kind": "world", "world": "fake", "size": 64, "backend": "fake", "device": "cpu"},
        {"kind": "golden", "outcome": "equal"},
        {"kind": "skip", "cause": "needs 16 ranks, --gt-gpus gives 8"},
    ]
    assert summary_lines(facts) == [
        "worlds    1 test in fake(64), 2 tests in ranks(8, gloo on cpu)",
        "goldens   1 equal",
        "skipped   1 needs 16 ranks, --gt-gpus gives 8",
    ]
    assert summary_lines([]) == []


@pytest.mark.second_tier
def test_the_summary_counts_over_xdist_workers(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_gtrainer import facts

        @pytest.mark.parametrize("number", range(4))
        def test_verdict(number):
            facts.emit("verdict", outcome="equal")
        """
    )
    result = pytester.runpytest_subprocess("-n", "2")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["verdicts  4 equal"])
