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
    place, ended = "", threading.Event()

    def tell() -> None:
        begun, pause = time.monotonic(), FIRST_SECONDS if first is None else first
        while not ended.wait(pause):
            facts.tell("progress", text=f"{what}{place}: {time.monotonic() - begun:.0f} s so far")
            pause = EVERY_SECONDS

    def note(where: str) -> None:
        nonlocal place
        place = f", {where}"

    # a thread of its own: the work is in calls that do not come back to say anything
    thread = threading.Thread(target=tell, name=f"progress of {what}", daemon=True)
    thread.start()
    try:
        yield note
    finally:
        ended.set()
        thread.join()
