"""Call a pass that may loop, eat memory, fork, print, or change settings of the process.

A pass of a user runs in the process of the command. What it does there must not end the run, and
must not change what later graphs run with.
"""

import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.modes import MODES, spell_mode
from pytest_gtrainer._torch.random_states import random_state, random_states_kept
from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.passes.graph_pass import Pass

MEMORY = 2**34
"""Bytes of address space that a pass may take in addition to those that the process has."""

_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    **MODES,
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the working directory": (os.getcwd, os.chdir),
}
"""Functions that read a setting and put it back, by name."""


class _TimeIsOver(BaseException):
    """A pass has run too long. It is no ``Exception``, which the pass might catch."""


def guarded(a_pass: Pass, seconds: float, note: Callable[[str], None]) -> Pass:
    """Return a pass that ends in time and leaves the process as it was.

    What it prints goes to standard error, because the output of a command may be a graph.

    Args:
        a_pass: any pass.
        seconds: the limit of one call.
        note: called with a line for each setting that the pass changes, once for each line.

    Raises, when the pass is called:
        TimeoutError: it runs longer. Code that does not return to Python is not interrupted.
        MemoryError: it takes more than ``MEMORY``; for a tensor torch raises a RuntimeError.
        ChildProcessError: it forks, and the child comes back from the pass, too.
    """
    noted: set[str] = set()
    # Shared with children, which have no other way to say that they came back.
    child_came_back = mmap.mmap(-1, 1)

    def run(gm: fx.GraphModule, inputs: Any) -> Any:
        """Run the pass under all guards, and end a child that it forks."""
        process = os.getpid()
        try:
            with (
                redirect_stdout(sys.stderr),
                random_states_kept(),
                _settings_kept(noted, note),
                _bounded_memory(),
                _bounded_time(seconds),
            ):
                result = a_pass(gm, inputs)
        except _TimeIsOver:
            raise TimeoutError(f"the pass has not ended after {seconds:g} s") from None
        finally:
            if os.getpid() != process:
                # The child would go on as a second fuzzer and write the same files.
                child_came_back[0] = 1
                os._exit(1)

        if child_came_back[0]:
            child_came_back[0] = 0
            raise ChildProcessError("the pass forks, and its child returns from the pass, too")
        return result

    return run


@contextmanager
def _bounded_time(seconds: float) -> Iterator[None]:
    """Raise ``_TimeIsOver`` inside of the block after so many seconds."""

    def end(signal_number: int, frame: object) -> None:
        raise _TimeIsOver

    before = signal.signal(signal.SIGALRM, end)
    # A bare except in the pass catches even this, so it is raised again each second.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Bound the address space of the process, on systems that say how large it is."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        yield
        return

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + MEMORY
    for present in (soft, hard):
        if present != resource.RLIM_INFINITY:
            limit = min(limit, present)

    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _settings_kept(noted: set[str], note: Callable[[str], None]) -> Iterator[None]:
    """Put settings back, and name them; name random states, and switches that stay changed."""

    def note_once(line: str) -> None:
        if line not in noted:
            noted.add(line)
            note(line)

    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    switches, drawn = knobs.values(), random_state()
    try:
        yield
    finally:
        for name, (read, put_back) in _SETTINGS.items():
            now = read()
            if now != before[name]:
                put_back(before[name])
                note_once(f"the pass changes {name} to {spell_mode(now)}, which is put back")

        # Under a mode that the pass has left, states could not be compared.
        for name, state in random_state().items():
            if name in drawn and not torch.equal(state, drawn[name]):
                note_once(f"the pass changes the random state of {name}, which is put back")

        for name, value in knobs.values().items():
            # A module that the pass imports brings its switches with it.
            if value != switches[name] and knobs.NOT_LOADED not in (value, switches[name]):
                note_once(f"the pass changes {name} to {value}: later graphs run with it")
