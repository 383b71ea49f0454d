"""The built wheel in an environment of its own: what a user installs."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_wheel_works_without_the_repository(tmp_path):
    """Only the package is in it, and its plugin is found by its entry point."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    tops = {name.split("/")[0].split("-")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"pytest_gtrainer"}

    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    ours = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                          check=True, capture_output=True, text=True).stdout.strip()  # fmt: skip
    # torch and the rest come from this environment, behind what the wheel brings
    Path(ours, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--force-reinstall", wheel],
                   check=True)  # fmt: skip
    project = tmp_path / "project"
    project.mkdir()
    (project / "test_it.py").write_text(
        "import pytest, pytest_gtrainer\n"
        '@pytest.mark.gt_world("ranks", size=2)\n'
        "def test_it(gt_world, gt_mesh):\n"
        "    assert gt_mesh.size() == 2\n"
        f"    assert pytest_gtrainer.__file__.startswith({ours!r})\n"
    )
    result = subprocess.run([python, "-m", "pytest", "-q"], cwd=project, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
