"""A check that fails in a test fails it, although the test catches the exception; without ranks,
and on ranks.
"""

import contextlib

import pytest
import torch

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal, facts
from pytest_gtrainer._pytest_private import has_caught, open_expectations
from pytest_gtrainer.swallowed import FailedChecks
from pytest_gtrainer.testing import ProjectRun, run_project
from tests.golden.conftest import QUICK

SUITE = '''
import contextlib, threading, unittest
from concurrent.futures import ThreadPoolExecutor
import pytest, torch
from torch import fx
from pytest_gtrainer import (
    BitwiseDifference, assert_bitwise_different, assert_bitwise_equal, assert_graph
)

pytestmark = {mark}

def differ():
    assert_bitwise_equal(torch.zeros(2), torch.ones(2))

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)

CHECKS = {{
    "golden": lambda golden: golden.check("is missing"),
    "comparison": lambda golden: differ(),
    "unverified": lambda golden: assert_bitwise_equal([], []),
    "control": lambda golden: assert_bitwise_different(torch.ones(2), torch.ones(2), on="every rank"),
    "graph": lambda golden: assert_graph(fx.symbolic_trace(Model()), "never relu"),
}}

def suppressed(check):
    with contextlib.suppress(AssertionError):
        check()

def excepted(check):
    for _ in range(2):
        try:
            check()
        except Exception as error:
            print(error)

def in_a_thread(check):
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()

def in_a_pool(check):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: None, [0])), pool.submit(check)
    assert found[1].exception() is not None or {is_claim}

@pytest.mark.parametrize("how", [suppressed, excepted, in_a_thread, in_a_pool], ids=lambda how: how.__name__)
@pytest.mark.parametrize("name", CHECKS)
def test_hidden(gt_golden, name, how):
    how(lambda: CHECKS[name](gt_golden))

def test_expected():
    with pytest.raises(BitwiseDifference):
        differ()
    with pytest.raises(AssertionError) as caught:
        differ()
    pytest.raises(AssertionError, differ)
    with pytest.RaisesGroup(BitwiseDifference, allow_unwrapped=True):
        differ()
    assert caught.value.verdict.outcome == "different"

class TestOfUnittest(unittest.TestCase):
    def test_expected(self):
        with self.assertRaises(AssertionError):
            differ()
        with self.assertRaisesRegex(BitwiseDifference, "different: 1 of 1 tensor"):
            differ()

    @unittest.expectedFailure
    def test_marked(self):
        differ()

    def test_hidden(self):
        suppressed(differ)

def test_expected_as_the_cause_of_another_error():
    with pytest.raises(RuntimeError):
        try:
            differ()
        except AssertionError as error:
            raise RuntimeError("told") from error

def test_expected_in_threads():
    """All of them fail, one of them is told."""
    with pytest.raises(BitwiseDifference), ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(differ) for _ in range(3)]:
            future.result()

def test_handed_to_the_test_by_a_thread():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(differ).result()

def test_expected_once_and_hidden_later():
    with pytest.raises(BitwiseDifference):
        differ()
    suppressed(differ)

@pytest.mark.xfail(raises=pytest.fail.Exception)
def test_expected_and_not_raised():
    with pytest.raises(ValueError):
        pass

def test_hidden_behind_a_block_that_caught_nothing():
    suppressed(differ)

def test_raised_through_a_block_that_waits_for_something_else():
    with pytest.raises(AssertionError):
        with pytest.raises(ValueError):
            differ()

def test_hidden_in_a_block_that_catches_something_else():
    with pytest.raises(ValueError):
        suppressed(differ)
        raise ValueError

def test_hidden_in_a_block_that_catches_an_assertion_of_the_test():
    with pytest.raises(AssertionError):
        suppressed(differ)
        assert not "expected"

def test_hidden_in_a_thread_beside_a_block():
    with pytest.raises(KeyError):
        in_a_thread(differ)
        raise KeyError

def test_hidden_in_a_group():
    with pytest.RaisesGroup(OSError):
        suppressed(differ)
        raise ExceptionGroup("several", [OSError()])

class TestThatCatchesSomethingElse(unittest.TestCase):
    def test_hidden(self):
        with self.assertRaises(ValueError):
            suppressed(differ)
            raise ValueError

def test_hidden_and_skipped():
    suppressed(differ)
    pytest.skip("not here")

def test_skipped_for_it():
    try:
        differ()
    except AssertionError:
        pytest.skip("differs")

def test_known_in_the_test():
    try:
        differ()
    except AssertionError:
        pytest.xfail("known")

def test_another_failure_is_known_in_the_test():
    suppressed(differ)
    pytest.xfail("known")

def test_hidden_before_another_failure():
    suppressed(differ)
    assert "the later" == "failure"

@pytest.mark.xfail(reason="known", strict=True)
def test_known():
    suppressed(differ)

@pytest.mark.xfail(reason="known", strict=True, raises=pytest.RaisesExc(BitwiseDifference, match="2 elements"))
def test_known_by_its_text():
    suppressed(differ)

@pytest.mark.xfail(reason="known", raises=ValueError)
def test_another_error_is_known():
    suppressed(differ)
    raise ValueError("known")

def test_in_a_subtest(subtests):
    with subtests.test("shown"):
        differ()

def test_hidden_in_a_subtest(subtests):
    with subtests.test("hidden"):
        suppressed(differ)

def test_hidden_in_a_subtest_that_skips(subtests):
    with subtests.test("hidden"):
        try:
            differ()
        except AssertionError:
            pytest.skip("differs")

def test_hidden_in_a_subtest_that_is_known(subtests):
    with subtests.test("hidden"):
        suppressed(differ)
        pytest.xfail("known")

@pytest.fixture
def hides_before():
    suppressed(differ)

@pytest.fixture
def hides_behind():
    yield
    suppressed(differ)

def test_hidden_in_a_setup(hides_before):
    pass

def test_hidden_in_a_teardown(hides_behind):
    pass

def test_made_and_not_raised():
    from pytest_gtrainer import GoldenMismatch
    assert str(GoldenMismatch("made")) == "made"

def test_whose_exception_is_a_doctest():
    """
    >>> differ()
    Traceback (most recent call last):
    pytest_gtrainer.BitwiseDifference: different: 1 of 1 tensor, 2 elements
      ...
    """

def test_passes():
    assert_bitwise_equal(torch.ones(2), torch.ones(2))
'''

HIDDEN = [f"test_hidden[{name}-{how}]" for name in ("golden", "comparison", "unverified", "control", "graph")
          for how in ("suppressed", "excepted", "in_a_thread", "in_a_pool")]  # fmt: skip
OUTCOMES = {
    **dict.fromkeys(HIDDEN, "failed"),
    "test_expected": "passed",
    "TestOfUnittest::test_expected": "passed",
    "TestOfUnittest::test_marked": "skipped",
    "TestOfUnittest::test_hidden": "failed",
    "test_expected_as_the_cause_of_another_error": "passed",
    "test_expected_in_threads": "passed",
    "test_handed_to_the_test_by_a_thread": "failed",
    "test_expected_once_and_hidden_later": "failed",
    "test_expected_and_not_raised": "skipped",
    "test_hidden_behind_a_block_that_caught_nothing": "failed",
    "test_raised_through_a_block_that_waits_for_something_else": "passed",
    "test_hidden_in_a_block_that_catches_something_else": "failed",
    "test_hidden_in_a_block_that_catches_an_assertion_of_the_test": "failed",
    "test_hidden_in_a_thread_beside_a_block": "failed",
    "test_hidden_in_a_group": "failed",
    "TestThatCatchesSomethingElse::test_hidden": "failed",
    "test_hidden_and_skipped": "failed",
    "test_skipped_for_it": "failed",
    "test_known_in_the_test": "skipped",
    "test_another_failure_is_known_in_the_test": "failed",
    "test_hidden_before_another_failure": "failed",
    "test_known": "skipped",
    "test_known_by_its_text": "skipped",
    "test_another_error_is_known": "failed",
    "test_in_a_subtest": "failed",
    "test_hidden_in_a_subtest": "failed",
    "test_hidden_in_a_subtest_that_skips": "failed",
    "test_hidden_in_a_subtest_that_is_known": "failed",
    "test_hidden_in_a_setup": "error",
    "test_hidden_in_a_teardown": "error",
    "test_made_and_not_raised": "passed",
    "test_passes": "passed",
}


def ran(tmp_path_factory: pytest.TempPathFactory, mark: str) -> ProjectRun:
    folder = tmp_path_factory.mktemp("swallowed")
    text = SUITE.format(mark=mark, is_claim=mark != "[]")
    options = (*QUICK, "--doctest-modules", "--gt-gpus=2", "--gt-device=cpu")
    return run_project(folder, *options, files={"test_it.py": text, "pytest.ini": "[pytest]\n"})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> ProjectRun:
    return ran(tmp_path_factory, "[]")


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> ProjectRun:
    return ran(tmp_path_factory, 'pytest.mark.gt_world("ranks", size=2)')


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_failed_check_counts_unless_it_is_expected(alone, name):
    """V1"""
    assert (
        alone[f"test_it::{name}" if "::" not in name else f"test_it.{name}"].outcome
        == OUTCOMES[name]
    )


@pytest.mark.second_tier
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_test_on_ranks_comes_to_the_same(on_ranks, name):
    """V1"""
    assert (
        on_ranks[f"test_it::{name}" if "::" not in name else f"test_it.{name}"].outcome
        == OUTCOMES[name]
    )


def test_the_failure_shows_the_line_of_the_check_and_the_way_out(alone):
    assert alone.status == pytest.ExitCode.TESTS_FAILED
    message = alone["test_expected_once_and_hidden_later"].message
    assert "    assert_bitwise_equal(torch.zeros(2), torch.ones(2))\n" in message
    assert "The test has caught this exception. A check that fails counts all the same" in message
    assert "the later" in alone["test_hidden_before_another_failure"].message, (
        "the failure that shows is the test's"
    )
    assert (
        "test_it.test_whose_exception_is_a_doctest"
        not in alone.output.partition("short test summary")[2]
    )


def test_the_first_that_nobody_expects_decides(monkeypatch):
    """Nobody looks around for those behind it: generated examples fail by the hundred."""
    looked = []
    monkeypatch.setattr(
        "pytest_gtrainer.swallowed.open_expectations", lambda: looked.append(1) or []
    )
    failed = FailedChecks()
    for text in ("first", "second", "third"):
        with contextlib.suppress(AssertionError), facts.failing_checks(failed.note):
            raise facts.FailedCheck(text)
    with pytest.raises(facts.FailedCheck, match="first"):
        failed.raise_hidden()
    assert len(looked) == 1


def test_a_block_is_open_until_it_catches():
    found = []
    with pytest.raises(BitwiseDifference):
        assert_bitwise_equal(
            torch.zeros(1), torch.ones(1), what=found.extend(open_expectations()) or ""
        )
    assert [has_caught(each) for each in found] == [True]
