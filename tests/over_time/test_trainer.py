"""``examples/trainer`` is a real trainer: a resumed run continues the same run, with the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[2] / "examples" / "trainer" / "train.py"


def losses(folder, *arguments, ranks=1):
    """Run the trainer and return the lines that it prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command = launcher if ranks > 1 else [sys.executable]
    run = subprocess.run(
        [*command, TRAINER, *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.second_tier
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_continues_the_same_run(tmp_path, ranks):
    whole = losses(tmp_path, "--steps=4", "--save=saved", "--save-at=2", ranks=ranks)
    resumed = losses(tmp_path, "--steps=4", "--resume=saved/step2", ranks=ranks)
    assert len(whole) == 4
    assert resumed == whole[2:]
