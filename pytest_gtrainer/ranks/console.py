"""The terminal of the pytest process: lines for whoever waits, and a rank that is debugged has it for itself."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from pytest_gtrainer import options
from pytest_gtrainer._pytest_private import capture_manager
from pytest_gtrainer.ranks import wire


@contextlib.contextmanager
def stopped_clock() -> Iterator[None]:
    """Stop the clock of a time limit by SIGALRM meanwhile: pytest-timeout's, where a thread does not keep it."""
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def tell(config: pytest.Config, text: str) -> None:
    """Write a line to the terminal of this process, if it has one: a worker of xdist has not."""
    reporter: pytest.TerminalReporter | None = config.pluginmanager.getplugin("terminalreporter")
    capture = capture_manager(config)
    if reporter is None:
        return
    # a test that calls functions on ranks is being captured meanwhile
    with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
        reporter.ensure_newline()
        reporter.write_line(f"gtrainer: {text}")


class Console:
    """The terminal while one test, the ``holder``, is on ranks.

    Attributes:
        post_mortem: a rank that fails will ask for it.
    """

    def __init__(self, config: pytest.Config, holder: str) -> None:
        self.config, self.holder, self.post_mortem = config, holder, config.getoption("usepdb")
        self._has_lent = False

    def tell(self, text: str) -> None:
        tell(self.config, f"{self.holder} {text}")

    def lend(self, rank: int, prompt: wire.AtPrompt) -> wire.Terminal:
        """The terminal for a rank; nothing if another rank is to be debugged, or has failed before."""
        chosen, capture = options.get(self.config, "pdb-rank"), capture_manager(self.config)
        if (chosen is not None and chosen != rank) or (prompt.failure is not None and self._has_lent):
            return wire.Terminal()
        self._has_lent |= prompt.failure is not None
        try:
            with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
                path = os.ttyname(1)  # stdin stays captured
        except OSError:
            if prompt.failure is not None:
                self.tell(f"has failed on rank {rank}: --pdb has no terminal here")
                return wire.Terminal()
            way = "run it with -n0" if hasattr(self.config, "workerinput") else "run it from a terminal"
            advice = f"{way}: pytest {self.holder}"
            return wire.Terminal(refusal=f"rank {rank} is at a breakpoint, and its pytest has no terminal; {advice}")
        self.tell(f"is held, with its clock: rank {rank} has the terminal")
        with open(path, "w") as terminal:
            terminal.write(f"{prompt.failure or ''}\n")
        return wire.Terminal(path)
