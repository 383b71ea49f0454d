"""Torch's structured trace log and pytest's log capture: kept apart.

``torch.__trace`` does not propagate and is at DEBUG; torch writes to it only where it has
handlers. pytest 9.1 and later attach theirs to every logger that does not propagate, so each
captured test would pay for the structured trace (a third of a trace's time) and print
hundreds of empty DEBUG lines when it fails.
"""

from __future__ import annotations

import logging
import os

_TRACE = "torch.__trace"
_CHOSEN_BY = ("TORCH_LOGS", "TORCH_LOGS_OUT")


def keep_trace_log_quiet() -> None:
    """Make ``torch.__trace`` a logger that pytest passes over, unless TORCH_TRACE asks for it."""
    if "TORCH_TRACE" not in os.environ:
        trace_log = logging.getLogger(_TRACE)
        trace_log.handlers.clear()
        trace_log.propagate = True


def let_torch_loggers_propagate() -> None:
    """Let torch's loggers propagate, unless TORCH_LOGS asks for something else.

    About thirty of them print by themselves and do not propagate; to attach to each of them before every phase
    is a quarter of what pytest does for an empty test. Their records are captured as anybody's. The structured
    trace is ``keep_trace_log_quiet``'s business.
    """
    if any(name in os.environ for name in _CHOSEN_BY):
        return
    keep_trace_log_quiet()
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if name == _TRACE or not isinstance(logger, logging.Logger) or logger.propagate:
            continue
        if name.partition(".")[0] == "torch":
            logger.handlers.clear()
            logger.propagate = True
