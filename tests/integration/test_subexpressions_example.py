"""``examples/subexpressions``: a pass under the rules of conformance, and three mistakes in it that
they find.
"""

import re
import shutil
from pathlib import Path

import pytest

from pytest_gtrainer.testing import run_project

pytestmark = [pytest.mark.second_tier, pytest.mark.usefixtures("warm_python")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "subexpressions"


MISTAKES = {
    "writes": ("1 written of merge_equal broken", "first at output loss"),
    "buffers": ("1 fresh of merge_equal broken", "after merge_equal against before"),
    "directions": ("1 A11 of merge_equal broken", "in bwd: expected the first gather, "),
}
DEAR = ("generated", "growth", "process")
DEAR_WITHOUT_A_MISTAKE = (*DEAR, "cost", "ranks")
DEAR_WITH_A_MISTAKE = (*DEAR_WITHOUT_A_MISTAKE, "D9", "p2p")


def run_example(tmp_path, *options, without=()):
    only = ["-k", f"not ({' or '.join(without)})"] if without else []
    example = shutil.copytree(EXAMPLE, tmp_path / "copy")  # nothing is written into the tree
    return run_project(example, "-p", "no:cacheprovider", *options, *only)


@pytest.mark.parametrize(
    ("without", "passed", "held"),
    [
        pytest.param(DEAR_WITHOUT_A_MISTAKE, "11 passed, 1 skipped", "11 held", id="quick rules"),
        pytest.param(
            (), "1[4-6] passed, [1-3] skipped", "1[4-6] held", id="all", marks=pytest.mark.long
        ),
    ],
)
def test_the_pass_holds_the_rules(tmp_path, without, passed, held):
    run = run_example(tmp_path, without=without)
    assert not run.status, run.output
    # What is skipped proves nothing on these graphs, or is not claimed.
    assert re.search(passed, run.output)
    assert re.search(held, run.output)


@pytest.mark.parametrize(
    "without",
    [
        pytest.param(DEAR_WITH_A_MISTAKE, id="quick rules"),
        pytest.param(DEAR, id="more rules", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("bug", MISTAKES)
def test_a_mistake_breaks_one_rule_and_no_other(tmp_path, bug, without):
    broken, message = MISTAKES[bug]
    run = run_example(tmp_path, f"--with-bug={bug}", without=without)
    assert run.status
    assert re.search(r"1 failed, \d+ passed, \d skipped", run.output)
    assert broken in run.output
    assert message in run.output
