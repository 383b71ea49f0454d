"""``--gt-repeat``: each test several times, and the first operator if the repetitions differ."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gtrainer.facts import packed
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.repeats import (
    Repeats,
    describe_differences,
    find_operator,
    has_records,
)

SUITE = Path(__file__).parent / "repeating.py"


def run(folder, *options):
    shutil.copy(SUITE, folder / "test_it.py")
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "--gt-device=cpu"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, timeout=240, env=environ
    )


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("workers", [(), ("-n2", "--dist=loadscope")])
def test_repetitions_that_differ_fail_with_the_first_operator(tmp_path, workers):
    done = run(tmp_path, "--gt-repeat=3", *workers)
    assert done.returncode == 1
    parts = done.stdout.split("\n______")
    for case in ("a", "b"):
        (part,) = (part for part in parts if f" test_noise[{case}] " in part)
        assert "repetition 2 against 1: sum: other numbers than then\n" in part
        assert "repetition 3 against 1: sum: other numbers than then\n" in part
        assert "first operator: aten.add.Tensor at test_it.py:28 in noise, call 3 of" in part
        assert f"again: pytest 'test_it.py::test_noise[{case}]' --gt-repeat=3" in part
    (part,) = (part for part in parts if " test_ranks " in part)
    assert "reduced: other numbers than then" in part
    assert "first operator: aten.add.Tensor at test_it.py:28 in noise" in part
    assert ", on rank 1\n" in part
    (part,) = (part for part in parts if " test_graph " in part)
    assert "repetition 2 against 1: the graph before all passes: " in part
    assert "no operator differs: the difference is rare" in part
    assert "E   " not in part
    # Failed repetitions, and one report about each test that differs: no other failure.
    assert parts[-1].count("FAILED test_it.py::test_flaky - repetitions differ") == 1
    for name in ("test_noise[a]", "test_noise[b]", "test_ranks", "test_graph"):
        assert parts[-1].count(f"FAILED test_it.py::{name} - repetitions differ") == 1
        assert parts[-1].count(f"FAILED test_it.py::{name} ") == 1
    assert "test_random" not in done.stdout
    assert "test_setups" not in done.stdout
    counts = done.stdout.partition("repeated  ")[2].partition("\n")[0]
    assert sorted(counts.split(", 1 ")) == [
        "5 different (3 times)",
        "the same (3 times)",
        "without records, only outcomes compared (3 times)",
    ]


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_the_report_keeps_a_repetition_that_failed_and_x_ends_at_it(tmp_path):
    done = run(tmp_path, "--gt-repeat=2", "--gt-summary=s.md", "-k", "flaky")
    assert done.returncode == 1
    assert "## pytest-gtrainer: " in (tmp_path / "s.md").read_text()
    assert ": 1 failed\n" in (tmp_path / "s.md").read_text()
    done = run(tmp_path, "--gt-repeat=4", "-x", "-k", "flaky")
    assert "2 of 4" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


def claiming(kind, text):
    """A test that claims this text for a golden."""
    test = Collected("a.py::t")
    report = pytest.TestReport("a.py::t", ("a.py", 0, "t"), {}, "passed", None, "call")
    text = {"key": text, "packed": packed(text)}
    report.gt_facts = [{"kind": "golden_text", "name": "g.txt", "of": kind, **text}]
    test.add(report)
    return test


@pytest.mark.parametrize("kind", ["text", "numbers", "graph"])
def test_what_repetitions_claim_for_a_golden_is_compared(kind):
    tests = [claiming(kind, text) for text in ("1\n", "1\n", "2\n")]
    assert has_records(tests[0])
    assert not describe_differences(tests[:2])
    (line,) = describe_differences(tests)
    assert line.startswith("repetition 3 against 1: g.txt: ")


def proving(*outcomes):
    """A test that these proofs, the last one of stages, have passed."""
    test = Collected("a.py::t")
    report = pytest.TestReport("a.py::t", ("a.py", 0, "t"), {}, "passed", None, "call")
    report.gt_facts = []
    for place, outcome in enumerate(outcomes, 1):
        what = "stages of torch.compile" if place == len(outcomes) else "proof"
        report.gt_facts.append({"kind": "verdict", "outcome": outcome, "tensors": 1, "what": what})
    test.add(report)
    return test


def test_the_summary_names_checks_of_which_only_verdicts_are_compared(pytestconfig, monkeypatch):
    """Their numbers may have been others."""
    repeats = Repeats(pytestconfig)
    monkeypatch.setattr(repeats, "_count", 2)
    (first, second) = proving("identical", "identical"), proving("identical", "identical")
    said = "the same, of proof, stages of torch.compile only verdicts compared (2 times)"
    assert repeats._summarize([first, second])["what"] == said
    weaker = proving("identical", "reordered")
    assert repeats._summarize([first, weaker])["what"] == "different (2 times)"
    assert repeats._summarize([claiming("text", "1"), claiming("text", "1")])["what"] == (
        "the same (2 times)"
    )


@pytest.mark.parametrize(("place", "what"), [(0, "proof"), (1, "proof"), (2, "stages of")])
def test_proofs_of_another_kind_differ(place, what):
    """Both hold, and the same program found them."""
    weaker = ["identical"] * 3
    weaker[place] = "reordered"
    tests = [proving(*["identical"] * 3), proving(*["identical"] * 3), proving(*weaker)]
    assert has_records(tests[0])
    assert not describe_differences(tests[:2])
    (line,) = describe_differences(tests)
    assert line.startswith(f"repetition 3 against 1: {what}")
    assert line.endswith(": identical then, reordered now")


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("accepts", ["--gt-update-goldens", "--gt-create-goldens"])
def test_a_golden_that_each_repetition_writes_anew_fails(tmp_path, accepts):
    """Each golden holds for its own repetition."""
    (tmp_path / "test_it.py").write_text(
        """
        import itertools
        count = itertools.count()
        def test_text(gt_golden):
            gt_golden.check(f"run {next(count)}")
        def test_numbers(gt_golden):
            gt_golden.check({"loss": float(next(count))})
        def test_same(gt_golden):
            gt_golden.check("same")
    """.replace("\n        ", "\n")
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "--gt-repeat=2", accepts, "--gt-goldens-in-ci"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert done.stdout.count(" - repetitions differ") == 2


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_a_number_of_repetitions_that_is_none_ends_the_run(tmp_path, value):
    done = run(tmp_path, f"--gt-repeat={value}")
    assert done.returncode == 4
    assert f"--gt-repeat={value}: expected a whole number, 1 or more" in done.stderr


def test_a_collective_is_not_named_before_an_operator_of_another_rank():
    rand, add = ("aten.rand", "a.py:1", "5f"), ("aten.add", "a.py:2", "77")
    reduce = ("c10d.allreduce_.default", "a.py:3", "1")
    ranks = {0: [rand, reduce], 1: [rand, add, reduce]}
    other = {0: [rand, (*reduce[:2], "2")], 1: [rand, (*add[:2], "78"), (*reduce[:2], "2")]}
    assert find_operator([ranks, ranks, other]) == (
        "first operator: aten.add at a.py:2, call 2 of 3, on rank 1"
    )
    other = {0: [rand, (*reduce[:2], "2")], 1: [rand, add, (*reduce[:2], "2")]}
    assert find_operator([ranks, other]).startswith("first operator: c10d.allreduce_.default")


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([], "no operator was called"),
        ([("aten.add", "a.py:2", "77")], "no operator differs"),
    ],
)
def test_what_no_operator_explains_is_said(calls, said):
    assert find_operator([{0: calls}, {0: calls}]).startswith(said)


def test_repetitions_that_end_earlier_part_at_their_end():
    add = ("aten.add", "a.py:2", "77")
    for sides in ([{0: [add]}, {0: []}], [{0: []}, {0: [add]}]):
        expected = "repetitions part at call 1: aten.add at a.py:2, or the end"
        assert find_operator(sides) == expected


def test_the_first_failure_of_repetitions_is_kept():
    test = Collected("a")
    for number, outcome in enumerate(("passed", "failed", "passed"), 1):
        for when in ("setup", "call", "teardown"):
            result = outcome if when == "call" else "passed"
            report = pytest.TestReport("a", ("a", 0, "a"), {}, result, None, when)
            report.gt_repetition = number
            test.add(report)
            if (number, when) == (2, "call"):
                kept = list(test.reports)
    assert test.outcome == "failed"
    assert test.reports[: len(kept)] == kept


def test_a_test_whose_repetitions_differ_is_counted_once(tmp_path):
    """Not again for the runs in which its operators are observed."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import itertools\ncount = itertools.count()\n"
        "def test_text(gt_golden): gt_golden.check(f'run {next(count)}')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "--gt-device=cpu"]
    options = ["--gt-repeat=2", "--gt-create-goldens", "--gt-goldens-in-ci"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("repeated ")]
    assert lines == ["repeated  1 different (2 times)"]
