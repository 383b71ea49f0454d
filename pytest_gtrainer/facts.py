"""Facts: what a test did, told to whoever listens.

The parts that compute (numerics, worlds, goldens) know nothing of pytest. They ``emit`` a
fact; the plugin collects the facts of the running test, sends them along with its report
(through ranks and xdist workers), and counts them in the summary.

A fact is a flat, JSON-able dict with a ``kind``:

>>> with collecting() as seen:
...     emit("verdict", outcome="equal", tensors=12)
>>> seen
[{'kind': 'verdict', 'outcome': 'equal', 'tensors': 12}]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Fact = dict[str, Any]

_sinks: list[list[Fact]] = []


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
