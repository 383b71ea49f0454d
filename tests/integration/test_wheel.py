"""The built wheel in an environment of its own: what a user installs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
PROJECT = (
    "import pytest, pytest_gtrainer\n"
    '@pytest.mark.gt_world("ranks", size=2)\n'
    "def test_it(gt_world, gt_mesh):\n"
    "    assert gt_mesh.size() == 2\n"
    "    assert pytest_gtrainer.__file__.startswith({site!r})\n"
)


def test_the_wheel_works_without_the_repository(installed, tmp_path):
    """Its plugin is found by its entry point, and writes a report: the page's template is in the
    wheel.
    """
    (tmp_path / "test_it.py").write_text(PROJECT.format(site=installed.site))
    installed.run("pytest", "-q", "--gt-report=page.html", cwd=tmp_path)
    assert "test_it.py::test_it" in (tmp_path / "page.html").read_text()


def test_only_the_package_is_in_it(installed):
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"pytest_gtrainer"}
    assert not [name for name in names if "/test_" in name or "fixtures/" in name]


def test_pip_finds_nothing_to_complain_about(installed, tmp_path):
    assert "No broken requirements found." in installed.run("pip", "check", cwd=tmp_path)


def test_importing_it_imports_nothing_heavy(installed, tmp_path):
    (tmp_path / "probe.py").write_text(
        "import sys, pytest_gtrainer, pytest_gtrainer.plugin\n"
        "print(sorted({'torch', 'numpy', 'jinja2', 'xxhash', 'sympy'} & sys.modules.keys()))\n"
    )
    assert installed.run("probe", cwd=tmp_path) == "[]\n"


def test_the_source_archive_installs(make_environment, tmp_path):
    """Built by setuptools' own hook, from a copy without anything that git does not know."""
    copy = tmp_path / "copy"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{ROOT}", copy], check=True)
    script = "from setuptools.build_meta import build_sdist; build_sdist('d')"
    subprocess.run([sys.executable, "-c", script], cwd=copy, check=True, capture_output=True)
    (archive,) = (copy / "d").glob("*.tar.gz")
    environment = make_environment(tmp_path / "env", archive)
    (tmp_path / "test_it.py").write_text(PROJECT.format(site=environment.site))
    output = environment.run("pytest", "-q", "--gt-report=page.html", "test_it.py", cwd=tmp_path)
    assert "1 passed" in output
