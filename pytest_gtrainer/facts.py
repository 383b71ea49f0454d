"""Facts: what a test did, told to whoever listens. The parts that compute know nothing of pytest.

A fact is a flat, JSON-able dict with a ``kind``. The plugin sends those of a test along with its report (through ranks
and xdist workers), and counts them in the summary:

>>> with collecting() as seen:
...     emit("verdict", outcome="equal", tensors=12)
>>> seen
[{'kind': 'verdict', 'outcome': 'equal', 'tensors': 12}]

Live objects, graphs for example, are ``tell``-ed on a topic, and cost nothing where nobody is ``watching`` it:

>>> with watching({"graph_pass": lambda name: print("saw", name)}):
...     tell("graph_pass", name="bucketing")
saw bucketing
>>> is_watched("graph_pass")
False

Long work says on the topic "progress", as a terminal shows it, that it goes on:

>>> with watching({"progress": lambda text: print(text)}):
...     with long_work("counting", first=0.01) as at:
...         at("3 of 4")
...         time.sleep(0.1)
counting, 3 of 4: 0 s so far
"""

import base64
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

Fact = dict[str, Any]
Watcher = Callable[..., None]
Listener = TypeVar("Listener")


def escaped(text: str) -> str:
    """A text without what would command a terminal, or not be seen: control, direction and width.

    >>> print(escaped("red: " + chr(27) + "[31m"))
    red: \\x1b[31m
    """
    if text.replace("\n", "").replace("\t", "").isprintable():  # most texts; in C
        return text
    return "".join(
        c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: str) -> str:
    """Return ``text`` as ``escaped`` does, on one line: a name or a line of a table cannot begin another.

    >>> print(one_line("a" + chr(10) + "b" + chr(0)))
    a\\nb\\x00
    """
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def all_escaped(value: Any) -> Any:
    """Return lists, tuples and dicts with every text in them, but for keys, as ``escaped`` gives it."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {key: all_escaped(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [all_escaped(part) for part in value]
    return value


FIRST_SECONDS = 4.0
EVERY_SECONDS = 10.0

_sinks: list[list[Fact]] = []
_watchers: list[Mapping[str, Watcher]] = []


def emit(kind: str, **data: Any) -> None:
    """Tell every active collector; without one, do nothing."""
    for sink in _sinks:
        sink.append({"kind": kind, **data})


@contextmanager
def _among(listeners: list[Listener], own: Listener) -> Iterator[Listener]:
    listeners.append(own)
    try:
        yield own
    finally:
        listeners[:] = [each for each in listeners if each is not own]


def collecting() -> AbstractContextManager[list[Fact]]:
    """Collect the facts emitted inside the block; blocks may nest."""
    return _among(_sinks, [])


def tell(topic: str, **objects: Any) -> None:
    """Show live objects to everyone who watches ``topic``, in this process; without one, do nothing."""
    for watchers in tuple(_watchers):
        if topic in watchers:
            watchers[topic](**objects)


def is_watched(topic: str) -> bool:
    """Whether somebody watches ``topic``: whether it is worth making what ``tell`` would show."""
    return any(topic in watchers for watchers in _watchers)


def watching(watchers: Mapping[str, Watcher]) -> AbstractContextManager[object]:
    """Call ``watchers[topic]`` with what is told on a topic inside the block; blocks may nest."""
    return _among(_watchers, watchers)


@contextmanager
def long_work(what: str, *, first: float | None = None) -> Iterator[Callable[[str], None]]:
    """Tell that ``what`` goes on, first after ``first`` seconds; yields a function that notes how far it is."""
    if not is_watched("progress"):
        yield lambda place: None
        return
    place, ended = "", threading.Event()

    def go_on() -> None:
        begun, pause = time.monotonic(), FIRST_SECONDS if first is None else first
        while not ended.wait(pause):
            tell("progress", text=f"{what}{place}: {time.monotonic() - begun:.0f} s so far")
            pause = EVERY_SECONDS

    def note(where: str) -> None:
        nonlocal place
        place = f", {where}"

    # a thread of its own: the work is in calls that do not come back to say anything
    thread = threading.Thread(target=go_on, name=f"progress of {what}", daemon=True)
    thread.start()
    try:
        yield note
    finally:
        ended.set()
        thread.join()


MOST_UNPACKED = 64 << 20


def packed(text: str) -> str:
    """A text as base64 of zlib's format, which browsers read ("deflate").

    >>> zlib.decompress(base64.b64decode(packed("graph"))), len(packed("a" * 100_000)) < 400
    (b'graph', True)
    """
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def unpacked(text: str, *, most: int = MOST_UNPACKED) -> str:
    """Undo ``packed``. A few bytes can stand for a thousand times as many: no more than ``most`` are unpacked.

    Raises:
        ValueError: there are more, or the end is missing.

    >>> unpacked(packed("graph"))
    'graph'
    >>> unpacked(packed("a" * 100_000), most=1000)
    Traceback (most recent call last):
    ValueError: a part of it holds more than 1000 bytes
    """
    whole = zlib.decompressobj()
    content = whole.decompress(base64.b64decode(text), most)
    if whole.unconsumed_tail:
        raise ValueError(f"a part of it holds more than {most} bytes")
    if not whole.eof:
        raise ValueError("a part of it is cut off")
    return content.decode()


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "tensor"), counted(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
