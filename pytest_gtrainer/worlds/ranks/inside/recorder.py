"""Gathers what a test gives in a rank (reports, warnings) for the parent, in plain types."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

import pytest

from pytest_gtrainer.worlds.ranks import wire
from pytest_gtrainer.worlds.ranks.inside import hygiene
from pytest_gtrainer.worlds.ranks.stacks import distributed_call

OUTPUT_LIMIT = 64 * 1024
SUMMARY_LIMIT = 300


class Recorder:
    """Hooks of a rank's session. ``send`` takes the message that must not wait."""

    def __init__(self, config: pytest.Config, send: Callable[[wire.Raised], None]) -> None:
        self._config = config
        self._send = send
        self._reports: list[dict[str, Any]] = []
        self._warnings: list[wire.WarningRecord] = []

    def take(self) -> tuple[tuple[dict[str, Any], ...], tuple[wire.WarningRecord, ...]]:
        """The reports and warnings since the last call."""
        taken = tuple(self._reports), tuple(self._warnings)
        self._reports, self._warnings = [], []
        return taken

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.excinfo is not None:
            self._send(raised(call.when, call.excinfo))
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        with hygiene.restored():
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.sections = [(title, cut(text)) for title, text in report.sections]
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(plain(data))

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if when != "runtest":
            return  # the parent has given those of configuration and collection itself
        category = warning_message.category
        self._warnings.append(
            wire.WarningRecord(
                str(warning_message.message),
                (category.__module__, category.__qualname__),
                warning_message.filename,
                warning_message.lineno,
                when,
                nodeid,
                location,
            )
        )


def raised(when: str, excinfo: pytest.ExceptionInfo[BaseException]) -> wire.Raised:
    """What the parent must know of an exception before its report is made."""
    frames = [(frame.filename, frame.name) for frame in reversed(traceback.extract_tb(excinfo.tb))]
    origin = getattr(excinfo.value, "gt_origin", None)
    return wire.Raised(
        time=time.monotonic(),
        when=when,
        summary=summary_of(excinfo.value),
        is_skip=isinstance(excinfo.value, pytest.skip.Exception),
        waiting_in=distributed_call(frames),
        origin=plain(origin) if isinstance(origin, tuple) else None,
    )


def summary_of(error: BaseException) -> str:
    """Type and first line of the message; an exception whose ``str`` fails is named all the same."""
    try:
        lines = str(error).strip().splitlines()
    except Exception as failure:
        lines = [f"<str() of it raised {type(failure).__name__}>"]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:SUMMARY_LIMIT]


def cut(text: str) -> str:
    """Head and tail of an output too long to send.

    >>> cut("short")
    'short'
    """
    if len(text) <= OUTPUT_LIMIT:
        return text
    half = OUTPUT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"


def plain(value: Any) -> Any:
    """Only builtin types, so that the parent can read it without the classes of the test.

    >>> plain({"a": (1, 2.5, None), "b": {3}, 4: b"x"})
    {'a': (1, 2.5, None), 'b': '{3}', 4: b'x'}
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, dict):
        return {plain(key): plain(content) for key, content in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(content) for content in value)
    if isinstance(value, list):
        return [plain(content) for content in value]
    for builtin in (bool, int, float, str):
        if isinstance(value, builtin):
            return builtin(value)
    return repr(value)
