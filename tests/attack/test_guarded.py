"""A pass that misbehaves is a failure, or its changes are put back and named; the run goes on."""

import contextlib
import os
import random
import time

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_gtrainer.__main__ import main
from pytest_gtrainer.attack import guarded as module
from pytest_gtrainer.attack.guarded import guarded


def call(a_pass, seconds=30.0, times=1):
    """Call a guarded pass and return the lines that it notes."""
    gm, notes = fx.GraphModule({}, fx.Graph()), []
    run = guarded(a_pass, seconds, notes.append)
    for _ in range(times):
        assert run(gm, []) is gm
    return notes


def test_a_pass_that_does_its_work_is_left_alone():
    assert call(lambda gm, inputs: gm) == []


def loops(gm, inputs):
    while True:
        time.sleep(0.01)


def loops_and_catches_errors(gm, inputs):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def loops_and_catches_once_more(gm, inputs):
    with contextlib.suppress(BaseException):
        loops(gm, inputs)
    loops(gm, inputs)


@pytest.mark.parametrize("a_pass", [loops, loops_and_catches_errors, loops_and_catches_once_more])
def test_a_pass_that_loops_is_ended(a_pass):
    with pytest.raises(TimeoutError, match=r"the pass has not ended after 0\.1 s"):
        call(a_pass, 0.1)


def test_a_pass_that_eats_memory_is_ended(monkeypatch):
    monkeypatch.setattr(module, "MEMORY", 2**28)
    with pytest.raises(MemoryError):
        call(lambda gm, inputs: bytearray(2**32))
    with pytest.raises(RuntimeError, match="allocate"):
        call(lambda gm, inputs: torch.empty(2**32))
    assert len(bytearray(2**29)) == 2**29, "the bound is that of the pass alone"


def test_a_child_that_returns_from_the_pass_ends_there():
    """Else two processes would fuzz. The parent fails once, not in later calls."""
    forks = [True, False]

    def forks_first(gm, inputs):
        if forks.pop(0) and os.fork():
            os.wait()
        return gm

    process, notes = os.getpid(), []
    gm, run = fx.GraphModule({}, fx.Graph()), guarded(forks_first, 30.0, notes.append)
    with pytest.raises(ChildProcessError, match="the pass forks, and its child returns"):
        run(gm, [])
    assert os.getpid() == process
    assert run(gm, []) is gm


def test_a_child_that_ends_by_itself_is_no_failure():
    """Passes that measure may start workers."""

    def forks(gm, inputs):
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        return gm

    assert call(forks) == []


def test_what_a_pass_prints_goes_to_standard_error(capsys):
    def prints(gm, inputs):
        print("hello")
        return gm

    assert call(prints) == []
    assert capsys.readouterr() == ("", "hello\n")


def test_what_a_pass_changes_is_put_back_and_named_once(tmp_path):
    def changes(gm, inputs):
        torch.manual_seed(7)
        random.seed(7)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.autocast("cpu").__enter__()
        os.chdir(tmp_path)
        return gm

    drawn, mine, folder = torch.random.get_rng_state(), random.getstate(), os.getcwd()
    autocast, dtype, grad_mode, working, *random_states = call(changes, times=2)
    assert random_states == [
        "the pass changes the random state of python, which is put back",
        "the pass changes the random state of torch.cpu, which is put back",
    ]
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert (random.getstate(), os.getcwd()) == (mine, folder)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert autocast.startswith("the pass changes autocast to ((True, torch.bfloat16)")
    assert [dtype, grad_mode, working] == [
        "the pass changes the default dtype to torch.float64, which is put back",
        "the pass changes grad mode to False, which is put back",
        f"the pass changes the working directory to {tmp_path}, which is put back",
    ]


def test_a_mode_that_the_pass_leaves_is_ended_and_named():
    def enters(gm, inputs):
        FakeTensorMode().__enter__()
        torch.rand(1)
        return gm

    (line,) = call(enters)
    assert "FakeTensorMode" in line
    assert line.endswith("which is put back")
    assert type(torch.ones(1)) is torch.Tensor


def test_settings_are_put_back_after_an_error():
    def raises(gm, inputs):
        torch.set_default_dtype(torch.float64)
        raise KeyError("a")

    with pytest.raises(KeyError):
        call(raises)
    assert torch.get_default_dtype() is torch.float32


def test_a_switch_that_is_not_put_back_is_named(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)

    def measures(gm, inputs):
        torch.backends.cudnn.benchmark = True
        return gm

    assert call(measures, times=2) == [
        "the pass changes torch.backends.cudnn.benchmark to True: later graphs run with it"
    ]


GRAPH = """
if I:
  I[0]: f32[2]
if fwd:
  with _:
    a: f32[2] = aten.neg(I[0])
    b: f32[2] = aten.exp(a)
if out:
  out[0] = b
"""


def print_and_loop_pass(gm, inputs=None):
    print("not a graph")
    loops(gm, inputs)


def test_reduce_guards_its_pass(tmp_path, capsys):
    """Standard output is the graph alone, and a pass that loops is a failure that is reduced."""
    path = tmp_path / "step.fxgraph"
    path.write_text(GRAPH)
    name = f"{__name__}:print_and_loop_pass"
    assert main(["reduce", str(path), "--proof", name, "--timeout", "0.05"]) == 0
    output, error = capsys.readouterr()
    assert "not a graph" in error
    assert "not a graph" not in output
    assert "TimeoutError: the pass raises TimeoutError" in error
    assert output.count("aten.") == 1
