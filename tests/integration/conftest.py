"""The package as a user installs it: built, in an environment of its own, torch and the rest
borrowed from this one.
"""

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel: its Python, where the package lies, the wheel."""

    python: Path
    site: str
    wheel: Path

    def run(self, *arguments, cwd, status=0):
        """``python -m ...`` in that environment: its output."""
        done = subprocess.run(
            [self.python, "-m", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def make_environment():
    """``make_environment(folder, package)`` -> ``Installed``."""
    return _make_environment


def _make_environment(folder, package):
    """A virtual environment in ``folder`` with the package, a wheel or source archive, and nothing
    else of ours.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    # torch and the rest, pip among them, come from this environment, behind what the package brings
    Path(site, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["--no-deps", "--force-reinstall", "--no-build-isolation", "--no-compile"]
    subprocess.run([python, "-m", "pip", "install", "-q", *options, package], check=True)
    return Installed(python, site, package)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        ROOT,
    ]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The wheel, installed."""
    return _make_environment(tmp_path_factory.mktemp("installed") / "env", wheel)
