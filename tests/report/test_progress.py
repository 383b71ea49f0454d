"""Lines of long work: on a terminal, past the capture of output; nowhere else."""

import os
import pty
import subprocess
import sys
import time

import pytest
import torch

from pytest_gtrainer import (
    NetModel,
    TrainConfig,
    bind_options,
    facts,
    graphtext,
    trace_step,
    train_graph,
)
from pytest_gtrainer.passes.pipeline import apply_graph_passes
from pytest_gtrainer.worlds.simulated.threads import run_threads

TEST = """
import time
from pytest_gtrainer.facts import long_work

def test_it(capfd):
    print("captured")
    with long_work("working hard", first=0.05) as at:
        at("step 1 of 2")
        time.sleep(0.5)
    assert capfd.readouterr().out == "captured\\n"
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "test_it.py").write_text(TEST)
    return [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        "test_it.py",
    ]


def test_a_terminal_shows_the_line_while_the_test_runs_and_captures(command, tmp_path):
    ours, theirs = pty.openpty()
    run = subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b"".join(iter(lambda: read(ours), b"")).decode().replace("\r", "")
    assert run.wait(timeout=120) == 0
    assert seen.splitlines().count("gtrainer: working hard, step 1 of 2: 0 s so far") == 1
    assert "1 passed" in seen


def read(terminal):
    """Return the bytes that are there; nothing when the other side has closed it."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def test_a_pipe_does_not(command, tmp_path):
    """The twin: CI logs stay as they were."""
    seen = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 passed" in seen.stdout
    assert "working hard" not in seen.stdout + seen.stderr


@pytest.fixture
def lines(monkeypatch):
    """Collect the lines of progress; the first ones come at once."""
    monkeypatch.setattr(facts, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(facts, "EVERY_SECONDS", 0.01)
    seen = []
    with facts.watching({"progress": lambda text: seen.append(text)}):
        yield seen


def wait_for(lines, text=""):
    """Until a line has come; the assertion behind it says if none does."""
    for _ in range(5_000):
        if any(text in line for line in lines):
            return
        time.sleep(0.002)


def test_tracing_tells(lines):
    def step(model, x):
        wait_for(lines)
        return model(x).sum()

    trace_step(torch.nn.Linear(2, 2), step, (torch.ones(1, 2),))
    assert lines[0] == "tracing a step of Linear: 0 s so far"


def test_simulating_tells(lines):
    run_threads(2, lambda rank: wait_for(lines), net=NetModel(1, 2))
    assert lines[0] == "simulating 2 ranks: 0 s so far"


@pytest.mark.gt_world("simulated", size=2)
def test_simulated_training_tells_its_step(lines, gt_world, gt_mesh):
    def batch(step, rank):
        if step == 1:
            wait_for(lines, "step 2 of 2")
        return (torch.ones(1, 4),)

    config = TrainConfig(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)),
        step=lambda model, x: model(x).sum(),
        batch=batch,
        bucket_plan=["0"],
        mesh=gt_mesh,
        steps=2,
    )
    train_graph(config, world=gt_world)
    assert any(line.startswith("simulating 2 ranks by the graph, step 2 of 2: ") for line in lines)


def test_passes_tell_the_terminal_instead_of_the_error_stream(lines, capsys):
    gm = graphtext.parse("if I:\n  I[0]: f32[4]\nif out:\n  out[0] = I[0]\n")

    def my_pass(gm, example_inputs=None):
        return gm

    apply_graph_passes(gm, None, [bind_options(my_pass)], long=0)
    assert lines[0].startswith("graph passes: my_pass (1 of 1), 0.0 s so far")
    assert capsys.readouterr().err == ""


def test_the_next_lines_come_at_their_pace(lines):
    with facts.long_work("this") as at:
        wait_for(lines)
        at("there")
        wait_for(lines, "there")
    assert lines[0] == "this: 0 s so far"
    assert lines[-1].startswith("this, there: ")
