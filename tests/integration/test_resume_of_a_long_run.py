"""A run of the matrices goes on where it was cut: what passed does not run again, and has its row
in the table.
"""

from pathlib import Path

import pytest

from pytest_gtrainer.testing import run_project

pytestmark = [pytest.mark.second_tier, pytest.mark.usefixtures("warm_python")]

SUITE = """
import os, torch, pytest
from pytest_gtrainer import Rule, Sweep

RULES = [Rule("not judged", {"size": 3}, reason="too large"), Rule("equal", to="it")]
SWEEP = Sweep("sizes", {"size": (1, 2, 3)}, RULES)

@pytest.mark.parametrize("cell", SWEEP.cells, ids=str)
def test_it(cell):
    with SWEEP.judging(cell) as judge:
        if cell["size"] == 2 and os.environ.get("FAILS"):
            raise RuntimeError("no space left")
        judge([torch.ones(1)], [torch.ones(1)])
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = ("-p", "tests.parity.resume", "--resume=build/done.jsonl", "-p", "no:cacheprovider")
    return lambda suite=SUITE, *more: run_project(
        tmp_path, *options, *more, files={"test_it.py": suite}
    )


def test_what_passed_does_not_run_again_and_is_in_the_table(run, tmp_path, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    assert run().status == 1
    monkeypatch.delenv("FAILS")
    with (tmp_path / "build" / "done.jsonl").open("a") as file:
        file.write('\n["test_it.py::test_it[si')  # the run was cut
    second = run()
    assert second.status == 0, second.output
    assert "2 done before, 1 to run" in second.output
    assert "1 passed, 2 deselected" in second.output
    assert second.output.count("equal   to it") == 2
    assert "1 cell not judged: too large" in second.output
    third = run()
    assert third.status == 0, "all is done"
    assert "3 deselected" in third.output


ON_RANKS = """
import pytest

@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("failing", [None, 1])
def test_it(gt_world, failing):
    assert gt_world.rank != failing
"""


def test_a_rank_that_passed_does_not_speak_for_the_test(run, tmp_path):
    """Each rank is a pytest session of its own, and only its parent knows what all of them did."""
    first = run(ON_RANKS, "--gt-gpus=2")
    assert first.status == 1, first.output
    done = [line for line in (tmp_path / "build" / "done.jsonl").read_text().splitlines() if line]
    assert done == ['["test_it.py::test_it[None]", []]']
    second = run(ON_RANKS, "--gt-gpus=2")
    assert "1 done before, 1 to run" in second.output
    assert "assert 1 != 1" in second.output, (
        "a rank runs what is left, and nothing else breaks there"
    )
