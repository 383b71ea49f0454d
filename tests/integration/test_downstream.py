"""``examples/downstream``: a repository with its own model, pass, goldens, CI file; an option switches a bug on."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(tmp_path):
    """A copy of the example, so that nothing is written into the tree."""
    return shutil.copytree(ROOT / "examples" / "downstream", tmp_path / "downstream")


def run(python, folder, *arguments):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [python, "-m", "pytest", "-q", "--gt-device=cpu", "-p", "no:hypothesispytest", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
    return done.stdout


def assert_caught(output):
    """By the pass file, by the golden, in bits; the control stands."""
    assert "3 failed, 1 passed" in output, output
    assert 'average.fxgraph:3: then reduce_scatter_tensor(I[0], "sum", ...) as scatter' in output
    assert re.search(r"type of aten.div.Tensor in bwd bucket layers\[0, 1\]: f32\[216\] became f32\[1728\]", output)
    assert re.search(r"sum_and_divide_pass\nE +different: \d+ of 11 tensors", output)


def test_its_bug_is_caught(example):
    assert_caught(run(sys.executable, example, "--with-bug"))


def test_the_readme_quotes_what_it_says():
    """Numbers differ from machine to machine; the words do not."""
    readme = (ROOT / "README.md").read_text()
    assert "type of aten.div.Tensor in bwd bucket layers[0, 1]: f32[216] became f32[1728]" in readme


@pytest.mark.long
def test_it_is_green_without_the_bug_from_an_installed_wheel(example, installed):
    output = run(installed.python, example, "-p", "no:randomly", "--gt-require=ranks", "--gt-unused-goldens=fail")
    assert "4 passed" in output, output
    assert "goldens   1 equal" in output
    assert_caught(run(installed.python, example, "--with-bug"))


def test_its_ci_file_runs_options_that_exist():
    """So that who copies it is not met by a usage error."""
    from pytest_gtrainer.options import OPTIONS

    text = (ROOT / "examples" / "downstream" / ".github" / "workflows" / "tests.yml").read_text()
    used = set(re.findall(r"(--gt-[\w-]+)", text))
    assert used
    assert used <= {option.flag for option in OPTIONS}
