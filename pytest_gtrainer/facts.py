"""Facts and notifications: what a test did, for listeners that the computing code does not know.

The code that computes never imports pytest. It reports to this module, and the plugin listens.

A *fact* is a flat, JSON-able dict with a ``kind``. The plugin sends the facts of a test along with
its report (through ranks and xdist workers), and counts them in the summary:

>>> with collecting() as seen:
...     emit("verdict", outcome="equal", tensors=12)
>>> seen
[{'kind': 'verdict', 'outcome': 'equal', 'tensors': 12}]

A *notification* hands live objects, graphs for example, to the watchers of a topic in this process.
Where nobody watches the topic it costs nothing:

>>> with watching({"graph_pass": lambda name: print("saw", name)}):
...     notify("graph_pass", name="bucketing")
saw bucketing
>>> is_watched("graph_pass")
False

Long work notifies the topic "progress", which a terminal shows:

>>> with watching({"progress": lambda text: print(text)}):
...     with long_work("counting", first=0.01) as at:
...         at("3 of 4")
...         time.sleep(0.1)
counting, 3 of 4: 0 s so far
"""

import base64
import functools
import hashlib
import re
import reprlib
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

Fact = dict[str, Any]
Watcher = Callable[..., None]
Listener = TypeVar("Listener")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

FIRST_SECONDS = 4.0
EVERY_SECONDS = 10.0
MOST_UNPACKED = 64 << 20

_sinks: list[list[Fact]] = []
_watchers: list[Mapping[str, Watcher]] = []


def emit(kind: str, **data: Any) -> None:
    """Append a fact to every active collector."""
    for sink in _sinks:
        sink.append({"kind": kind, **data})


def notify(topic: str, **objects: Any) -> None:
    """Call every active watcher of ``topic`` in this process with live objects."""
    for watchers in tuple(_watchers):
        if topic in watchers:
            watchers[topic](**objects)


def is_watched(topic: str) -> bool:
    """Return whether ``topic`` has a watcher, so objects for it are made only if someone looks."""
    return any(topic in watchers for watchers in _watchers)


def of_kind(facts: Iterable[Fact], *kinds: str) -> list[Fact]:
    """Return the facts of the given kinds, in order."""
    return [fact for fact in facts if fact["kind"] in kinds]


def collecting() -> AbstractContextManager[list[Fact]]:
    """Collect the facts emitted inside the block; blocks may nest."""
    return _registered(_sinks, [])


def watching(watchers: Mapping[str, Watcher]) -> AbstractContextManager[object]:
    """Call ``watchers[topic]`` at each notification inside the block; blocks may nest."""
    return _registered(_watchers, watchers)


@contextmanager
def _registered(listeners: list[Listener], own: Listener) -> Iterator[Listener]:
    listeners.append(own)
    try:
        yield own
    finally:
        # By identity: ``remove`` compares, and an inner collector may be equal to the outer one.
        listeners[:] = [each for each in listeners if each is not own]


class FailedCheck(AssertionError):
    """The verdict of a check: it failed, or could not have failed.

    The listener of ``failing_checks`` gets it when it is made, also if the test then catches it.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if _noting:
            _noting[-1](self)


def check(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a function a check: an exception of any class that leaves it is a failed check, too.

    A check that was given the wrong type, or a file that it cannot read, has checked nothing. Each
    call is a fact, so that a later run misses a check that a test no longer makes.
    """

    @functools.wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            emit("check", name=function.__qualname__, held=False)
            if _noting:
                _noting[-1](error)
            raise
        emit("check", name=function.__qualname__, held=True)
        return result

    return checked


def caller_of_check() -> FrameType:
    """Return the frame that called the innermost check that is running, for its file and line."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "checked" or frame.f_code.co_filename != __file__:
        assert frame.f_back is not None, "only a check calls this"
        frame = frame.f_back
    assert frame.f_back is not None
    return frame.f_back


_noting: list[Callable[[Exception], None]] = []


def failing_checks(note: Callable[[Exception], None]) -> AbstractContextManager[object]:
    """Call ``note`` with each failed check of the block, in any thread.

    A check that calls another one may give the same exception twice. Of several blocks the
    innermost counts: a pytest run inside a test judges its own tests.
    """
    return _registered(_noting, note)


@contextmanager
def long_work(what: str, *, first: float | None = None) -> Iterator[Callable[[str], None]]:
    """Notify the topic "progress" after ``first`` seconds, then every ``EVERY_SECONDS``.

    Yields a function that notes how far the work is, as ``at("step 3 of 4")``.
    """
    if not is_watched("progress"):
        yield lambda place: None
        return
    place, ended = "", threading.Event()

    def report() -> None:
        begun = time.monotonic()
        pause = FIRST_SECONDS if first is None else first
        while not ended.wait(pause):
            notify("progress", text=f"{what}{place}: {time.monotonic() - begun:.0f} s so far")
            pause = EVERY_SECONDS

    def note(where: str) -> None:
        nonlocal place
        place = f", {where}"

    # A thread of its own, because the work is inside calls (a trace, a compile) that do not return.
    thread = threading.Thread(target=report, name=f"progress of {what}", daemon=True)
    thread.start()
    try:
        yield note
    finally:
        ended.set()
        thread.join()


def escaped(text: str) -> str:
    """Escape the characters of ``text`` that command a terminal or are invisible.

    >>> print(escaped("red: " + chr(27) + "[31m"))
    red: \\x1b[31m
    """
    # Most texts have no such character; one call in C is enough to see that.
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: str) -> str:
    """Return ``text`` escaped, on one line: a name in a line of a table cannot begin another line.

    >>> print(one_line("a" + chr(10) + "b" + chr(0)))
    a\\nb\\x00
    """
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def all_escaped(value: Any) -> Any:
    """Return lists, tuples and dicts with every text in them escaped, except for keys."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {key: all_escaped(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [all_escaped(part) for part in value]
    return value


def key_of(text: str) -> str:
    """Return a short digest of a text, also of one with half of a surrogate pair, as of paths.

    >>> key_of("graph"), len(key_of("\\udc80"))
    ('eef93e1d14482804', 16)
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def packed(text: str) -> str:
    """Return ``text`` in zlib's format, which browsers read as "deflate", as base64.

    >>> zlib.decompress(base64.b64decode(packed("graph"))), len(packed("a" * 100_000)) < 400
    (b'graph', True)
    """
    utf8 = text.encode("utf-8", "backslashreplace")
    return base64.b64encode(zlib.compress(utf8, 6)).decode()


def unpacked(text: str, *, most: int = MOST_UNPACKED) -> str:
    """Undo ``packed``, up to ``most`` bytes.

    Raises:
        ValueError: the text holds more bytes, or its end is missing.

    >>> unpacked(packed("graph"))
    'graph'
    >>> unpacked(packed("a" * 100_000), most=1000)
    Traceback (most recent call last):
    ValueError: a part of it holds more than 1000 bytes
    """
    # An object, since ``zlib.decompress`` has no limit: a page of 4 MB can hold gigabytes.
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(base64.b64decode(text), most)
    if decompressor.unconsumed_tail:
        raise ValueError(f"a part of it holds more than {most} bytes")
    if not decompressor.eof:
        raise ValueError("a part of it is cut off")
    return content.decode()


TO_ACCEPT = "to accept what was obtained:"
"""Stands in the message of a golden that differs, in front of the command that accepts it."""
NEXT = "gtrainer next"
"""The title of a section of a failure that says, after a colon, what to run next."""


def spell_counts(counts: Mapping[str, int]) -> str:
    """Return counts in words, without those that are 0.

    >>> spell_counts({"equal": 2, "different": 1, "unverified": 0})
    '2 equal, 1 different'
    """
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def spell_some(items: Sequence[object], most: int = 3) -> str:
    """Return the first items, and the number of the others.

    >>> spell_some(["a", "b"]), spell_some([4, 5, 6], most=1)
    ('a, b', '4 and 2 more')
    """
    shown = ", ".join(map(str, items[:most]))
    if len(items) > most:
        shown += f" and {len(items) - most} more"
    return shown


def hides_frames(error: Any) -> bool:
    """Return whether pytest leaves frames of this package out of a traceback.

    They say nothing of a verdict, a refusal, or an error in a user's model. An error of our own
    shows all. For ``__tracebackhide__`` of a module.

    Args:
        error: the ``ExceptionInfo`` of pytest, or None.
    """
    if error is None:
        return True
    raised_in = str(error.traceback[-1].frame.f_globals.get("__name__"))
    is_ours = raised_in.startswith("pytest_gtrainer.")
    return not is_ours or isinstance(error.value, (FailedCheck, ValueError, TypeError))


__tracebackhide__ = hides_frames


def has_words(text: str, words: str) -> bool:
    r"""Return whether a text has these words, whole ones.

    >>> has_words("on 4 ranks", "4 ranks"), has_words("on 14 ranks", "4 ranks")
    (True, False)
    """
    whole = rf"(?:\b|(?=\W)){re.escape(words)}(?:\b|(?<=\W))"
    return re.search(whole, text) is not None


def check_type(value: object, kinds: type | tuple[type, ...], what: str, give: str) -> None:
    """Raise a TypeError that names an argument, and what to give, unless it is of a kind.

    >>> check_type(3, str, "name", "a text")
    Traceback (most recent call last):
    TypeError: name is 3: give a text
    """
    # True is an int, and no number that anybody means.
    is_bool = isinstance(value, bool) and kinds is not bool
    if is_bool or not isinstance(value, kinds):
        raise TypeError(f"{what} is {reprlib.repr(value)}: give {give}")


def check_switches(**switches: object) -> None:
    """Raise a TypeError that names the first switch that is neither True nor False.

    Any text is true, also "no", and so is every number but 0.
    """
    for name, value in switches.items():
        check_type(value, bool, name, "True or False")


def check_callable(**arguments: object) -> None:
    """Raise a TypeError that names the first argument that cannot be called."""
    for name, value in arguments.items():
        if not callable(value):
            raise TypeError(f"{name} is {reprlib.repr(value)}: give a function")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> counted(1, "tensor"), counted(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
