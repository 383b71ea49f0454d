"""Pytest's protocol of a test by the shortest way, as long as there is nothing to tell.

Most of what pytest does around an empty test is to call, for each of three phases, a dozen hooks of its own and of
ours, which find that nothing was written, logged, marked or raised. The lane calls what they would call, looks once
whether there is anything to tell, and makes the reports of the three phases in one go. It is for tests and sessions
that it knows: where anybody else has a say (another plugin's or a conftest's hook of a phase, a mark that skips or
expects a failure, a fixture that captures), pytest's own protocol runs. And with the first thing to tell (a line of
output, a log record, an exception), it reports the phases before, and leaves the rest to pytest.

Fixtures (but for a parameter that is nothing else), ``pytest_pyfunc_call``, wrappers of ``pytest_runtest_protocol``
(warnings among them) and the hooks at the start and the end of a test are called as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import pytest
from _pytest import runner
from _pytest.capture import CaptureManager, FDCapture
from _pytest.logging import LoggingPlugin
from _pytest.python import get_direct_param_fixture_func
from _pytest.scope import Scope
from _pytest.skipping import evaluate_xfail_marks, xfailed_key
from _pytest.threadexception import collect_thread_exception, thread_exceptions
from _pytest.tmpdir import tmppath_result_key
from _pytest.unraisableexception import collect_unraisable, unraisable_exceptions

from pytest_gtrainer.leaks import LeakGuard
from pytest_gtrainer.plugin import FACTS
from pytest_gtrainer.worlds.ranks.inside import hygiene
from pytest_gtrainer.worlds.ranks.inside.lighter import Logs
from pytest_gtrainer.worlds.ranks.inside.recorder import QuietPhase, Recorder

When = Literal["setup", "call", "teardown"]

# Whose hooks of a phase the lane stands in for.
_KNOWN_PLUGINS = {
    "runner", "unittest", "skipping", "subtests", "tmpdir", "capturemanager", "logging-plugin", "lfplugin", "session",
    "threadexception", "unraisableexception", "hypothesispytest", "setuponly", "setupplan", "gtrainer",
    "gtrainer-leaks", "gtrainer-goldens", "gtrainer-inline", "gtrainer-verdicts", "gtrainer-rank-recorder",
}  # fmt: skip
# Whose hooks of a fixture do nothing for a parameter.
_KNOWN_OF_FIXTURES = {"fixtures", "setuponly", "setupplan", "gtrainer-leaks", "hypothesispytest", "unittest"}
# Whose hooks between two tests leave torch's switches alone.
_KNOWN_BETWEEN = {
    "runner", "unittest", "faulthandler", "warnings", "assertion", "logging-plugin", "threadexception",
    "unraisableexception", "gtrainer", "gtrainer-goldens", "gtrainer-inline", "gtrainer-rank-lane",
}  # fmt: skip
_HOOKS = ("setup", "call", "teardown", "makereport", "logreport")
_CONDITIONS = {"skip", "skipif", "xfail"}
_CAPTURING_FIXTURES = {"capsys", "capsysbinary", "capfd", "capfdbinary", "capteesys", "subtests"}


class FastLane:
    """Stands in for ``pytest_runtest_protocol`` of pytest's runner; registered as ``gtrainer-rank-lane``."""

    def __init__(self, config: pytest.Config, recorder: Recorder, *, shares_process: bool = False) -> None:
        self._config, self._recorder, self._shares_process = config, recorder, shares_process
        self._capture: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
        self._logging: LoggingPlugin | None = config.pluginmanager.getplugin("logging-plugin")
        self._fds = self._captured_fds()
        self._open: bool | None = None
        self.fills_parameters = False
        self.guard: LeakGuard | None = None
        self.untouched = False
        """Whether nobody's code has run since the last test ended, which could have changed torch's switches."""
        self._is_alone = False
        self.carriers: list[Any] = []

    def _captured_fds(self) -> tuple[int, ...]:
        streams = self._capture._global_capturing if self._capture is not None else None
        if streams is None or not (isinstance(streams.out, FDCapture) and isinstance(streams.err, FDCapture)):
            return ()
        return streams.out.tmpfile.fileno(), streams.err.tmpfile.fileno()

    def pytest_plugin_registered(self) -> None:
        self._open = None  # a conftest, perhaps, with hooks

    def pytest_collectstart(self) -> None:
        self.untouched = False  # a test file is imported, perhaps

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        untouched, self.untouched = self.untouched, False
        if not isinstance(item, pytest.Function) or not self._is_open() or not _is_simple(item):
            return None
        ihook = item.ihook
        ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        run = _Run(self, item, nextitem, untouched=untouched)
        run.run()
        self.untouched = self._is_alone and run.was_quiet
        ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _is_open(self) -> bool:
        """Whether this session is one that the lane knows."""
        if self._open is None:
            hooks = self._config.hook
            callers = [getattr(hooks, f"pytest_runtest_{name}") for name in _HOOKS]
            named = {each.plugin_name for caller in callers for each in caller.get_hookimpls()}
            protocols = [each for each in hooks.pytest_runtest_protocol.get_hookimpls()
                         if not each.wrapper and not each.hookwrapper]  # fmt: skip
            named |= {each.plugin_name for each in protocols if each.plugin is not self}
            is_logging = self._logging is not None and self._logging.log_level is None
            self._open = bool(self._fds) and is_logging and named <= _KNOWN_PLUGINS
            self._look_around()
        return self._open

    def _look_around(self) -> None:
        """What every test asks the plugins for, until another plugin is registered."""
        hooks, plugins = self._config.hook, self._config.pluginmanager
        callers = (hooks.pytest_fixture_setup, hooks.pytest_fixture_post_finalizer)
        named = {each.plugin_name for caller in callers for each in caller.get_hookimpls()}
        self.fills_parameters = named <= _KNOWN_OF_FIXTURES
        self.guard = plugins.getplugin("gtrainer-leaks")
        between = (hooks.pytest_runtest_protocol, hooks.pytest_runtest_logstart, hooks.pytest_runtest_logfinish)
        named = {each.plugin_name for caller in between for each in caller.get_hookimpls()}
        self._is_alone = not self._shares_process and named <= _KNOWN_BETWEEN
        self.carriers = self._recorder.carriers()


def _is_simple(item: pytest.Function) -> bool:
    """Whether a test is one that the lane knows: a plain function, with nothing that changes what a phase does."""
    if type(item) is not pytest.Function or not _CAPTURING_FIXTURES.isdisjoint(item.fixturenames):
        return False
    attributes = vars(getattr(item.obj, "__func__", item.obj))  # those of hypothesis, of mock.patch
    return attributes.keys() <= {"pytestmark"} and not _has_mark(item, _CONDITIONS)


def _has_mark(item: pytest.Item, names: set[str]) -> bool:
    node: Any = item
    while node is not None:
        for mark in node.own_markers:
            if mark.name in names:
                return True
        node = node.parent
    return False


def _has_parameters_only(item: pytest.Function) -> bool:
    """Whether a test has no fixtures but values of its own parametrisation."""
    callspec: Any = getattr(item, "callspec", None)
    if callspec is None:
        return not item.fixturenames
    for name in item.fixturenames:
        if callspec._arg2scope.get(name) is not Scope.Function:
            return False
        if item._fixtureinfo.name2fixturedefs[name][-1].func is not get_direct_param_fixture_func:
            return False  # indirect
    return True


class _Run:
    """A test on the lane."""

    def __init__(
        self, lane: FastLane, item: pytest.Function, nextitem: pytest.Item | None, *, untouched: bool
    ) -> None:
        self.lane, self.item, self.nextitem, self.untouched = lane, item, nextitem, untouched
        self.recorder, self.fds, self.guard = lane._recorder, lane._fds, lane.guard
        assert lane._capture is not None
        assert lane._logging is not None
        self.capture = lane._capture
        self.logs = Logs(lane._logging, item)
        self.has_fixtures = not _has_parameters_only(item)
        # nobody's code runs before the body of a test without fixtures, whose file is set up already
        is_plain = not self.has_fixtures and (lane.fills_parameters or not item.fixturenames)
        self.is_bare = is_plain and item.parent in item.session._setupstate.stack
        self.untold: list[QuietPhase] = []
        self.keywords: dict[str, Literal[1]] = {}
        self.marks = 0
        self.on_lane = self.was_quiet = False

    def run(self) -> None:
        item = self.item
        if not item._request:
            item._initrequest()
        self.recorder.before_a_report = self._tell_of_the_phases_before
        try:
            self._enter()
            if self._setup():
                self._phase("call", self._call)
            if item.session.shouldfail or item.session.shouldstop:
                self.nextitem = None
            self._phase("teardown", self._teardown, nextitem=self.nextitem)
            self.was_quiet = self.on_lane
            if self.on_lane:
                self.recorder.add_passed(item, self.untold)
        finally:
            self._leave()
            self.recorder.before_a_report = None
            item._request = False  # type: ignore[assignment]
            item.funcargs = None  # type: ignore[assignment]

    # --- the phases ---------------------------------------------------------------------------

    def _setup(self) -> bool:
        """Whether it passed."""
        report = self._phase("setup", self._set_up)
        return report is None or report.passed

    def _set_up(self) -> None:
        if self.guard is not None:
            self.guard.begin(untouched=self.untouched)
        if not self.has_fixtures and self.lane.fills_parameters and self.item.fixturenames:
            # as fixtures they would take a tenth of the test
            self.item.funcargs.update((name, self.item.callspec.params[name]) for name in self.item.fixturenames)
        if self.is_bare:
            self.item.session._setupstate.setup(self.item)  # as below, without the variable PYTEST_CURRENT_TEST
        else:
            runner.pytest_runtest_setup(self.item)
        self._collect_exceptions()

    def _call(self) -> None:
        before = hygiene.Snapshot()
        try:
            runner.pytest_runtest_call(self.item)
            self._collect_exceptions()
        finally:
            self.recorder.undo(self.item, before)

    def _teardown(self) -> None:
        if self._ends_bare():
            self.item.session._setupstate.teardown_exact(self.nextitem)
            os.environ.pop("PYTEST_CURRENT_TEST", None)
        else:
            runner.pytest_runtest_teardown(self.item, self.nextitem)
        self._collect_exceptions()
        if self.guard is not None:
            self.guard.end(self.item)

    def _ends_bare(self) -> bool:
        """Whether nobody's code runs after its body, either: no fixture of other tests ends here, and no finalizer."""
        if not self.is_bare or self.nextitem is None or self.nextitem.parent is not self.item.parent:
            return False
        finalizers, _ = self.item.session._setupstate.stack[self.item]
        return len(finalizers) == 1  # the test's own, which does nothing

    def _collect_exceptions(self) -> None:
        """Of threads and of ``__del__``: as warnings."""
        config = self.item.config
        if config.stash.get(thread_exceptions, None):
            collect_thread_exception(config)
        if config.stash.get(unraisable_exceptions, None):
            collect_unraisable(config)

    def _phase(self, when: When, body: Callable[[], None], **more: Any) -> pytest.TestReport | None:
        """Run a phase; its report, None if there is nothing to tell yet."""
        if not self.on_lane:
            return runner.call_and_report(self.item, when, **more)
        if when == "setup" or self.has_fixtures:  # which may have silenced a logger for the root's handlers
            self.logs.attach()
        self.logs.begin(when, apart=when == "setup" or self.has_fixtures)  # on the lane nothing has been logged since
        is_silent = self.is_bare if when == "setup" else when == "teardown" and self._ends_bare()
        call = pytest.CallInfo.from_call(body, when)
        if (is_silent and call.excinfo is None) or self._has_nothing_to_tell(call):
            self.untold.append(self._quiet(call))
            return None
        return self._report(call)

    # --- on the lane, and off it -------------------------------------------------------------------

    def _enter(self) -> None:
        self.capture.resume_global_capture()
        self.on_lane = True

    def _leave(self) -> None:
        if self.on_lane:
            self.on_lane = False
            self.logs.detach()
            self.capture.suspend_global_capture(in_=False)

    def _has_nothing_to_tell(self, call: pytest.CallInfo[None]) -> bool:
        item = self.item
        return (
            call.excinfo is None
            and not os.fstat(self.fds[0]).st_size
            and not os.fstat(self.fds[1]).st_size
            and not self.logs.written()
            and not item._report_sections
            and not item.user_properties
            and not any(each.has_untold() for each in self.lane.carriers)
            and self.capture._capture_fixture is None
            and not _has_mark(item, {"xfail"})
        )

    def _quiet(self, call: pytest.CallInfo[None]) -> QuietPhase:
        item = self.item
        item.stash.setdefault(tmppath_result_key, {})[call.when] = True
        sink = item.stash[FACTS]
        told = sink[:]
        sink.clear()
        return QuietPhase(call, self._keywords(), told)

    def _keywords(self) -> dict[str, Literal[1]]:
        """Those of the report: names of nodes and marks, of which a phase can only add some."""
        known, node = 0, self.item  # type: int, Any
        while node is not None:
            known += len(node.keywords._markers)
            node = node.parent
        if known != self.marks:
            self.marks, self.keywords = known, dict.fromkeys(self.item.keywords, 1)
        return self.keywords

    def _report(self, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Tell of a phase, and of those before it; from here on pytest takes over."""
        item = self.item
        self._tell_of_the_phases_before()
        self.capture.deactivate_fixture()
        self.capture.suspend_global_capture(in_=False)
        for name, text in zip(("stdout", "stderr"), self.capture.read_global_capture(), strict=True):
            item.add_report_section(call.when, name, text)
        item.add_report_section(call.when, "log", self.logs.written())
        self.logs.detach()
        self.on_lane = False
        if call.when == "teardown":
            self.logs.forget()
        if call.excinfo is not None and isinstance(call.excinfo.value, runner.get_reraise_exceptions(item.config)):
            raise call.excinfo.value
        if call.when == "call" and _has_mark(item, {"xfail"}):
            item.stash[xfailed_key] = evaluate_xfail_marks(item)
        ihook = item.ihook
        report: pytest.TestReport = ihook.pytest_runtest_makereport(item=item, call=call)
        ihook.pytest_runtest_logreport(report=report)
        if runner.check_interactive_exception(call, report):
            ihook.pytest_exception_interact(node=item, call=call, report=report)
        return report

    def _tell_of_the_phases_before(self) -> None:
        untold, self.untold = self.untold, []
        for phase in untold:
            report: Any = pytest.TestReport.from_item_and_call(self.item, phase.call)
            report.sections, report.user_properties = [], []
            report.keywords, report.gt_facts = dict(phase.keywords), phase.facts
            self.item.ihook.pytest_runtest_logreport(report=report)
