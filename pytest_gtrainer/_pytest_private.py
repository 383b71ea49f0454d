"""Private names of pytest: the session of a rank.

- ``_prepareconfig`` parses a command line and loads plugins and conftest files;
  ``Config._do_configure`` and ``_ensure_unconfigure`` are what ``pytest.main`` does with the result
  before and after a session.
- ``Session._setupstate`` is the stack of what is set up; ``teardown_exact(item)`` ends what
  ``item`` does not need.
- ``Session._initialpaths`` are the files to collect from, and ``Session._collect_path`` makes the
  node of a path: collecting a second time by ``perform_collect`` drops fixtures of conftest files
  (pytest 9.1 and later).
- ``Config.get_terminal_writer`` of pytest 9.0 reads ``_tw`` of the plugin "terminalreporter", which
  a rank has not.
- ``Function._fixtureinfo`` knows the scopes of a test's fixtures; ``fixturenames`` is the order of
  their set-up.
- ``CaptureManager._global_capturing`` holds the files of captured output.
- ``xfailed_key`` is where pytest keeps the xfail mark that holds for a test, marks added while it
  runs included.
- The plugin "logging-plugin" keeps the records of a phase in ``report_handler.stream``.
- ``pytest.raises`` fills ``ExceptionInfo._excinfo`` where its block catches an exception;
  unittest's ``assertRaises`` then has an attribute ``exception``.
- ``Config._tmp_path_factory`` makes the folders of this run, also before the first test asks for
  one.

``python -m pytest_gtrainer doctor`` reads this file as it reads the topics of
``pytest_gtrainer._torch``.
"""

import gc
import io
import logging
import unittest
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest._io import TerminalWriter
from _pytest.capture import CaptureManager
from _pytest.config import _prepareconfig
from _pytest.skipping import xfailed_key

ATTRIBUTES = {
    "_pytest.config:Config": ("_do_configure", "_ensure_unconfigure"),
    "_pytest.tmpdir:pytest_configure": ("_tmp_path_factory",),
    "_pytest.main:Session": ("_setupstate", "_initialpaths", "_collect_path"),
    "_pytest.python:Function": ("_fixtureinfo",),
    "_pytest.runner:SetupState": ("teardown_exact",),
    "_pytest.capture:CaptureManager": ("_global_capturing",),
    "_pytest.raises:ExceptionInfo": ("_excinfo",),
}

# The class that assertRaises gives has no public name.
_EXPECTATIONS = (pytest.ExceptionInfo, type(unittest.TestCase().assertRaises(Exception)))  # noqa: PT027


# The forkserver has imported plugins before their session exists. Under ``-W error`` that would end
# every rank; the parent's own session gives the warning where it is due.
_IMPORTED_BEFORE = "-Wignore:Module already imported:pytest.PytestAssertRewriteWarning"


def prepared_config(args: Sequence[str]) -> pytest.Config:
    """Parse the command line of the parent again in a rank."""
    options = list(args)
    end = options.index("--") if "--" in options else len(options)
    options.insert(end, _IMPORTED_BEFORE)  # the last filter wins
    return _prepareconfig(options)


def configure(config: pytest.Config) -> None:
    config._do_configure()


def unconfigure(config: pytest.Config) -> None:
    config._ensure_unconfigure()


def tear_down(session: pytest.Session, next_item: pytest.Item | None) -> None:
    """End everything that is set up and that ``next_item`` does not need; all of it for None."""
    session._setupstate.teardown_exact(next_item)


def add_initial_path(session: pytest.Session, path: Path) -> None:
    """Let the session collect from this file, as if the command line named it."""
    session._initialpaths |= {path}


def collectors_of(session: pytest.Session, path: Path) -> Sequence[pytest.Collector]:
    return session._collect_path(path, {})


def use_fixture(item: pytest.Function, name: str) -> None:
    """Have a test use a fixture of function scope that it does not name, before all others of that
    scope.
    """
    if name not in item.fixturenames:
        known = item._fixtureinfo.name2fixturedefs
        wider = [
            other
            for other in item.fixturenames
            if other in known and known[other][-1].scope != "function"
        ]
        place = max((item.fixturenames.index(other) + 1 for other in wider), default=0)
        # a list of its own: that of pytest is shared by all parameters of the function
        item.fixturenames = [*item.fixturenames[:place], name, *item.fixturenames[place:]]


def active_xfail(item: pytest.Item) -> tuple[str, object] | None:
    """Return reason and ``raises`` of the xfail mark that holds for a test, once it runs; None
    without one.
    """
    mark = item.stash.get(xfailed_key, None)
    if mark is None or item.config.option.runxfail:
        return None
    return mark.reason, mark.raises


def open_expectations() -> list[object]:
    """Return what ``pytest.raises`` and ``assertRaises`` wait for an exception with, in any thread.

    Nothing but the frames' own stacks refers to these blocks, and Python does not show those. So
    memory is searched. The result may contain earlier blocks whose body raised nothing.
    """
    kinds = [*_EXPECTATIONS]
    for kind in _EXPECTATIONS:
        kinds += kind.__subclasses__()  # torch's TestCase has its own assertRaises
    for generation in range(3):
        # A block is seldom old, and old objects are many: a million after ``import torch`` and a
        # trace. Of those only the ones that refer to the types are looked at, which C finds.
        objects = gc.get_objects(generation) if generation < 2 else gc.get_referrers(*kinds)
        found = []
        for each in objects:
            # By its type: an object of the user may compute when it is asked for its class.
            if issubclass(type(each), _EXPECTATIONS) and not has_caught(each):
                found.append(each)
        if found:
            return found
    return []


def caught_by(expectation: object) -> BaseException | None:
    """Return the exception that the block of one of ``open_expectations`` has caught, if it has."""
    if not has_caught(expectation):
        return None
    if isinstance(expectation, pytest.ExceptionInfo):
        return expectation.value
    caught: BaseException = expectation.exception  # type: ignore[attr-defined]
    return caught


def has_caught(expectation: object) -> bool:
    """Return whether the block of one of ``open_expectations`` has caught the exception that it
    waits for.
    """
    if isinstance(expectation, pytest.ExceptionInfo):
        return expectation._excinfo is not None
    return hasattr(expectation, "exception")


def uncaptured(config: pytest.Config) -> AbstractContextManager[None]:
    """Inside, output goes where it goes without capturing."""
    manager: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
    return manager.global_and_fixture_disabled() if manager is not None else nullcontext()


def capture_fds(config: pytest.Config) -> tuple[int, ...]:
    """The files that hold captured stdout and stderr; the parent reads them when a rank dies."""
    manager: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
    capturing: Any = manager._global_capturing if manager is not None else None
    with suppress(OSError, AttributeError):  # captured in memory (--capture=sys), or not at all
        return tuple(int(stream.tmpfile.fileno()) for stream in (capturing.out, capturing.err))
    return ()


def captured_in_memory(config: pytest.Config) -> list[tuple[str, str]]:
    """Return titles and texts of what pytest holds in memory, not in files, of the present phase;
    from any thread.
    """
    found: list[tuple[str, str]] = []
    manager: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
    capturing: Any = manager._global_capturing if manager is not None else None
    for name, title in (("out", "Captured stdout"), ("err", "Captured stderr")):
        file: Any = getattr(getattr(capturing, name, None), "tmpfile", None)
        if hasattr(file, "getvalue"):  # with --capture=sys or tee-sys
            found.append((title, file.getvalue()))
    handler: Any = getattr(config.pluginmanager.getplugin("logging-plugin"), "report_handler", None)
    if (
        handler in logging.getLogger().handlers
    ):  # only while a phase runs: afterwards it keeps the records
        found.append(("Captured log", handler.stream.getvalue()))
    return [(title, text) for title, text in found if text.strip()]


def base_temp(config: pytest.Config) -> Path:
    """The folder of this run's, or this worker's, temporary files."""
    folder: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return folder


class NoTerminal:
    """Where pytest 9.0 looks for what colours the explanation of a failed ``==``; without it that
    would fail.
    """

    isatty = False

    def __init__(self) -> None:
        self._tw = TerminalWriter(io.StringIO())
