"""What pytest does around every phase of a test, at less cost and with the same result.

In a rank an empty test is nothing but this, and a world of eight runs it eight times. Three parts of it are dear:
the logging plugin looks twice a phase through all loggers (torch makes 270) for those that do not propagate,
capturing rewinds, reads and truncates files in which nothing was written, and filters of warnings are parsed anew.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest
from _pytest.capture import CaptureManager, FDCaptureBase
from _pytest.logging import LoggingPlugin, caplog_handler_key, caplog_records_key

_Logger = logging.Logger  # whatever a fixture puts in its place


def lighten(config: pytest.Config) -> None:
    """Put the cheaper parts into a session that has been configured."""
    capture: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
    streams = capture._global_capturing if capture is not None else None
    for stream in (streams.out, streams.err) if streams is not None else ():
        if isinstance(stream, FDCaptureBase):
            stream.snap = _reading_if_written(stream)  # type: ignore[method-assign]
    # without the flag there is one list of filters; pytest 9.0 has no such method
    if not getattr(sys.flags, "context_aware_warnings", False) and hasattr(config, "_catch_configured_warnings"):
        config._catch_configured_warnings = _with_known_filters(config)  # type: ignore[method-assign]
    plugin: LoggingPlugin | None = config.pluginmanager.getplugin("logging-plugin")
    _not_propagating.watch()
    if plugin is not None and plugin.log_level is None:  # else pytest sets the root logger's level, too
        plugin._runtest_for = functools.partial(_LogsOfPhase, plugin)  # type: ignore[method-assign, assignment]


def _with_known_filters(config: pytest.Config) -> Callable[..., Any]:
    """``Config._catch_configured_warnings``, which parses the same filters for every test."""
    in_full = config._catch_configured_warnings
    made_from: list[Any] = []
    made: list[Any] = []

    @contextmanager
    def caught(*, record: bool) -> Iterator[list[warnings.WarningMessage] | None]:
        source = [warnings.filters[:], config.getini("filterwarnings")[:], sys.warnoptions[:]]
        if source != made_from:
            with in_full(record=record):
                made_from[:], made[:] = source, warnings.filters
        with warnings.catch_warnings(record=record) as log:
            warnings.filters[:] = made  # type: ignore[index]
            yield log

    return caught


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

    def begin(self, when: str, *, apart: bool = True) -> None:
        """Keep the records of a phase apart from those before, unless it is known that there are none."""
        if apart:
            self._caplog.reset()
            self._report.reset()
        stash = self._item.stash
        stash.setdefault(caplog_records_key, {})[when] = self._caplog.records
        stash[caplog_handler_key] = self._caplog

    def written(self) -> str:
        """What was logged in this phase."""
        stream = self._report.stream
        return stream.getvalue().strip() if stream.tell() else ""

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


class _NotPropagating:
    """The loggers whose records the root logger does not see.

    To look through all of them took 5 % of an empty test: it is done again once ``propagate`` of any has been set,
    which a new one does, too. Those whose class has its own way to set it are looked at every time.
    """

    def __init__(self) -> None:
        self._found: list[logging.Logger] | None = None
        self._unwatched: list[logging.Logger] = []
        self._known = 0
        self._is_watching = False

    def watch(self) -> None:
        """Notice, from now on, when a logger is told to propagate or not."""
        if self._is_watching:
            return
        self._is_watching, set_attribute = True, logging.Logger.__setattr__

        def noticing(logger: logging.Logger, name: str, value: Any) -> None:
            set_attribute(logger, name, value)
            if name == "propagate":
                self._found = None

        logging.Logger.__setattr__ = noticing  # type: ignore[method-assign, assignment]

    def __call__(self) -> list[logging.Logger]:
        known = logging.root.manager.loggerDict
        if self._found is None or self._known != len(known):
            self._known = len(known)
            loggers = [each for each in known.values() if isinstance(each, _Logger)]
            self._unwatched = [each for each in loggers if not _is_watched(type(each))]
            self._found = [each for each in loggers if _is_watched(type(each)) and not each.propagate]
        # a mock of a logger may have no such attribute
        return self._found + [each for each in self._unwatched if not getattr(each, "propagate", True)]


def _is_watched(kind: type) -> bool:
    return kind.__setattr__ is _Logger.__setattr__ and not hasattr(kind, "propagate")


_not_propagating = _NotPropagating()
