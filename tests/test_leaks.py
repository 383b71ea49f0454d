"""A test that leaves a switch of torch changed is named; one that puts it back, and innocent ones, are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pytest_gtrainer import facts
from pytest_gtrainer.worlds import hygiene

LEAKY = """
    import pytest, torch

    @pytest.fixture
    def borrowed():
        torch.backends.cudnn.benchmark = True
        yield
        torch.backends.cudnn.benchmark = False

    @pytest.fixture(scope="module")
    def for_all():
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)

    def test_before(borrowed): pass
    def test_leaky(): torch.backends.cudnn.deterministic = True
    def test_after(): assert torch.backends.cudnn.deterministic
    def test_puts_it_back(): torch.backends.cudnn.deterministic = False
    def test_first_of_module(for_all): pass
    def test_last_of_module(for_all): assert torch.get_default_dtype() == torch.float64
"""


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch):
    """These tests leak in this very process, and what they tell is not for the summary of the suite."""
    monkeypatch.setattr(facts, "_sinks", [])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)


def test_the_test_that_leaks_is_named_and_no_other(pytester: pytest.Pytester):
    """K3"""
    pytester.makepyfile(LEAKY)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=6)
    warnings = [line for line in result.outlines if "LeakedFlagWarning" in line]
    assert len(warnings) == 2
    assert "::test_leaky changed torch.backends.cudnn.deterministic from False to True and did not put it back" in (
        warnings[0]
    )
    assert "::test_puts_it_back changed torch.backends.cudnn.deterministic from True to False" in warnings[1]
    result.stdout.fnmatch_lines(["leaked    1 *::test_leaky changed torch.backends.cudnn.deterministic *"])


def test_a_leak_can_fail_the_test(pytester: pytest.Pytester):
    pytester.makepyfile(LEAKY)
    result = pytester.runpytest_inprocess("--gt-leaked-flags=fail")
    result.assert_outcomes(passed=6, errors=2)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaky*"])


def test_the_guard_can_be_switched_off(pytester: pytest.Pytester):
    pytester.makepyfile(LEAKY)
    pytester.makeini("[pytest]\ngt_leaked_flags = ignore")
    pytester.runpytest_inprocess().assert_outcomes(passed=6)


def test_an_environment_variable_counts(pytester: pytest.Pytester):
    pytester.makepyfile("""
        import os, torch
        def test_leaky(): os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    """)
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*changed CUBLAS_WORKSPACE_CONFIG from :4096:8 to :16:8 and did not*"])


def test_the_page_of_ranks_lists_what_is_put_back_and_what_stays():
    """These, and nothing else."""
    page = " ".join((Path(__file__).parents[1] / "docs" / "ranks.md").read_text().split())
    told = re.search(r"\*\*What is restored\*\* [^:]*: (.*?)\. \*\*What stays\*\* [^:]*: (.*?)\. \*\*", page)
    lists = [re.sub(r" \([^()]*(\([^()]*\)[^()]*)?\)", "", names).split(", ") for names in told.groups()]
    assert lists == [list(hygiene.kept()), list(hygiene.STAYS)]
