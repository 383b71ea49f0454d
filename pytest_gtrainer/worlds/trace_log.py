"""Torch's structured trace log and pytest's log capture: kept apart.

``torch.__trace`` does not propagate and is at DEBUG; torch writes to it only where it has
handlers. pytest 9.1 and later attach theirs to every logger that does not propagate, so each
captured test would pay for the structured trace (a third of a trace's time) and print
hundreds of empty DEBUG lines when it fails.
"""

from __future__ import annotations

import logging
import os


def keep_trace_log_quiet() -> None:
    """Make ``torch.__trace`` a logger that pytest passes over, unless TORCH_TRACE asks for it."""
    if "TORCH_TRACE" not in os.environ:
        trace_log = logging.getLogger("torch.__trace")
        trace_log.handlers.clear()
        trace_log.propagate = True
