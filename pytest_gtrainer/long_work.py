"""Long work says that it goes on: a line after some seconds to whoever watches ``progress``, as a terminal does.

>>> with facts.watching({"progress": lambda text: print(text)}):
...     with long_work("counting", first=0.01) as at:
...         at("3 of 4")
...         time.sleep(0.1)
counting, 3 of 4: 0 s so far
>>> with long_work("counting", first=0.0):  # nobody watches: no thread, no line
...     pass
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytest_gtrainer import facts

FIRST_SECONDS = 4.0
EVERY_SECONDS = 10.0


@contextmanager
def long_work(what: str, *, first: float | None = None) -> Iterator[Callable[[str], None]]:
    """Tell that ``what`` goes on, while the block runs; yields a function that notes how far it is.

    Args:
        first: seconds until the first line, by default ``FIRST_SECONDS``; the next ones come every ``EVERY_SECONDS``.
    """
    if not facts.is_watched("progress"):
        yield lambda place: None
        return
    teller = _Teller(what, FIRST_SECONDS if first is None else first)
    teller.start()
    try:
        yield teller.note
    finally:
        teller.end()


class _Teller(threading.Thread):
    """Tells from a thread of its own: the work is in calls that do not come back to say anything."""

    def __init__(self, what: str, first: float) -> None:
        super().__init__(name=f"progress of {what}", daemon=True)
        self._what, self._first, self._place = what, first, ""
        self._ended = threading.Event()

    def note(self, place: str) -> None:
        self._place = f", {place}"

    def run(self) -> None:
        begun, pause = time.monotonic(), self._first
        while not self._ended.wait(pause):
            facts.tell("progress", text=f"{self._what}{self._place}: {time.monotonic() - begun:.0f} s so far")
            pause = EVERY_SECONDS

    def end(self) -> None:
        self._ended.set()
        self.join()
