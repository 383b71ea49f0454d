"""``examples/trainer`` is a real trainer: a resumed run continues the same run, with the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[2] / "examples" / "trainer" / "train.py"


def losses(folder, *arguments):
    """Run the trainer on two ranks and return the lines that it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    run = subprocess.run(
        [*command, TRAINER, *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.second_tier
def test_a_resumed_run_continues_the_same_run_on_two_ranks(tmp_path):
    whole = losses(tmp_path, "--steps=4", "--save=saved", "--save-at=2")
    resumed = losses(tmp_path, "--steps=4", "--resume=saved/step2")
    assert len(whole) == 4
    assert resumed == whole[2:]
