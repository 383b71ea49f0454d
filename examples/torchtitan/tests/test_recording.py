"""torchtitan's own loop is recorded, without an edit of it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make test-torchtitan", allow_module_level=True)

HERE = Path(__file__).parents[1]
OPTIONS = (
    *("--module=llama3", "--config=llama3_debugmodel", "--training.steps=2"),
    *("--training.local_batch_size=2", "--training.seq_len=64"),
)


def record(folder, to, *options):
    """Record two steps of Llama 3 on two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [*launcher, "-m", "pytest_gtrainer", "record", f"--to={to}"]
    run = subprocess.run(
        [*command, HERE / "train_on_cpu.py", *OPTIONS, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]


def compare(folder, a, b):
    run = subprocess.run(
        [sys.executable, "-m", "pytest_gtrainer", "compare", a, b],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout + run.stderr


def test_two_ranks_of_its_own_loop(tmp_path):
    """Twice the same is equal; another seed is named."""
    shutil.copytree(HERE / "tests" / "assets", tmp_path / "tests" / "assets")
    texts = tmp_path / "tests" / "assets" / "c4_test"
    texts.mkdir()
    lines = [json.dumps({"text": "hello world " * (20 + number % 9)}) for number in range(200)]
    (texts / "data.json").write_text("\n".join(lines))

    record(tmp_path, "a", "--debug.seed=0")
    record(tmp_path, "b", "--debug.seed=0")
    record(tmp_path, "c", "--debug.seed=1")
    status, printed = compare(tmp_path, "a", "b")
    assert status == 0, printed
    assert "2 ranks, steps 0 to 1" in printed
    status, printed = compare(tmp_path, "a", "c")
    assert status == 1
    assert "first difference: step 0, load: tok_embeddings.weight, ranks 0, 1\n" in printed
