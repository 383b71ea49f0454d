"""A line for who watches the terminal while a test on ranks takes long, or waits for devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from pytest_gtrainer._pytest_private import capture_manager

EVERY_SECONDS = 60.0

Tell = Callable[[str], None]


def teller(config: pytest.Config) -> Tell:
    """Writes lines to the terminal of this process; does nothing where there is none, as in a worker of xdist."""

    def tell(text: str) -> None:
        reporter: pytest.TerminalReporter | None = config.pluginmanager.getplugin("terminalreporter")
        capture = capture_manager(config)
        if reporter is None:
            return
        # a test that calls functions on ranks is being captured meanwhile
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            reporter.ensure_newline()
            reporter.write_line(f"gtrainer: {text}")

    return tell
