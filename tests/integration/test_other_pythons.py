"""The wheel under every other Python from 3.11 on that is found; pytest reports a skip if there is
none.

Torch is not installed there: what is run works without it, which is the plugin, its options,
summary and report.
"""

import os
import subprocess
import sysconfig
import zipfile

import pytest

from fixtures.pythons import other_pythons

pytestmark = pytest.mark.long
PROJECT = """
from pytest_gtrainer.facts import emit

def test_it(tmp_path, gt_artifacts):
    emit("verdict", outcome="equal", what="nothing")
    assert gt_artifacts == tmp_path
"""


OTHERS = dict(other_pythons())


@pytest.mark.parametrize("minor", OTHERS)
def test_the_wheel_compiles_and_its_plugin_runs(installed, tmp_path, minor):
    """pytest and other packages of pure Python are borrowed from this environment, behind the
    wheel.
    """
    site = tmp_path / "site"
    zipfile.ZipFile(installed.wheel).extractall(site)
    subprocess.run([OTHERS[minor], "-W", "error", "-m", "compileall", "-q", site], check=True)
    (tmp_path / "test_it.py").write_text(PROJECT)
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:hypothesispytest",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(site), sysconfig.get_path("purelib")])
    run = [OTHERS[minor], *command, "--gt-report=page.html"]
    done = subprocess.run(
        run, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdicts  1 equal" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert f"Python 3.{minor}." in page
    assert "test_it.py::test_it" in page
