"""torchtitan's own loop is recorded, without an edit of it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make test-torchtitan", allow_module_level=True)

HERE = Path(__file__).parents[1]
SIZES = ("--training.local_batch_size=2", "--training.seq_len=64")
OPTIONS = ("--training.steps=5", "--training.mixed_precision_param=float32")
EAGER = ("--module=llama3", "--config=llama3_debugmodel")
GRAPH = (
    *("--module=graph_trainer.llama3", "--config=graph_trainer_llama3_debugmodel"),
    *("--compile.mode=aot_fx_trace", "--compile.disable_passes", "cudagraph_pass"),
    "--training.disable_cuda_graphs",
)


def record(folder, to, *options):
    """Record steps of Llama 3 on two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [*launcher, "-m", "pytest_gtrainer", "record", f"--to={to}", "--values"]
    run = subprocess.run(
        [*command, HERE / "train_on_cpu.py", *options, *SIZES],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text and a tokenizer, where ``train`` looks for them, and a record."""
    folder = tmp_path_factory.mktemp("recorded")
    shutil.copytree(HERE / "tests" / "assets", folder / "tests" / "assets", dirs_exist_ok=True)
    texts = folder / "tests" / "assets" / "c4_test"
    texts.mkdir(exist_ok=True)
    lines = [json.dumps({"text": "hello world " * (20 + number % 9)}) for number in range(200)]
    (texts / "data.json").write_text("\n".join(lines))
    record(folder, "eager", *EAGER, "--debug.seed=0", *OPTIONS)
    return folder


def test_two_ranks_of_its_own_loop(folder):
    """Twice the same is equal."""
    record(folder, "again", *EAGER, "--debug.seed=0", *OPTIONS)
    status, printed = compare(folder, "eager", "again")
    assert status == 0, printed
    assert "2 ranks, steps 0 to 4" in printed


@pytest.mark.long
def test_another_seed_is_named(folder):
    record(folder, "other", *EAGER, "--debug.seed=1", *OPTIONS)
    status, printed = compare(folder, "eager", "other")
    assert status == 1
    assert "first difference: step 0, load: tok_embeddings.weight, ranks 0, 1\n" in printed


def test_the_eager_trainer_and_the_graph_part_at_the_gradient_of_the_head(folder):
    """In five steps of float32, by rounding: the graph reduces that gradient chunk by chunk."""
    record(folder, "graph", *GRAPH, "--debug.seed=0", *OPTIONS)
    status, printed = compare(folder, "eager", "graph")
    assert status == 1
    assert printed.count("2 ranks, steps 0 to 4") == 2
    assert "first difference: step 0, clip: lm_head.weight, ranks 0, 1\n" in printed
    assert re.search(r"in norms of A, the largest: lm_head.weight \d\.\de-08\n", printed), printed
    assert "entries that differ: load 0 of 51, clip 1 of 45," in printed
    # The step of a graph calls neither the model nor backward.
    for phase in ("data", "loss", "gradient"):
        assert f"not compared: {phase}, which only A has\n" in printed
