"""What a test may change in its process and must not hand to the next; and torch's loggers, kept apart from pytest's.

``torch.__trace`` does not propagate and is at DEBUG; torch writes to it only where it has handlers. pytest 9.1 and
later attach theirs to every logger that does not propagate, so each captured test would pay for the structured trace
(a third of a trace's time) and print hundreds of empty DEBUG lines when it fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SEED = 1234
"""Of every test on every rank, in every run."""

Changes = dict[str, tuple[Any, Any]]

# Of memory, of the size of a file, of open files.
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
_DECIDES_BITS = "deterministic algorithms"


@contextmanager
def restored() -> Iterator[Changes]:
    """Put back what the body of a test changed in the process: limits, environment, folder, switches of torch.

    Gives a mapping that in the end holds those changes that decide the bits of others: by name, before and after.
    """
    import torch  # here: a process that keeps its log quiet may have no use for torch

    switches = {
        "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "the number of threads": (torch.get_num_threads, torch.set_num_threads),
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        _DECIDES_BITS: (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
    }
    environ, cwd = _environ(), os.getcwd()
    limits = {which: resource.getrlimit(which) for which in _LIMITS}
    before: dict[str, Any] = {name: read() for name, (read, _) in switches.items()}
    changes: Changes = {}
    try:
        yield changes
    finally:
        for which, limit in limits.items():
            if resource.getrlimit(which) != limit:
                with contextlib.suppress(ValueError, OSError):  # a hard limit that was lowered stays
                    resource.setrlimit(which, limit)
        now = _environ()
        for name in now.keys() - environ.keys():
            del os.environb[name]
        for name, value in environ.items():
            if now.get(name) != value:
                os.environb[name] = value
        os.chdir(cwd)
        for switch, (read, write) in switches.items():
            found: Any = read()
            if found != before[switch]:  # writing the determinism flags imports half of inductor
                write(before[switch])
                if switch == _DECIDES_BITS:
                    changes[switch] = before[switch], found


def _environ() -> dict[bytes, bytes]:
    """The environment but for what pytest says of its present test."""
    environ = dict(os.environb)
    environ.pop(b"PYTEST_CURRENT_TEST", None)
    return environ


# --- torch's loggers -----------------------------------------------------------------------------

_TRACE = "torch.__trace"


def keep_trace_log_quiet() -> None:
    """Make ``torch.__trace`` a logger that pytest passes over, unless TORCH_TRACE asks for it.

    Handlers that are not pytest's stay: who has put one there wants the records.
    """
    if "TORCH_TRACE" in os.environ:
        return
    trace_log = logging.getLogger(_TRACE)
    trace_log.propagate = True
    for handler in trace_log.handlers[:]:
        if type(handler).__module__ == "_pytest.logging":
            trace_log.removeHandler(handler)


def let_torch_loggers_propagate() -> None:
    """Let torch's loggers propagate, unless TORCH_LOGS asks for something else.

    About thirty of them print by themselves and do not propagate; to attach to each of them before every phase
    is a quarter of what pytest does for an empty test. Their records are captured as anybody's. The structured
    trace stays as it is if TORCH_TRACE asks for it.
    """
    if "TORCH_LOGS" in os.environ or "TORCH_LOGS_OUT" in os.environ:
        return
    for name, logger in logging.getLogger().manager.loggerDict.items():
        asked_for = name == _TRACE and "TORCH_TRACE" in os.environ
        if asked_for or not isinstance(logger, logging.Logger) or logger.propagate:
            continue
        if name.partition(".")[0] == "torch":
            logger.handlers.clear()
            logger.propagate = True
