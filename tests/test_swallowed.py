"""A check that fails in a test fails it, although the test catches the exception; without ranks,
and on ranks.
"""

import contextlib
import gc
import os
import weakref

import pytest
import torch

import pytest_gtrainer
from pytest_gtrainer import BitwiseDifference, CompileRecord, assert_bitwise_equal, facts
from pytest_gtrainer._pytest_private import has_caught, open_expectations
from pytest_gtrainer.golden.check import Golden
from pytest_gtrainer.ranks.caller import RankCaller
from pytest_gtrainer.swallowed import FailedChecks, raised_at_the_end
from pytest_gtrainer.testing import ProjectRun, run_project
from tests.golden.conftest import QUICK

SUITE = '''
import contextlib, multiprocessing, os, threading, unittest
from concurrent.futures import ThreadPoolExecutor
import pytest, torch
from torch import fx
from pytest_gtrainer import (
    BitwiseDifference, CheckError, Rule, Sweep, VacuousCheck, assert_bitwise_different,
    assert_bitwise_equal, assert_graph, assert_same_layout, simulate_eager
)

pytestmark = {mark}

def differ():
    assert_bitwise_equal(torch.zeros(2), torch.ones(2))

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)

def alone(x):
    return x + 1

def fails_on_ranks():
    raise OSError("on a rank")

def sweep(claim, reason):
    sweep = Sweep("small", {{"size": [1]}}, [Rule(claim, reason=reason)])
    return sweep.judging(sweep.cells[0])

def nothing_compared():
    with sweep("different", "known"):
        pass

ONES = torch.ones(2)
CHECKS = {{
    "golden": lambda golden: golden.check("is missing"),
    "comparison": lambda golden: differ(),
    "unverified": lambda golden: assert_bitwise_equal([], []),
    "control": lambda golden: assert_bitwise_different(ONES, ONES.clone(), on="every rank"),
    "graph": lambda golden: assert_graph(fx.symbolic_trace(Model()), "never relu"),
    "unread check": lambda golden: assert_graph(fx.symbolic_trace(Model()), "nevr relu"),
    "no graph": lambda golden: assert_graph(None, "never relu"),
    "no tensor": lambda golden: assert_bitwise_equal(torch.ones(1), 1.0),
    "no layout": lambda golden: assert_same_layout("a", "b"),
    "no golden": lambda golden: golden.check(torch.ones(1)),
    "two goldens": lambda golden: golden.check("text", per="numpy"),
    "vacuous": lambda golden: simulate_eager(alone, [(torch.ones(1),)] * 2, 2),
    "sweep": lambda golden: nothing_compared(),
}}

def suppressed(check):
    with contextlib.suppress(Exception):
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

def in_a_fork(check):
    pid = os.fork()
    if pid == 0:
        try:
            check()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

def in_a_process(check):
    process = multiprocessing.get_context("fork").Process(target=check)
    process.start()
    process.join()

def in_a_pool(check):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: None, [0])), pool.submit(check)
    assert found[1].exception() is not None or {is_claim}

WAYS = [suppressed, excepted, in_a_thread, in_a_pool, in_a_fork, in_a_process]

@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
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
            raise RuntimeError("reported") from error

def expect_difference():
    with pytest.raises(BitwiseDifference):
        differ()

def test_expected_in_a_fork():
    in_a_fork(expect_difference)

def test_passes_in_a_fork():
    in_a_process(lambda: assert_bitwise_equal(torch.ones(1), torch.ones(1)))

def test_expected_in_threads():
    """All of them fail, one of them is reported."""
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

def test_expected_in_a_group():
    with pytest.RaisesGroup(BitwiseDifference):
        found = []
        try:
            differ()
        except BitwiseDifference as error:
            found.append(error)
        raise ExceptionGroup("several", found)

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

TWO_ELEMENTS = pytest.RaisesExc(BitwiseDifference, match="2 elements")

@pytest.mark.xfail(reason="known", strict=True, raises=TWO_ELEMENTS)
def test_known_by_its_text():
    suppressed(differ)

@pytest.mark.xfail(reason="known", raises=ValueError)
def test_another_error_is_known():
    suppressed(differ)
    raise ValueError("known")

@pytest.mark.xfail(reason="known", raises=ValueError)
def test_an_error_raised_from_it_is_known():
    try:
        differ()
    except AssertionError as error:
        raise ValueError("known") from error

@pytest.mark.xfail(reason="known", raises=OSError)
def test_another_error_raised_from_it_is_known():
    try:
        differ()
    except AssertionError as error:
        raise ValueError("known") from error

def test_expected_of_other_classes(gt_golden):
    with pytest.raises(CheckError):
        CHECKS["unread check"](gt_golden)
    with pytest.raises(TypeError):
        CHECKS["no golden"](gt_golden)
    with pytest.raises(VacuousCheck):
        CHECKS["vacuous"](gt_golden)

def test_another_class_is_expected(gt_golden):
    with pytest.raises(TypeError):
        suppressed(lambda: CHECKS["no golden"](gt_golden))
        raise TypeError

def test_refused_as_a_sweep_claims(gt_golden):
    with sweep("refused", "a golden is made"):
        gt_golden.check(torch.ones(1))

def test_skipped_by_a_sweep():
    with sweep("not judged", "not here") as judge:
        judge(1, 2)

@pytest.mark.parametrize("function", [fails_on_ranks, lambda: None], ids=["raises", "lambda"])
def test_hidden_on_called_ranks(gt_ranks, function):
    suppressed(lambda: gt_ranks.run(function, size=2))

def test_expected_on_called_ranks(gt_ranks):
    with pytest.raises(Exception, match="on a rank"):
        gt_ranks.run(fails_on_ranks, size=2)

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

CHECKS = """golden, comparison, unverified, control, graph, unread check, no graph, no tensor,
no layout,
    no golden, two goldens, vacuous, sweep"""
HIDDEN = [
    f"test_hidden[{name.strip()}-{how}]"
    for name in CHECKS.split(",")
    for how in ("suppressed", "excepted", "in_a_thread", "in_a_pool", "in_a_fork", "in_a_process")
]
OUTCOMES = {
    **dict.fromkeys(HIDDEN, "failed"),
    "test_expected": "passed",
    "TestOfUnittest::test_expected": "passed",
    "TestOfUnittest::test_marked": "skipped",
    "TestOfUnittest::test_hidden": "failed",
    "test_expected_as_the_cause_of_another_error": "passed",
    "test_expected_in_a_fork": "passed",
    "test_passes_in_a_fork": "passed",
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
    "test_expected_in_a_group": "passed",
    "TestThatCatchesSomethingElse::test_hidden": "failed",
    "test_hidden_and_skipped": "failed",
    "test_skipped_for_it": "failed",
    "test_known_in_the_test": "skipped",
    "test_another_failure_is_known_in_the_test": "failed",
    "test_hidden_before_another_failure": "failed",
    "test_known": "skipped",
    "test_known_by_its_text": "skipped",
    "test_another_error_is_known": "failed",
    "test_an_error_raised_from_it_is_known": "skipped",
    "test_another_error_raised_from_it_is_known": "failed",
    "test_expected_of_other_classes": "passed",
    "test_another_class_is_expected": "failed",
    "test_refused_as_a_sweep_claims": "passed",
    "test_skipped_by_a_sweep": "skipped",
    "test_hidden_on_called_ranks[raises]": "failed",
    "test_hidden_on_called_ranks[lambda]": "failed",
    "test_expected_on_called_ranks": "passed",
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


@pytest.mark.parametrize("text", ["the first of two", "x" * 5000], ids=["two", "a long one"])
def test_of_the_checks_that_fail_in_a_fork_the_first_is_shown(text):
    failed = FailedChecks()
    pid = os.fork()
    if pid == 0:
        for each in (text, "then"):
            failed.note(AssertionError(each))
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(pytest.fail.Exception) as failure:
        failed.raise_hidden()
    assert failure.value.msg.partition("there: ")[2] == f"AssertionError: {text}"[:4096]


def test_a_process_that_outlives_its_phase_fails_no_later_one():
    failed = FailedChecks()
    reading, writing = os.pipe()

    def fork_one_that_fails(says):
        pid = os.fork()
        if pid == 0:
            os.read(reading, 1)
            failed.note(AssertionError(says))
            os._exit(0)
        return pid

    with raised_at_the_end(failed):
        late = fork_one_that_fails("late")
    with raised_at_the_end(failed):
        os.write(writing, b"1")
        os.waitpid(late, 0)
    own = fork_one_that_fails("own")
    os.write(writing, b"1")
    os.waitpid(own, 0)
    with pytest.raises(pytest.fail.Exception, match=r"AssertionError: own$"):
        failed.raise_hidden()
    os.close(reading)
    os.close(writing)


def test_a_block_is_open_until_it_catches():
    found = []
    with pytest.raises(BitwiseDifference):
        assert_bitwise_equal(
            torch.zeros(1), torch.ones(1), what=found.extend(open_expectations()) or ""
        )
    assert [has_caught(each) for each in found] == [True]


def test_every_assertion_of_the_package_is_a_check():
    """An error of any class that leaves it counts."""
    for name in pytest_gtrainer.__all__:
        if name.startswith("assert_"):
            assert hasattr(getattr(pytest_gtrainer, name), "__wrapped__"), name
    methods = [Golden.check, RankCaller.run]
    methods += [each for name, each in vars(CompileRecord).items() if name.startswith("assert_")]
    for method in methods:
        assert hasattr(method, "__wrapped__"), method


def test_a_check_that_failed_is_not_kept_after_its_phase():
    class Held:
        pass

    held = Held()
    kept = weakref.ref(held)

    def fail(held):
        assert_bitwise_equal(torch.zeros(1), torch.ones(1))

    failed = FailedChecks()
    with raised_at_the_end(failed), pytest.raises(BitwiseDifference):
        fail(held)
    del held
    gc.collect()
    assert kept() is None


OF_UNITTEST = """
import contextlib, unittest
import torch
from pytest_gtrainer import assert_bitwise_equal

def differ():
    assert_bitwise_equal(torch.zeros(2), torch.ones(2))

class Test(unittest.TestCase):
    def test_fails(self):
        differ()

    def test_hides_and_fails(self):
        with contextlib.suppress(AssertionError):
            differ()
        self.assertEqual(1, 2)

    def test_hides(self):
        with contextlib.suppress(AssertionError):
            differ()

    def test_fails_in_a_subtest(self):
        with self.subTest("first"):
            differ()
"""


def test_what_unittests_runner_has_caught_is_no_hidden_check(pytester):
    """A test that fails plainly is not said to have caught its failure."""
    pytester.makepyfile(OF_UNITTEST)
    result = pytester.runpytest("-p", "no:cacheprovider")
    assert result.parseoutcomes()["failed"] == 4
    advice = "The test has caught this exception"
    for name in ("test_fails", "test_hides_and_fails", "test_fails_in_a_subtest", "test_hides"):
        said = result.stdout.str().partition(f" Test.{name} ")[2].partition("\n____")[0]
        assert said, name
        assert (advice in said) == (name == "test_hides"), name
