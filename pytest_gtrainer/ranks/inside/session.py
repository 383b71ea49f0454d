"""The pytest session of a rank: its plugins, its tests, and the reports that it sends.

It has the parent's options and plugins, without those that report or select.
"""

import os
import re
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer import _pytest_private as private
from pytest_gtrainer.marker import id_of
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.answers import collective_of, depth_of_collective
from pytest_gtrainer.ranks.objections import xfail_of
from pytest_gtrainer.worlds import hygiene

# These print, time out, write files or start processes: the parent does that, once.
PARENT_ONLY = (
    "terminal",
    "faulthandler",
    "junitxml",
    "pastebin",
    "stepwise",
    "timeout",
    "xdist",
    "xdist.looponfail",
    "pytest_cov",
    "rerunfailures",
    "flaky",
    "html",
    "json-report",
)
# Some plugins register objects of their own while the command line is parsed.
PARENT_ONLY_OBJECTS = ("_cov", "terminalreporter")

# What selects, stops or branches in the parent: a rank runs exactly what the parent sends.
NEUTRAL_OPTIONS: dict[str, Any] = {
    "usepdb": False,
    "maxfail": 0,
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "numprocesses": None,
    "dist": "no",
    "tx": [],
    "looponfail": False,
    "collectonly": False,
    "ignore": None,
    "ignore_glob": None,
    "setuponly": False,
    "setupshow": False,
    "setupplan": False,
    "xmlpath": None,
    "log_file": os.devnull,
    "cacheclear": False,
    "cacheshow": None,
    "pyargs": False,
}

OUTPUT_LIMIT = 64 * 1024
SUMMARY_LIMIT = 300
GPU_LIMIT = 2.0  # seconds
# gloo's words when the rank at the other end is gone.
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def start_session(
    config: pytest.Config, worker: Mapping[str, Any], basetemp: str | None
) -> pytest.Session:
    """Start a session that does not collect.

    It has ``config.workerinput``, so that plugins behave as in a worker of xdist.
    """
    for name in PARENT_ONLY:  # only now: the parser must know their options
        config.pluginmanager.consider_pluginarg(f"no:{name}")
    for name in PARENT_ONLY_OBJECTS:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    for name, value in NEUTRAL_OPTIONS.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.option.basetemp = basetemp
    config.workerinput = dict(worker)  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    session = pytest.Session.from_config(config)
    session.exitstatus = pytest.ExitCode.OK
    private.configure(config)
    for line in set(worker["gt_markers"]) - set(config.getini("markers")):
        config.addinivalue_line("markers", line)
    config.hook.pytest_sessionstart(session=session)
    if "hypothesis" in sys.modules:
        _draw_alike(sys.modules["hypothesis"], worker["testrunuid"])
    if pytest.version_tuple < (9, 1):
        config.pluginmanager.register(private.NoTerminal(), "terminalreporter")
    return session


def _draw_alike(hypothesis: Any, seed: str) -> None:
    """Let all ranks draw the same examples, and none write the shared database of examples.

    ``seed`` is for tests that are not derandomised, by ``@settings(derandomize=False)`` or a
    profile of their own.
    """
    hypothesis.settings.register_profile(
        "gtrainer-rank", derandomize=True, database=None, deadline=None
    )
    hypothesis.settings.load_profile("gtrainer-rank")
    if hypothesis.core.global_force_seed is None:  # else --hypothesis-seed
        hypothesis.core.global_force_seed = seed


def close_session(session: pytest.Session) -> tuple[str, ...]:
    """Tear down what is still set up, and let plugins finish; each step runs in any case.

    Returns what failed.
    """
    finish = session.config.hook.pytest_sessionfinish
    steps: dict[str, Callable[[], object]] = {
        "tearing down what was still set up": lambda: private.tear_down(session, None),
        "pytest_sessionfinish": lambda: finish(session=session, exitstatus=pytest.ExitCode.OK),
        "pytest_unconfigure": lambda: private.unconfigure(session.config),
    }
    problems = []
    for name, step in steps.items():
        try:
            step()
        except BaseException as error:
            shown = traceback.TracebackException.from_exception(error)
            foreign = []
            for frame in shown.stack:
                if not re.search("/pluggy/|/pytest_gtrainer/", frame.filename):
                    foreign.append(frame)
            shown.stack = traceback.StackSummary.from_list(foreign)
            text = cut("".join(shown.format()))
            problems.append(f"{name} raised {summary_of(error)}\n\n{text}".rstrip())
    if session.exitstatus != pytest.ExitCode.OK:  # a hook may say so that the run has failed
        problems.append(f"pytest_sessionfinish set the exit status {int(session.exitstatus)}")
    return tuple(problems)


class CollectionDiffers(Exception):
    """The rank does not find a test that the parent has; the message says why."""


class CollectedTests:
    """The parent's tests in this session, found by walking directories.

    pytest's own ``perform_collect``, called again, drops fixtures (pytest 9.1).
    """

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._nodes: dict[Path, list[pytest.Collector]] = {}
        self._items: dict[str, pytest.Item] = {}
        self._files: set[str] = set()
        self._failures: list[str] = []
        session.config.pluginmanager.register(self, "gtrainer-rank-collection")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._failures.append(str(report.longrepr))

    def find(self, ref: wire.ItemRef) -> pytest.Item:
        """Return the session's own item for one of the parent's.

        Raises:
            CollectionDiffers: there is none.
        """
        self.load(ref.chain)
        if ref.nodeid not in self._items:
            wrong = f"{ref.nodeid} was collected in the parent but not in this rank"
            raise CollectionDiffers(
                f"{wrong}: names and parameters of tests must be the same in every process"
            )
        return self._items[ref.nodeid]

    def load(self, chain: tuple[str, ...]) -> None:
        """Collect the test file at the end of ``chain``, once."""
        if chain[-1] in self._files:
            return
        session, root, file = self._session, Path(chain[0]), Path(chain[-1])
        private.add_initial_path(session, file)
        if root not in self._nodes:
            found = private.collectors_of(session, root)
            if not found:
                raise CollectionDiffers(f"{root} cannot be collected in this rank")
            self._nodes[root] = [found[0]]
        nodes = self._nodes[root]
        for part in chain[1:]:
            nodes = self._children(nodes[0], Path(part))
        self._failures.clear()
        items = [item for node in nodes for item in session.genitems(node)]
        if self._failures:
            raise CollectionDiffers(
                f"collecting {file.name} failed in this rank:\n{self._failures[0]}"
            )
        self._items.update((id_of(item), item) for item in items)
        session.items = items[:]
        session.config.hook.pytest_collection_modifyitems(
            session=session, config=session.config, items=session.items
        )
        self._files.add(chain[-1])

    def _children(self, node: pytest.Collector, path: Path) -> list[pytest.Collector]:
        """Return the collectors of a path: a file has two with ``--doctest-modules``."""
        if path not in self._nodes:
            node.ihook.pytest_collectstart(collector=node)
            report: pytest.CollectReport = node.ihook.pytest_make_collect_report(collector=node)
            if not report.passed:
                raise CollectionDiffers(
                    f"collecting {node.nodeid} failed in this rank:\n{report.longrepr}"
                )
            for child in report.result:
                if isinstance(child, pytest.File | pytest.Directory):
                    self._nodes.setdefault(child.path, []).append(child)
        if path not in self._nodes:
            raise CollectionDiffers(f"{path} is not collected in this rank")
        return self._nodes[path]


class Recorder:
    """Gathers reports and warnings for the parent, in plain types.

    ``send`` takes the message that must not wait; ``explain`` says what a failure may come from;
    ``check`` fails a test for what its body has done.
    """

    def __init__(
        self,
        config: pytest.Config,
        send: Callable[[wire.Raised], None],
        explain: Callable[[BaseException], str | None],
        check: Callable[[], None],
    ) -> None:
        self._config, self._send, self._explain, self._check = config, send, explain, check
        self._is_in_call = False
        self._reports: list[dict[str, Any]] = []
        self._warnings: list[wire.WarningRecord] = []
        config.pluginmanager.register(self, "gtrainer-rank-recorder")

    def take(self) -> tuple[tuple[dict[str, Any], ...], tuple[wire.WarningRecord, ...]]:
        """Return what has come since the last call: see ``wire.ItemDone``."""
        taken = tuple(self._reports), tuple(self._warnings)
        self._reports, self._warnings = [], []
        return taken

    def unreported(self) -> str:
        """Return output of the present test that the parent cannot read from this rank's files.

        This is the output of earlier phases, output that is captured in memory, and log records.
        """
        sections = list(self._reports[-1]["sections"]) if self._reports else []
        sections += private.captured_in_memory(self._config)
        return "\n".join(f"{title}:\n{cut(text).rstrip()}" for title, text in sections)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        exception = None
        if call.excinfo is not None:
            error = call.excinfo.value
            exception = raised(error)._replace(in_subtest=self._is_in_call)
            self._send(exception)
            hide_collective_frames(error)
            cause = self._explain(error)
            if cause is not None:
                # Part of the failure: a section would be left out by --show-capture=no, and of a
                # JUnit file.
                error.add_note(cause)
        report = yield
        report.gt_raised = exception  # type: ignore[attr-defined]
        report.gt_xfail = xfail_of(item)  # type: ignore[attr-defined]
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self._is_in_call = True
        try:
            result = yield from restored_after(item)
        finally:
            self._is_in_call = False
        self._check()
        wait_for_gpu()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.sections = [(title, cut(text)) for title, text in report.sections]
        self._reports.append(
            plain(
                self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            )
        )

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if when != "runtest":
            return  # the parent has given those of configuration and collection itself
        self._warnings.append(record_of_warning(warning_message, when, nodeid, location))


def record_of_warning(
    message: warnings.WarningMessage,
    when: str = "runtest",
    nodeid: str = "",
    location: tuple[str, int, str] | None = None,
) -> wire.WarningRecord:
    """Return a warning in plain types."""
    name = (message.category.__module__, message.category.__qualname__)
    place = (message.filename, message.lineno)
    return wire.WarningRecord(str(message.message), name, *place, when, nodeid, location)


def wait_for_gpu() -> None:
    """Fail a test whose last kernels have failed; otherwise the next test would be blamed.

    Waits ``GPU_LIMIT`` seconds at most, since a kernel may wait for a rank that never comes. That
    shows when the parent compares how many collectives the ranks have issued.
    """
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return
    try:
        done, end = torch.cuda.Event(), time.monotonic() + GPU_LIMIT
        done.record()
        while not done.query() and time.monotonic() < end:
            time.sleep(1e-4)
    except RuntimeError as error:
        wrong = str(error).partition("\n")[0]
        pytest.fail(
            f"a kernel that the test left running: {wrong}; CUDA_LAUNCH_BLOCKING=1 shows which",
            pytrace=False,
        )


def restored_after(item: pytest.Item) -> Generator[None, object, object]:
    """Put back what the body of a test changed in the process.

    The test is blamed for changes that decide bits.
    """
    changes: hygiene.Changes = {}
    try:
        with hygiene.restored() as changes:
            return (yield)
    finally:
        guard = item.config.pluginmanager.getplugin("gtrainer-leaks") if changes else None
        if guard is not None:
            guard.blame(item, changes)


def raised(error: BaseException) -> wire.Raised:
    """Return what the parent must know of an exception before its report is made."""
    origin = getattr(error, "gt_origin", None)
    waiting_in = collective_of(_frames_of(error))
    if waiting_in is None and any(sign in str_of(error) for sign in LOST_PEER):
        waiting_in = "a collective"
    is_skip = isinstance(error, pytest.skip.Exception)
    place = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        place.append((frame.f_code.co_filename, line))
    return wire.Raised(
        time.monotonic(),
        summary_of(error),
        is_skip,
        waiting_in,
        plain(origin) if isinstance(origin, tuple) else None,
        tuple(place),
    )


def _frames_of(error: BaseException) -> list[tuple[str, str]]:
    """Return file and function of every frame that the exception went through, innermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [(frame.f_code.co_filename, frame.f_code.co_name) for frame in reversed(frames)]


def hide_collective_frames(error: BaseException) -> None:
    """End the traceback at the call of the collective.

    To show more, pytest would parse torch's largest files, which takes 4 s.
    """
    frames, entry = _frames_of(error), error.__traceback__
    keep = len(frames) - depth_of_collective(frames)
    for _ in range(keep - 1):
        entry = entry and entry.tb_next
    if entry is not None and keep > 0:
        entry.tb_next = None


def str_of(error: BaseException) -> str:
    """Return the message, also of an exception whose ``str`` fails."""
    try:
        return str(error)
    except Exception as failure:
        return f"<str() of it raised {type(failure).__name__}>"


def summary_of(error: BaseException) -> str:
    lines = str_of(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return textwrap.shorten(text, SUMMARY_LIMIT, placeholder=" …")


def cut(text: str) -> str:
    """Return head and tail of an output that is too long to send, else all of it."""
    if len(text) <= OUTPUT_LIMIT:
        return text
    half = OUTPUT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"


def plain(value: Any) -> Any:
    """Return a value in builtin types, which the parent reads without the classes of the test.

    >>> plain({"a": (1, 2.5, None), "b": {3}, 4: b"x"})
    {'a': (1, 2.5, None), 'b': '{3}', 4: b'x'}
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, dict):
        return {plain(key): plain(content) for key, content in value.items()}
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    for builtin in (int, float, str):
        if isinstance(value, builtin):
            return builtin(value)
    return repr(value)
