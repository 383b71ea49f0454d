"""State of the process that a test may change, and that is put back before the next test.

Also keeps torch's structured trace apart from pytest's captured logs: ``torch.__trace`` does not
propagate and is at DEBUG, and torch writes to it only if it has handlers. pytest 9.1 and later
attach theirs to every logger that does not propagate. So each captured test would pay for the
structured trace (a third of a trace's time) and print hundreds of empty lines when it fails.
"""

import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SEED = 1234  # of every test on every rank, in every run

Changes = dict[str, tuple[Any, Any]]

# Limits of memory, of the size of a file, of open files.
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
# The signals that tests handle: to ask for each of the 64 takes half a millisecond.
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
_DECIDE_BITS = ("deterministic algorithms", "matmul precision")

# State that is not put back: the other switches of ``numerics.knobs``, which the guard against
# leaks names; imported and patched modules; threads and files that are still open; the locale.
STAYS = ("the other switches", "modules", "threads", "open files", "the locale")


def kept() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return by name how to read and write the state that is put back after a test on a rank."""
    # Imported here: a process that keeps its log quiet may have no use for torch.
    from pytest_gtrainer._torch.modes import MODES, SETTINGS

    return {
        **MODES,
        "resource limits": (
            lambda: {which: resource.getrlimit(which) for which in _LIMITS},
            _set_limits,
        ),
        "the environment": (_environ, _set_environ),
        "the working directory": (_cwd, _set_cwd),
        "the umask": (_umask, os.umask),
        "signal handlers": (
            lambda: {each: signal.getsignal(each) for each in _SIGNALS},
            _set_handlers,
        ),
        "alarms": (lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0, lambda _: signal.alarm(0)),
        "sys.path": (lambda: sys.path[:], lambda value: sys.path.__setitem__(slice(None), value)),
        "the garbage collector": (lambda: (gc.isenabled(), gc.get_threshold()), _set_collector),
        **SETTINGS,
    }


@contextmanager
def restored() -> Iterator[Changes]:
    """Put back the state that a test changed in the process.

    If one thing cannot be put back, all others still are.

    Yields:
        The changes that decide bits, filled at the end: by name, the value before and after.

    Raises:
        RuntimeError: something could not be put back. An exception of the test goes first, and gets
            the same words as notes.
    """
    switches = kept()
    before: dict[str, Any] = {name: read() for name, (read, _) in switches.items()}
    changes: Changes = {}
    problems: list[str] = []

    def put_back() -> None:
        for name, (read, write) in switches.items():
            try:
                if (found := read()) != before[name]:
                    if name in _DECIDE_BITS:
                        changes[name] = before[name], found
                    write(before[name])
            except Exception as error:
                problems.append(f"{name} cannot be put back: {type(error).__name__}: {error}")

    try:
        yield changes
    except BaseException as error:
        put_back()
        for problem in problems:
            error.add_note(problem)
        raise
    put_back()
    if problems:
        raise RuntimeError("\n".join(problems))


def _set_limits(limits: dict[int, tuple[int, int]]) -> None:
    for which, limit in limits.items():
        # A hard limit that was lowered cannot be raised again.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, limit)


def _set_environ(environ: dict[bytes, bytes]) -> None:
    for name in _environ().keys() - environ.keys():
        del os.environb[name]
    os.environb.update(environ)


def _cwd() -> str:
    # A test may have removed its working directory.
    with contextlib.suppress(OSError):
        return os.getcwd()
    return ""


def _set_cwd(path: str) -> None:
    if path:  # a directory that was gone before cannot be entered again
        os.chdir(path)


def _umask() -> int:
    # It can only be read by setting it.
    found = os.umask(0o77)
    os.umask(found)
    return found


def _set_handlers(handlers: dict[int, Any]) -> None:
    for signum, handler in handlers.items():
        # None is a handler that was not set from Python.
        if handler is not None and signal.getsignal(signum) != handler:
            signal.signal(signum, handler)


def _set_collector(state: tuple[bool, tuple[int, int, int]]) -> None:
    switch = gc.enable if state[0] else gc.disable
    switch()
    gc.set_threshold(*state[1])


def _environ() -> dict[bytes, bytes]:
    """Return the environment without the variable in which pytest names the present test."""
    environ = os.environb.copy()
    environ.pop(b"PYTEST_CURRENT_TEST", None)
    return environ


def keep_trace_log_quiet() -> None:
    """Remove the handlers of pytest and torch from ``torch.__trace``, unless TORCH_TRACE is set."""
    if "TORCH_TRACE" in os.environ:
        return
    trace_log = logging.getLogger("torch.__trace")
    trace_log.propagate = True
    for handler in trace_log.handlers[:]:
        if type(handler).__module__ in ("_pytest.logging", "torch._logging._internal"):
            trace_log.removeHandler(handler)
