"""Private names of pytest: the session of a rank.

A rank is a small pytest session that runs one test at a time, as its parent asks. Pytest has no
public way to run a single test, to move captured output, or to see what is set up.

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
from _pytest.threadexception import collect_thread_exception
from _pytest.unraisableexception import collect_unraisable

ATTRIBUTES = {
    "_pytest.config:Config": ("_do_configure", "_ensure_unconfigure"),
    "_pytest.tmpdir:pytest_configure": ("_tmp_path_factory",),
    "_pytest.main:Session": ("_setupstate", "_initialpaths", "_collect_path"),
    "_pytest.python:Function": ("_fixtureinfo",),
    "_pytest.runner:SetupState": ("teardown_exact",),
    "_pytest.capture:CaptureManager": ("_global_capturing",),
    "_pytest.raises:ExceptionInfo": ("_excinfo",),
    "_pytest.unittest:TestCaseFunction": ("_excinfo",),
}

# The class that ``assertRaises`` returns has no public name.
_ASSERT_RAISES = type(unittest.TestCase().assertRaises(Exception))  # noqa: PT027
_EXPECTATIONS = (pytest.ExceptionInfo, _ASSERT_RAISES)


# The forkserver has imported plugins before their session exists. Under ``-W error`` that would end
# every rank; the parent's own session gives the warning where it is due.
_IMPORTED_BEFORE = "-Wignore:Module already imported:pytest.PytestAssertRewriteWarning"


def prepared_config(args: Sequence[str]) -> pytest.Config:
    """Parse the command line of the parent again in a rank."""
    options = list(args)
    end = options.index("--") if "--" in options else len(options)
    # The last filter wins.
    options.insert(end, _IMPORTED_BEFORE)
    return _prepareconfig(options)


def configure(config: pytest.Config) -> None:
    """Call the hooks of configuration, as ``pytest.main`` does before a session."""
    config._do_configure()


def unconfigure(config: pytest.Config) -> None:
    """Undo ``configure``, as ``pytest.main`` does after a session."""
    config._ensure_unconfigure()


def warn_of_unhandled(config: pytest.Config) -> None:
    """Warn of each exception that ended a thread, or that nobody could raise, as in ``__del__``.

    pytest warns of those of a test after each of its phases, and of others at the next one.
    """
    for plugin, collect in (
        ("threadexception", collect_thread_exception),
        ("unraisableexception", collect_unraisable),
    ):
        if config.pluginmanager.hasplugin(plugin):
            collect(config)


def tear_down(session: pytest.Session, next_item: pytest.Item | None) -> None:
    """End everything that is set up and that ``next_item`` does not need; all of it for None."""
    session._setupstate.teardown_exact(next_item)


def add_initial_path(session: pytest.Session, path: Path) -> None:
    """Let the session collect from this file, as if the command line named it."""
    session._initialpaths |= {path}


def collectors_of(session: pytest.Session, path: Path) -> Sequence[pytest.Collector]:
    """Return the collectors of a file."""
    # A second ``perform_collect`` drops fixtures of conftest files (pytest 9.1 and later).
    return session._collect_path(path, {})


def use_fixture(item: pytest.Function, name: str) -> None:
    """Let a test use a fixture of function scope that it does not name.

    It is set up before all others of that scope.
    """
    if name in item.fixturenames:
        return
    # ``fixturenames`` is the order of set-up: wider scopes come first.
    known = item._fixtureinfo.name2fixturedefs
    place = 0
    for index, other in enumerate(item.fixturenames):
        if other in known and known[other][-1].scope != "function":
            place = index + 1
    # All parameters of a function share the list of pytest, so the item gets its own.
    item.fixturenames = [*item.fixturenames[:place], name, *item.fixturenames[place:]]


def active_xfail(item: pytest.Item) -> tuple[str, object] | None:
    """Return reason and ``raises`` of the xfail mark that holds for a running test, or None."""
    # Pytest adds marks here that a test gives itself while it runs.
    mark = item.stash.get(xfailed_key, None)
    if mark is None or item.config.option.runxfail:
        return None
    return mark.reason, mark.raises


def open_expectations() -> list[object]:
    """Return the open blocks of ``pytest.raises`` and ``assertRaises``, in any thread.

    Nothing but the frames' own stacks refers to these blocks, and Python does not show those. So
    memory is searched. The result may contain earlier blocks whose body raised nothing.
    """
    kinds = [*_EXPECTATIONS]
    for kind in _EXPECTATIONS:
        # torch's TestCase has its own ``assertRaises``.
        kinds += kind.__subclasses__()
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
    """Return the exception that one of ``open_expectations`` has caught; None if it has not."""
    if not has_caught(expectation):
        return None
    if isinstance(expectation, pytest.ExceptionInfo):
        return expectation.value
    caught: BaseException = expectation.exception  # type: ignore[attr-defined]
    return caught


def has_caught(expectation: object) -> bool:
    """Return whether one of ``open_expectations`` has caught its exception."""
    if isinstance(expectation, pytest.ExceptionInfo):
        return expectation._excinfo is not None
    return hasattr(expectation, "exception")


def caught_by_unittest(item: pytest.Item | None) -> list[BaseException]:
    """Return what the runner of ``unittest`` has caught of a test; pytest reports the first."""
    return [info.value for info in getattr(item, "_excinfo", None) or []]


def uncaptured(config: pytest.Config) -> AbstractContextManager[None]:
    """Show output inside the block as without capturing."""
    manager: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
    return manager.global_and_fixture_disabled() if manager is not None else nullcontext()


def capture_fds(config: pytest.Config) -> tuple[int, ...]:
    """Return the files of captured stdout and stderr; the parent reads them when a rank dies."""
    manager: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
    capturing: Any = manager._global_capturing if manager is not None else None
    # Output is captured in memory (--capture=sys), or not at all.
    with suppress(OSError, AttributeError):
        return tuple(int(stream.tmpfile.fileno()) for stream in (capturing.out, capturing.err))
    return ()


def captured_in_memory(config: pytest.Config) -> list[tuple[str, str]]:
    """Return title and text of each output of this phase that pytest holds in memory.

    It may be called from any thread.
    """
    found: list[tuple[str, str]] = []
    manager: CaptureManager | None = config.pluginmanager.getplugin("capturemanager")
    capturing: Any = manager._global_capturing if manager is not None else None
    for name, title in (("out", "Captured stdout"), ("err", "Captured stderr")):
        file: Any = getattr(getattr(capturing, name, None), "tmpfile", None)
        # With --capture=sys or tee-sys.
        if hasattr(file, "getvalue"):
            found.append((title, file.getvalue()))
    handler: Any = getattr(config.pluginmanager.getplugin("logging-plugin"), "report_handler", None)
    # After a phase the handler keeps its records.
    if handler in logging.getLogger().handlers:
        found.append(("Captured log", handler.stream.getvalue()))
    return [(title, text) for title, text in found if text.strip()]


def base_temp(config: pytest.Config) -> Path:
    """Return the folder of temporary files of this run, or of this worker."""
    # ``tmp_path_factory`` is a fixture; this is there before the first test asks for it.
    folder: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return folder


class NoTerminal:
    """A stand-in for the plugin "terminalreporter", which a rank does not have.

    Pytest 9.0 reads its ``_tw`` to colour the explanation of a failed ``==``.
    """

    isatty = False

    def __init__(self) -> None:
        self._tw = TerminalWriter(io.StringIO())
