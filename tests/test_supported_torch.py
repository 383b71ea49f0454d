"""Another version of torch: one line at the head of a run, and with an import that fails."""

import sys

import pytest

import pytest_gtrainer
from pytest_gtrainer import supported

LINE = 'torch 2.14.0 is not supported: pytest-gtrainer reads private parts of torch 2.13; *"torch==2.13.[*]"'


def test_the_head_of_a_run_says_so(pytester):
    pytester.makepyfile("def test_it(): pass")
    pytester.makeconftest("from pytest_gtrainer import supported; supported.metadata.version = lambda name: '2.14.0'")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"gtrainer: {LINE}"])


def test_the_supported_one_is_not_mentioned(pytester):
    """The twin."""
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest_inprocess().stdout.no_fnmatch_line("*is not supported*")


def test_an_import_that_fails_says_so(monkeypatch):
    monkeypatch.setattr(supported.metadata, "version", lambda name: "2.14.0")
    monkeypatch.setitem(pytest_gtrainer._HOME, "broken", "no_such_part")
    with pytest.raises(ImportError) as caught:
        pytest_gtrainer.broken  # noqa: B018
    assert "torch 2.14.0 is not supported" in caught.value.__notes__[0]
    assert "pytest_gtrainer.broken" not in sys.modules
