"""Loading the plugin: no output where it is not used."""

import pytest


def test_a_project_that_does_not_use_it_sees_no_output(pytester: pytest.Pytester):
    pytester.makepyfile("def test_nothing_of_ours(): pass")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*gtrainer*summary*")
    assert "gt-" not in result.stdout.str()
