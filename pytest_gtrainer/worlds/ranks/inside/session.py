"""The pytest session of a rank: the parent's options and plugins, without those that report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from pytest_gtrainer._pytest_private import (
    NoTerminal,
    captured_streams,
    configure,
    prepared_config,
    tear_down,
    unconfigure,
)
from pytest_gtrainer.worlds.ranks import wire
from pytest_gtrainer.worlds.trace_log import let_torch_loggers_propagate

# These print, time out, write files or start processes: the parent does that, once.
PARENT_ONLY = (
    "terminal", "faulthandler", "junitxml", "pastebin", "stepwise", "timeout",
    "xdist", "xdist.looponfail", "pytest_cov", "rerunfailures", "flaky", "html", "json-report",
)  # fmt: skip
# Some plugins register objects of their own while the command line is parsed.
PARENT_ONLY_OBJECTS = ("_cov", "terminalreporter")

# What selects, stops or branches in the parent: a rank runs exactly what it is told to.
NEUTRAL_OPTIONS: dict[str, Any] = {
    "usepdb": False, "trace": False, "maxfail": 0, "keyword": "", "markexpr": "", "deselect": None,
    "lf": False, "failedfirst": False, "newfirst": False, "stepwise": False, "numprocesses": None,
    "dist": "no", "tx": [], "looponfail": False, "collectonly": False, "ignore": None,
    "ignore_glob": None, "setuponly": False, "setupshow": False, "setupplan": False,
    "xmlpath": None, "log_file": os.devnull, "cacheclear": False, "cacheshow": None, "pyargs": False,
}  # fmt: skip


def make_session(setup: wire.RankSetup) -> pytest.Session:
    """Configure pytest as the parent is, and start a session without collecting."""
    return start_session(prepared_config(setup.args), setup.worker, setup.basetemp)


def start_session(config: pytest.Config, worker: Mapping[str, Any], basetemp: str | None) -> pytest.Session:
    """Start a session that does not collect, on a command line that has been parsed.

    Args:
        worker: the content of ``config.workerinput``; with it plugins behave as in a worker of xdist.
        basetemp: for temporary files; None leaves it to pytest.
    """
    _make_silent(config)
    config.option.basetemp = basetemp
    config.workerinput = dict(worker)  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    session = pytest.Session.from_config(config)
    session.exitstatus = pytest.ExitCode.OK
    configure(config)
    for line in set(worker.get("gt_markers", ())) - set(config.getini("markers")):
        config.addinivalue_line("markers", line)
    let_torch_loggers_propagate()
    config.hook.pytest_sessionstart(session=session)
    _calm_hypothesis()
    if pytest.version_tuple < (9, 1):
        config.pluginmanager.register(NoTerminal(), "terminalreporter")
    return session


def _make_silent(config: pytest.Config) -> None:
    """Take away what reports, selects, stops or branches."""
    for name in PARENT_ONLY:  # only now: the parser must know their options
        config.pluginmanager.consider_pluginarg(f"no:{name}")
    for name in PARENT_ONLY_OBJECTS:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    for name, value in NEUTRAL_OPTIONS.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)


def _calm_hypothesis() -> None:
    """All ranks must draw the same examples, and none may write the shared database."""
    hypothesis = sys.modules.get("hypothesis")
    if hypothesis is not None:
        hypothesis.settings.register_profile("gtrainer-rank", derandomize=True, database=None, deadline=None)
        hypothesis.settings.load_profile("gtrainer-rank")


def capture_fds(config: pytest.Config) -> tuple[int, ...]:
    """The files that hold captured stdout and stderr; the parent reads them when a rank dies."""
    files = (getattr(stream, "tmpfile", None) for stream in captured_streams(config))
    return tuple(fd for file in files if (fd := _fileno(file)) is not None)


def _fileno(file: Any) -> int | None:
    try:
        return int(file.fileno())
    except (OSError, AttributeError):  # captured in memory (--capture=sys)
        return None


def close_session(session: pytest.Session) -> None:
    """Tear down what is still set up, and let plugins finish."""
    tear_down(session, None)
    session.config.hook.pytest_sessionfinish(session=session, exitstatus=pytest.ExitCode.OK)
    unconfigure(session.config)
