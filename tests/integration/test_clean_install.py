"""The documentation can be followed in an environment that holds the wheel, torch and the declared
dependencies.

Where the index has no CPU build of torch for a Python, its CUDA build is installed without CUDA's
libraries, by ``.ci/light_torch.py``. What cannot be judged is skipped by name: a Python that is not
found, a torch that the index lacks for it. Anything else fails.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.pages import environment, follow
from fixtures.pythons import other_pythons

ROOT = Path(__file__).parents[2]
TORCH = next(
    line.removeprefix("torch==").strip()
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)
FOUND = {sys.version_info.minor: sys.executable, **dict(other_pythons())}
NOT_ON_THE_INDEX = 3
SECTIONS = {
    "parallelism": "My loss differs from eager",
    "goldens": "In CI",
    "ranks": "First on one machine",
}
OF_DOWNSTREAM = (
    ("graph-checks", "The smallest pass and its test", 2),
    ("passes", "A pass of your own in a training step", 3),
    ("reports", "In CI: versions of torch, CPU and GPU", 2),
)
DOORS = ("i-have-a-pass", "i-have-a-parallel-model", "i-have-a-compiled-model")
pytestmark = pytest.mark.long


def run(commands, *command, cwd=None):
    """A command as a user runs it, with those of the folder ``commands`` before all others."""
    environ = environment(commands)
    command = [shutil.which(command[0], path=environ["PATH"]), *command[1:]]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)


@pytest.fixture(scope="module", params=[11, 12, 13], ids=lambda minor: f"3.{minor}")
def clean(request, tmp_path_factory, wheel):
    """The commands of an environment that holds the wheel and what it declares, in the versions
    that a user gets.
    """
    if request.param not in FOUND:
        pytest.skip(f"no Python 3.{request.param} was found: the wheel is not judged under it")
    folder = tmp_path_factory.mktemp("clean") / "env"
    made = run(folder / "bin", FOUND[request.param], ROOT / ".ci" / "light_torch.py", TORCH, folder)
    if made.returncode == NOT_ON_THE_INDEX:
        pytest.skip(made.stderr)
    assert made.returncode == 0, made.stderr
    added = run(folder / "bin", "python", "-m", "pip", "install", "-q", wheel)
    assert added.returncode == 0, added.stderr
    return folder / "bin"


@pytest.fixture
def tutorial(clean, tmp_path):
    """A folder in which the tutorial has been followed."""
    section = "From an empty directory to a failing golden and back"
    assert follow(ROOT / "docs" / "tutorial.md", tmp_path, clean, section) == 10
    return tmp_path


def test_it_holds_what_the_wheel_declares_and_no_numpy(clean, tmp_path):
    """So that the tests below judge a user's environment, not one of ours."""
    probe = "import importlib.util as u; print(*map(u.find_spec, ('numpy', 'fixtures')))"
    assert run(clean, "python", "-c", probe, cwd=tmp_path).stdout == "None None\n"
    assert (
        run(clean, "python", "-m", "pip", "check", cwd=tmp_path).stdout
        == "No broken requirements found.\n"
    )


def test_the_tutorial_and_the_how_tos_are_followed(clean, tutorial):
    for page, title in SECTIONS.items():
        assert follow(ROOT / "docs" / f"{page}.md", tutorial, clean, section=title) > 0


@pytest.mark.parametrize("page", DOORS)
def test_the_doors_are_followed(clean, tmp_path, page):
    assert follow(ROOT / "docs" / "how-to" / f"{page}.md", tmp_path, clean) == 3


def test_the_examples_of_the_readme_are_followed(clean, tmp_path):
    assert follow(ROOT / "README.md", tmp_path, clean) == 2


def test_the_pass_and_the_workflow_of_a_repository_are_followed(clean, tmp_path):
    """``examples/downstream`` by the pages that speak of it."""
    copy = shutil.copytree(ROOT / "examples" / "downstream", tmp_path / "downstream")
    for page, title, commands in OF_DOWNSTREAM:
        assert follow(ROOT / "docs" / f"{page}.md", copy, clean, section=title) == commands
