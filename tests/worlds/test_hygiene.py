"""T8: whatever a test changes in its process is as before when it has ended, each thing by
itself.
"""

import gc
import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import traceback
from torch.nn.modules import module
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pytest_gtrainer.worlds.hygiene import kept, restored

# These tests change what the guard against leaks watches, so one that leaves a change behind fails.
pytestmark = pytest.mark.filterwarnings("error::pytest_gtrainer.leaks.LeakedFlagWarning")


def fewer_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def other_environment() -> None:
    os.environ["MADE_BY_A_TEST"] = "1"
    os.environ["CHANGED_BY_A_TEST"] = "after"
    del os.environ["REMOVED_BY_A_TEST"]


def other_collector() -> None:
    gc.disable()
    gc.set_threshold(11, 7, 3)


def hooked_modules() -> None:
    """Register a hook of every kind that torch has."""
    for register in (
        module.register_module_forward_hook,
        module.register_module_forward_pre_hook,
        module.register_module_full_backward_hook,
        module.register_module_full_backward_pre_hook,
        module.register_module_buffer_registration_hook,
        module.register_module_module_registration_hook,
        module.register_module_parameter_registration_hook,
    ):
        register(lambda *_: None)


CHANGES = {
    "resource limits": fewer_files,
    "the environment": other_environment,
    "the working directory": lambda: os.chdir("/"),
    "the umask": lambda: os.umask(0o123),
    "signal handlers": lambda: signal.signal(signal.SIGUSR1, lambda *_: None),
    "alarms": lambda: signal.alarm(10_000),
    "sys.path": lambda: sys.path.insert(0, "made-by-a-test"),
    "the garbage collector": other_collector,
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16).__enter__(),
    "torch function modes": lambda: (
        BaseTorchFunctionMode().__enter__(),
        BaseTorchFunctionMode().__enter__(),
    ),
    "dispatch modes": lambda: (
        FakeTensorMode().__enter__(),
        FlopCounterMode(display=False).__enter__(),
    ),
    "saved-tensor hooks": lambda: [saved_tensors_hooks(str, str).__enter__() for _ in range(2)],
    "global module hooks": hooked_modules,
    "annotations of traced nodes": lambda: traceback.current_meta.update(custom={"EP": "dispatch"}),
    "the default device": lambda: torch.set_default_device("meta"),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
}


def test_every_switch_that_is_put_back_is_in_the_table():
    assert CHANGES.keys() == kept().keys()


@pytest.mark.parametrize("fails", [False, True], ids=["passes", "raises"])
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_put_back(monkeypatch: pytest.MonkeyPatch, name: str, fails: bool):
    """A change that decides bits is also reported: the value before, and what the test left."""
    monkeypatch.setenv("REMOVED_BY_A_TEST", "1")
    monkeypatch.setenv("CHANGED_BY_A_TEST", "before")
    read, write = kept()[name]
    before = read()
    try:
        with restored() as changes:
            CHANGES[name]()
            left = read()
            if fails:
                raise KeyError(name)
    except KeyError:
        assert fails
    found = read()
    write(before)  # for the tests behind this one, whatever was found
    assert left != before, f"{name}: nothing was changed, so nothing is judged"
    assert found == before, f"{name} stays as the test has left it"
    decides_bits = name in ("matmul precision", "deterministic algorithms")
    assert changes == ({name: (before, left)} if decides_bits else {}), "each as (before, after)"


@pytest.mark.parametrize("end", [pytest.skip, pytest.fail, sys.exit], ids=["skip", "fail", "exit"])
@pytest.mark.parametrize("name", ["the environment", "the working directory", "grad mode"])
def test_it_is_put_back_also_behind_an_end_that_is_no_error(
    monkeypatch: pytest.MonkeyPatch, name: str, end
):
    """These raise what is no ``Exception``."""
    monkeypatch.setenv("REMOVED_BY_A_TEST", "1")
    monkeypatch.setenv("CHANGED_BY_A_TEST", "before")
    read, write = kept()[name]
    before = read()

    def changes_and_ends() -> None:
        with restored():
            CHANGES[name]()
            end("the end")

    with pytest.raises(BaseException, match="the end") as raised:
        changes_and_ends()
    found = read()
    write(before)
    assert not isinstance(raised.value, Exception)
    assert found == before, f"{name} stays as the test has left it"


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "alarms"])
def test_what_was_otherwise_before_is_so_again(monkeypatch: pytest.MonkeyPatch, name: str):
    """The process has changed a switch, and the test changes it back to the usual value.

    Not for an alarm: one that went off is over.
    """
    monkeypatch.setenv("REMOVED_BY_A_TEST", "1")
    read, write = kept()[name]
    usual = read()
    # A change may reach other switches: FlopCounterMode is a dispatch mode that also registers
    # module hooks, and the end of the mode alone leaves them. The outer block puts back all.
    with restored():
        try:
            CHANGES[name]()
            before = read()
            with restored():
                write(usual)
                assert read() == usual
            assert read() == before, (
                f"{name} was set, and a test that took it back has taken it for good"
            )
        finally:
            write(usual)


def changes_much_and_loses_its_directory(folder: Path, fails: bool) -> None:
    """Change a switch that is put back before the working directory, and some behind it."""
    os.environ["MADE_BY_A_TEST"] = "1"
    os.umask(0o123)
    torch.set_grad_enabled(False)
    # May import Inductor, which asks for the working directory.
    torch.use_deterministic_algorithms(True, warn_only=True)
    folder.rmdir()
    if fails:
        raise KeyError("the test's own")


@pytest.mark.parametrize("fails", [False, True], ids=["passes", "raises"])
def test_one_thing_that_cannot_be_put_back_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """The test has removed the directory in which it began. Its own exception goes first."""
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = {name: read() for name, (read, _) in kept().items()}
    with restored():  # the outer block puts back what a faulty inner one leaves
        with pytest.raises(KeyError if fails else RuntimeError) as raised, restored() as changes:
            changes_much_and_loses_its_directory(folder, fails)
        found = {name: read() for name, (read, _) in kept().items()}
        os.chdir(tmp_path)
        folder.mkdir()
    words = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "the working directory cannot be put back: FileNotFoundError" in words
    assert [name for name in before if found[name] != before[name]] == ["the working directory"]
    assert changes.keys() == {"deterministic algorithms"}


def test_a_directory_that_was_gone_before_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "removed"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    with restored():
        os.chdir(tmp_path)
    assert Path.cwd() == tmp_path
