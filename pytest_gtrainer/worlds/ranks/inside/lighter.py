"""What pytest does around every phase of a test, at less cost and with the same result.

In a rank an empty test is nothing but this, and a world of eight runs it eight times. Two parts of it are dear:
the logging plugin looks twice a phase through all loggers (torch makes 270) for those that do not propagate, and
capturing rewinds, reads and truncates files in which nothing was written.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
from _pytest.capture import CaptureManager, FDCaptureBase
from _pytest.logging import LoggingPlugin, caplog_handler_key, caplog_records_key


def lighten(config: pytest.Config) -> None:
    """Put the cheaper parts into a session that has been configured."""
    capture: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
    streams = capture._global_capturing if capture is not None else None
    for stream in (streams.out, streams.err) if streams is not None else ():
        if isinstance(stream, FDCaptureBase):
            stream.snap = _reading_if_written(stream)  # type: ignore[method-assign]
    plugin: LoggingPlugin | None = config.pluginmanager.getplugin("logging-plugin")
    if plugin is not None and plugin.log_level is None:  # else pytest sets the root logger's level, too
        plugin._runtest_for = functools.partial(_LogsOfPhase, plugin)  # type: ignore[method-assign, assignment]


def _reading_if_written(stream: FDCaptureBase[str]) -> Callable[[], str]:
    read, fd = stream.snap, stream.tmpfile.fileno()
    return lambda: read() if os.fstat(fd).st_size else stream.EMPTY_BUFFER


class Logs:
    """``LoggingPlugin._runtest_for`` in parts: log records go to the fixture ``caplog`` and to the report."""

    __slots__ = ("_caplog", "_item", "_loggers", "_report")

    def __init__(self, plugin: LoggingPlugin, item: pytest.Item) -> None:
        self._caplog, self._report, self._item = plugin.caplog_handler, plugin.report_handler, item
        self._loggers: list[logging.Logger] = []

    def attach(self) -> None:
        """Listen to the loggers, those included that have stopped to propagate since the last call."""
        self._loggers = [logging.root, *_not_propagating()]
        for logger in self._loggers:
            logger.addHandler(self._caplog)
            logger.addHandler(self._report)

    def begin(self, when: str) -> None:
        """Keep the records of a phase apart from those before."""
        self._caplog.reset()
        self._report.reset()
        stash = self._item.stash
        stash.setdefault(caplog_records_key, {})[when] = self._caplog.records
        stash[caplog_handler_key] = self._caplog

    def written(self) -> str:
        """What was logged in this phase."""
        return self._report.stream.getvalue().strip()

    def detach(self) -> None:
        """Listen no more."""
        for logger in self._loggers:
            logger.removeHandler(self._report)
            logger.removeHandler(self._caplog)
        self._loggers = []

    def forget(self) -> None:
        """Drop the records, when the test is over."""
        del self._item.stash[caplog_records_key]
        del self._item.stash[caplog_handler_key]


class _LogsOfPhase(Logs):
    """``LoggingPlugin._runtest_for``."""

    __slots__ = ("_when",)

    def __init__(self, plugin: LoggingPlugin, item: pytest.Item, when: str) -> None:
        super().__init__(plugin, item)
        self._when = when

    def __enter__(self) -> None:
        self.attach()
        self.begin(self._when)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._item.add_report_section(self._when, "log", self.written())
        self.detach()


def _not_propagating() -> list[logging.Logger]:
    """The loggers whose records the root logger does not see."""
    known: Any = logging.root.manager.loggerDict.values()
    return [each for each in known if type(each) is not logging.PlaceHolder and not each.propagate]
