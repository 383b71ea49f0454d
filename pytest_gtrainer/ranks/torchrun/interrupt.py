"""Makes the main thread raise in the middle of a test, from another thread or by a signal from outside."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGTERM


class Interrupted(BaseException):
    """Raised in a test that is to end now: its limit is reached, or the run is being ended."""


class Interruptor:
    """Interrupts the main thread while it is inside ``interruptible``; made by the main thread."""

    def __init__(self) -> None:
        self._running = self._wanted = False
        signal.signal(_SIGNAL, self._strike)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        self._wanted, self._running = False, True
        try:
            yield
        finally:
            self._running = False

    def interrupt(self) -> None:
        """Make it raise as soon as it is in Python code; from any thread."""
        self._wanted = True
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, _SIGNAL)

    def _strike(self, signum: int, frame: FrameType | None) -> None:
        if self._running and self._wanted:
            self._wanted = False
            raise Interrupted("the test was interrupted: its limit was reached, or the run is being ended")


def stacks_of_threads() -> str:
    """The Python stacks of this process as faulthandler writes them, the main thread as the current one, last.

    Threads of ours, whose names begin with ``gtrainer-``, are left out.
    """
    main = threading.main_thread().ident
    frames = sys._current_frames()
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("gtrainer-")}
    order = sorted(frames.keys() - ours, key=lambda ident: ident == main)
    return "\n\n".join(_stack(ident, frames[ident], ident == main) for ident in order) + "\n"


def _stack(ident: int, frame: FrameType | None, is_main: bool) -> str:
    lines = [f"{'Current thread' if is_main else 'Thread'} {ident:#x} (most recent call first):"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
