"""Facts: what a test did, told to whoever listens.

The parts that compute (numerics, worlds, goldens) know nothing of pytest. They ``emit`` a
fact; the plugin collects the facts of the running test, sends them along with its report
(through ranks and xdist workers), and counts them in the summary.

A fact is a flat, JSON-able dict with a ``kind``:

>>> with collecting() as seen:
...     emit("verdict", outcome="equal", tensors=12)
>>> seen
[{'kind': 'verdict', 'outcome': 'equal', 'tensors': 12}]

Some listeners want more than facts: the graphs before and after a pass, the records that were
compared. Such objects are ``tell``-ed on a topic, to those who are ``watching`` it, and cost nothing
where nobody is:

>>> with watching({"graph_pass": lambda name: print("saw", name)}):
...     tell("graph_pass", name="bucketing")
saw bucketing
>>> is_watched("graph_pass")
False
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Fact = dict[str, Any]
Watcher = Callable[..., None]

_sinks: list[list[Fact]] = []
_watchers: list[Mapping[str, Watcher]] = []


def emit(kind: str, **data: Any) -> None:
    """Tell every active collector; without one, do nothing."""
    for sink in _sinks:
        sink.append({"kind": kind, **data})


@contextmanager
def collecting() -> Iterator[list[Fact]]:
    """Collect the facts emitted inside the block; blocks may nest."""
    sink: list[Fact] = []
    _sinks.append(sink)
    try:
        yield sink
    finally:
        _sinks[:] = [s for s in _sinks if s is not sink]


def tell(topic: str, **objects: Any) -> None:
    """Show live objects to everyone who watches ``topic``, in this process; without one, do nothing."""
    for watchers in tuple(_watchers):
        if topic in watchers:
            watchers[topic](**objects)


def is_watched(topic: str) -> bool:
    """Whether somebody watches ``topic``: whether it is worth making what ``tell`` would show."""
    return any(topic in watchers for watchers in _watchers)


@contextmanager
def watching(watchers: Mapping[str, Watcher]) -> Iterator[None]:
    """Call ``watchers[topic]`` with what is told on a topic inside the block; blocks may nest."""
    _watchers.append(watchers)
    try:
        yield
    finally:
        _watchers[:] = [each for each in _watchers if each is not watchers]
