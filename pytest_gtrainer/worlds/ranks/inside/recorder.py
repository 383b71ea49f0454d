"""Gathers what a test gives in a rank (reports, warnings) for the parent, in plain types."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any

import pytest

from pytest_gtrainer.worlds.ranks import wire
from pytest_gtrainer.worlds.ranks.inside import hygiene
from pytest_gtrainer.worlds.ranks.stacks import collective_of, depth_of_collective

OUTPUT_LIMIT = 64 * 1024
SUMMARY_LIMIT = 300
# gloo's words when the rank at the other end is gone.
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class Recorder:
    """Hooks of a rank's session. ``send`` takes the message that must not wait."""

    def __init__(self, config: pytest.Config, send: Callable[[wire.Raised], None]) -> None:
        self._config = config
        self._send = send
        self._reports: list[dict[str, Any]] = []
        self._times: list[tuple[float, ...]] = []
        self._warnings: list[wire.WarningRecord] = []

    def take(
        self,
    ) -> tuple[tuple[dict[str, Any], ...], tuple[tuple[float, ...], ...], tuple[wire.WarningRecord, ...]]:
        """The reports (see ``wire.ItemDone``), their times, and the warnings since the last call."""
        taken = tuple(self._reports), tuple(self._times), tuple(self._warnings)
        self._reports, self._times, self._warnings = [], [], []
        return taken

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.excinfo is not None:
            self._send(raised(call.when, call.excinfo))
            hide_collective_frames(call.excinfo.value)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Put back what the body of a test changed in the process, and blame the test for what decides bits."""
        changes: hygiene.Changes = {}
        try:
            with hygiene.restored() as changes:
                return (yield)
        finally:
            guard = self._config.pluginmanager.getplugin("gtrainer-leaks") if changes else None
            if guard is not None:
                guard.blame(item, changes)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.sections = [(title, cut(text)) for title, text in report.sections]
        data = plain(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
        self._times.append(tuple(data.pop(name) for name in wire.TIMES))
        self._reports.append(data)

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
    error = excinfo.value
    origin = getattr(error, "gt_origin", None)
    waiting_in = collective_of(frames_of(error))
    if waiting_in is None and any(sign in str_of(error) for sign in LOST_PEER):
        waiting_in = "a collective"
    return wire.Raised(
        time=time.monotonic(),
        when=when,
        summary=summary_of(error),
        is_skip=isinstance(error, pytest.skip.Exception),
        waiting_in=waiting_in,
        origin=plain(origin) if isinstance(origin, tuple) else None,
    )


def frames_of(error: BaseException) -> list[tuple[str, str]]:
    """File and function of every frame that the exception went through, innermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [(frame.f_code.co_filename, frame.f_code.co_name) for frame in reversed(frames)]


def hide_collective_frames(error: BaseException) -> None:
    """End the traceback at the call of the collective.

    The frames below say nothing more, and to show them pytest parses torch's largest files:
    4 s of CPU time in every rank.
    """
    entries = list(_entries(error.__traceback__))
    keep = len(entries) - depth_of_collective(frames_of(error))
    if 0 < keep < len(entries):
        entries[keep - 1].tb_next = None


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def str_of(error: BaseException) -> str:
    """The message, also of an exception whose ``str`` fails."""
    try:
        return str(error)
    except Exception as failure:
        return f"<str() of it raised {type(failure).__name__}>"


def summary_of(error: BaseException) -> str:
    """Type and first line of the message."""
    lines = str_of(error).strip().splitlines()
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
