"""``examples/fusion``: a fusion pass of an inference server; its bug fails in bits, and not by a
tolerance.
"""

import re
import shutil
from pathlib import Path

import pytest

from pytest_gtrainer.testing import run_project

EXAMPLE = Path(__file__).parents[2] / "examples" / "fusion"
OURS, BY_HAND = (EXAMPLE / "tests" / f"test_{name}.py" for name in ("fusion", "by_hand"))


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A copy of the example, so that nothing is written into the tree."""
    return shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("copy") / "fusion")


def outcomes(example, *options):
    run = run_project(example, "-p", "no:randomly", "-p", "no:hypothesispytest", *options)
    return run, {name.rpartition(".")[2]: test.outcome for name, test in run.tests.items()}


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_its_bug_is_caught_in_bits_and_not_by_a_tolerance(example):
    run, found = outcomes(example, "--with-bug", "tests/test_fusion.py", "tests/test_tolerance.py")
    failed = {name for name, outcome in found.items() if outcome != "passed"}
    assert failed == {"test_fusion::test_the_pass_changes_no_bit"}, run.output
    message = run["test_the_pass_changes_no_bit"].message
    assert "FuseNormAndQuant on the forward graph 0/0 changed the numbers, on " in message
    assert "serve.rms_norm_static_quant" in message


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_without_the_bug_all_pass(example):
    run, found = outcomes(example, "-k", "not 128 and not 65")  # sizes that by hand compile anew
    assert set(found.values()) == {"passed"}, run.output
    assert len(found) == 7


def code_lines(path):
    """Lines with code: without blank lines, comments, docstrings of one line."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return len([line for line in lines if line and not line.startswith(("#", '"""'))])


def test_the_readme_counts_lines_as_they_are():
    page = (EXAMPLE / "README.md").read_text()
    for path in (OURS, BY_HAND):
        assert re.search(rf"`tests/{path.name}` \| {code_lines(path)} \|", page), code_lines(path)
