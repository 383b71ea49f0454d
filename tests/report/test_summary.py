"""The lines at the end of a run."""

import pytest

from pytest_gtrainer.report.markdown import code, fenced
from pytest_gtrainer.report.terminal import summary_lines
from pytest_gtrainer.testing import run_project
from tests.golden.conftest import QUICK


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


NAN_ON_ONE_RANK = """
import pytest, torch
import torch.distributed as dist
from pytest_gtrainer import assert_bitwise_equal

def compared(last):
    value = torch.ones(2)
    if last and dist.get_rank() == dist.get_world_size() - 1:
        value = torch.tensor([float("nan"), 1.0])
    assert_bitwise_equal([value], [value.clone()])

def unverified():
    assert_bitwise_equal([torch.ones(1)], [torch.ones(1)] if dist.get_rank() == 0 else [])

@pytest.mark.parametrize("size", [1, 2, 3])
def test_called(gt_ranks, size):
    gt_ranks.run(compared, True, size=size)

def test_fails_where_called(gt_ranks):
    gt_ranks.run(unverified, size=2)

@pytest.mark.gt_world("ranks", size=[1, 2, 3])
def test_marked():
    compared(True)

@pytest.mark.gt_world("ranks", size=2)
def test_equal():
    compared(False)
"""


@pytest.mark.second_tier
def test_a_verdict_of_one_rank_is_counted_with_its_rank(tmp_path):
    files = {"test_it.py": NAN_ON_ONE_RANK, "pytest.ini": "[pytest]\n"}
    run = run_project(tmp_path, *QUICK, "--gt-gpus=3", "--gt-device=cpu", files=files)
    nan = "comparison: equal (not finite)"
    for name in ("test_called[{}]", "test_marked[size{}]"):
        found = [run[name.format(size)].verdicts for size in (1, 2, 3)]
        assert found == [(nan,), (f"{nan} on rank 1",), (f"{nan} on rank 2",)]
    assert run["test_equal"].verdicts == ("comparison: equal",)
    assert run["test_fails_where_called"].verdicts == ("comparison: unverified on rank 1",)


@pytest.mark.parametrize("ticks", range(6))
def test_code_stands_in_more_backticks_than_it_holds(ticks):
    """A failure that shows Markdown must not end the block that it stands in."""
    held = "`" * ticks
    first, *lines, last = fenced(f"a {held} b").splitlines()
    assert (first, lines) == (f"{last}text", [f"a {held} b"])
    assert last.strip("`") == ""
    assert len(last) > max(2, ticks)
    inline = code(f"a {held} b")
    fence = inline[: len(inline) - len(inline.lstrip("`"))]
    assert len(fence) == ticks + 1
    assert inline.removeprefix(fence).removesuffix(fence).split() == f"a {held} b".split()
