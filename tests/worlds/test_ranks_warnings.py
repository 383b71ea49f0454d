"""Warnings of functions that ``gt_ranks.run`` calls: they are the calling test's."""

from tests.worlds.conftest import Suite

SUITE = """
import threading
import warnings

import pytest
import torch.distributed as dist


class FromHere(DeprecationWarning):
    pass


class Broken:
    def __del__(self):
        raise ValueError("of del")


def warns_on_all(): warnings.warn("old", FromHere)
def warns_on_the_last():
    if dist.get_rank() == 2:
        for _ in range(3):
            warnings.warn("of the last", UserWarning)
def warns_and_fails():
    warnings.warn("old", FromHere)
    raise RuntimeError("the failure")
def in_a_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
def in_del(): Broken()
def nothing(): pass


FUNCTIONS = [warns_on_all, warns_on_the_last, in_a_thread, in_del]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_shown(gt_ranks, function): gt_ranks.run(function, size=3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", [*FUNCTIONS, warns_and_fails])
def test_error(gt_ranks, function): gt_ranks.run(function, size=3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_ignored(gt_ranks, function): gt_ranks.run(function, size=3)


def test_expected(gt_ranks):
    with pytest.warns(FromHere, match="old") as seen:
        gt_ranks.run(warns_on_all, size=3)
    assert len(seen) == 1  # equal on all ranks


@pytest.mark.filterwarnings("error")
@pytest.mark.gt_world("ranks", size=3)
def test_innocent(gt_world): pass


@pytest.mark.filterwarnings("error")
def test_innocent_call(gt_ranks): gt_ranks.run(nothing, size=3)
"""


def test_warnings_of_called_functions_meet_the_filters_of_their_own_test(suite: Suite) -> None:
    suite.write("test_it.py", SUITE)
    run = suite.run("--gt-gpus=3", "-p", "no:randomly")
    outcomes = {name: run.outcome(name) for name in run.reports}
    functions = ("warns_on_all", "warns_on_the_last", "in_a_thread", "in_del")
    failing = {f"test_error[{name}]" for name in (*functions, "warns_and_fails")}
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == failing
    assert set(outcomes.values()) == {"passed", "failed"}
    assert "FromHere: old" in run.text("test_error[warns_on_all]")
    assert "UserWarning: of the last" in run.text("test_error[warns_on_the_last]")
    assert "ZeroDivisionError" in run.text("test_error[in_a_thread]")
    assert "of del" in run.text("test_error[in_del]")
    # The failure comes before the warning.
    assert "RuntimeError: the failure" in run.text("test_error[warns_and_fails]")
    assert "FromHere: old" in run.output.partition("warnings summary")[2]
    assert "UserWarning: of the last" in run.output.partition("warnings summary")[2]
