"""Lines of long work on the terminal, also while the output of a test is captured.

Only where a person looks: a terminal, not a file or a pipe, and not in a worker or rank. The line goes to a copy of
the terminal's file descriptor, so that nothing is captured or has to stop capturing, and ends before the next one.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

import pytest

from pytest_gtrainer import facts


def show_on_terminal(config: pytest.Config) -> None:
    """From now on write what is told on ``progress`` to the terminal, if there is one; output is not captured yet."""
    reporter: pytest.TerminalReporter | None = config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or not reporter.isatty or hasattr(config, "workerinput"):
        return
    terminal = os.dup(sys.stdout.fileno())

    def write(text: str) -> None:
        os.write(terminal, f"\ngtrainer: {text}\n".encode())

    with ExitStack() as stack:
        stack.callback(os.close, terminal)
        stack.enter_context(facts.watching({"progress": write}))
        config.add_cleanup(stack.pop_all().close)
