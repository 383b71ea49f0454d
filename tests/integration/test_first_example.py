"""``examples/first``: what ``make run`` shows. Its run is green, and shows the mistakes that it
finds.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "first"


def test_make_run_and_its_page_name_what_is_there():
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^run: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    assert "--gt-report=build/run.html examples/first" in recipe
    named = re.findall(r"^\| `(test_\w+)` \|", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    text = (EXAMPLE / "tests" / "test_main_job.py").read_text()
    assert named == re.findall(r"^def (test_\w+)", text, re.MULTILINE)


@pytest.mark.second_tier
def test_the_run_is_green_and_shows_both_mistakes(tmp_path):
    report = tmp_path / "run.html"
    command = [sys.executable, "-m", "pytest", "--gt-gpus=8", "--gt-device=cpu"]
    command += ["--gt-unused-goldens=fail", f"--gt-report={report}", "examples/first"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert "begins at the output of layers.0.feed_forward.down: equal after a sum over 'tp'" in out
    assert "layers.0.attention.wq.weight sits at byte" in out
    assert "summed in the order of ranks" in out
    assert re.search(r"^goldens +2 equal$", out, re.MULTILINE)
    verdicts = "1 another function, 1 different, 2 equal, 1 reordered"
    assert re.search(rf"^verdicts +{verdicts}$", out, re.MULTILINE)
    assert f"gtrainer: report in {report}" in out
    assert "warnings summary" not in out
    assert report.stat().st_size > 10_000
