"""``examples/downstream``: a repository with its own model, pass, goldens, CI file; an option
switches a bug on.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fixtures.pages import blocks, commands

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "downstream"
WORKFLOW = EXAMPLE / ".github" / "workflows" / "tests.yml"


@pytest.fixture
def example(tmp_path):
    """A copy of the example, so that nothing is written into the tree."""
    return shutil.copytree(EXAMPLE, tmp_path / "downstream")


def run(python, folder, *arguments):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "--gt-device=cpu",
        "-p",
        "no:hypothesispytest",
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280
    )
    return done.stdout


def assert_caught(output):
    """Assert that the pass file, the golden and the bits catch it, and that the control holds."""
    assert "3 failed, 1 passed" in output, output
    assert 'average.fxgraph:3: then reduce_scatter_tensor(I[0], "sum", ...) as scatter' in output
    assert re.search(
        r"type of aten.div.Tensor in bwd bucket layers\[0, 1\]: f32\[216\] became f32\[1728\]",
        output,
    )
    assert re.search(r"sum_and_divide_pass\nE +different: \d+ of 11 tensors", output)


@pytest.mark.second_tier
def test_its_bug_is_caught(example):
    assert_caught(run(sys.executable, example, "--with-bug"))


def test_the_readme_quotes_what_it_says():
    """Numbers differ from machine to machine; the words do not."""
    readme = (EXAMPLE / "README.md").read_text()
    assert "type of aten.div.Tensor in bwd bucket layers[0, 1]: f32[216] became f32[1728]" in readme


@pytest.mark.long
def test_it_is_green_without_the_bug_from_an_installed_wheel(example, installed):
    output = run(
        installed.python,
        example,
        "-p",
        "no:randomly",
        "--gt-require=ranks",
        "--gt-unused-goldens=fail",
    )
    assert "4 passed" in output, output
    assert "goldens   1 equal" in output
    assert_caught(run(installed.python, example, "--with-bug"))


def workflow():
    """Its jobs, each with the commands that it runs."""
    yaml = pytest.importorskip("yaml", reason="needs the extra `test`: pip install -e '.[test]'")
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return {
        name: (job, [step["run"] for step in job["steps"] if "run" in step])
        for name, job in jobs.items()
    }


def test_its_workflow_runs_options_that_exist():
    """So that who copies it is not met by a usage error; on GPUs nothing falls back to the CPU."""
    from pytest_gtrainer.options import OPTIONS

    tests = {name: runs[-1] for name, (_, runs) in workflow().items()}
    assert set(tests) == {"cpu", "gpu"}
    for command in tests.values():
        used = set(re.findall(r"(--gt-[\w-]+)", command))
        assert used
        assert used <= {option.flag for option in OPTIONS}
    assert "--gt-require=ranks" in tests["cpu"]
    assert {"--gt-device=cuda", "--gt-require=cuda"} <= set(tests["gpu"].split())


def test_its_workflow_has_two_versions_of_torch_that_it_allows():
    """Both are installed first, and by the same version that the job is named after."""
    (allowed,) = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["dependencies"]
    for job, (install, *_) in workflow().values():
        versions = job["strategy"]["matrix"]["torch"]
        assert len(versions) == 2
        assert all(version in Requirement(allowed).specifier for version in versions)
        assert install.startswith("pip install torch==${{ matrix.torch }}")


def test_the_page_shows_the_workflow_and_runs_its_commands():
    page, section = ROOT / "docs" / "reports.md", "In CI: versions of torch, CPU and GPU"
    shown = dict(blocks(page, section))
    assert shown["yaml"] == WORKFLOW.read_text()
    followed = [
        command
        for language, text in blocks(page, section)
        if language == "console"
        for command, _ in commands(text)
    ]
    assert followed == [f"CI=1 {runs[-1]}" for _, runs in workflow().values()]
