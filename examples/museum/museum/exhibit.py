"""Mark a test as an exhibit: it must pass on the fixed version and fail on the bug, by its name.

An exhibit that is "not found" stays in the museum: its check must pass on both versions, so the day
on which it is found is noticed.
"""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from museum.usual import Practice

KINDS = (
    "order and payload",
    "reductions",
    "scale",
    "stale or baked values",
    "aliasing",
    "collectives",
    "resume and reshard",
    "memory",
    "nondeterminism",
    "compile",
)
NOT_FOUND = "not found"
FOUND_BY = (
    "proof",
    "bits",
    "layout",
    "golden",
    "conformance",
    "wait",
    "record",
    "memory",
    NOT_FOUND,
)


@dataclass(frozen=True)
class Exhibit:
    """What the table says of a bug.

    Attributes:
        thread: where people met it, such as "torchtitan#4054".
        year: of the thread.
        kind: one of ``KINDS``.
        found_by: one of ``FOUND_BY``.
        says: a part of the message, or the reason why the bug is not found.
        usual: what people compare without this package, or a sentence why nobody can.
        title: the first line of the file.
        module: the name of the exhibit's module.
    """

    thread: str
    year: int
    kind: str
    found_by: str
    says: str
    usual: Practice | str
    title: str
    module: str


EXHIBITS: dict[str, Exhibit] = {}
"""Of the modules that are imported, by the module's name."""


def exhibit(
    thread: str,
    year: int,
    *,
    kind: str,
    found_by: str,
    raises: type[BaseException] | None,
    says: str,
    usual: Practice | str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test twice: with ``bug=False`` it passes, with ``bug=True`` it fails in these words.

    Args:
        thread: the project and the number of its issue or pull request.
        year: of the thread.
        kind: what kind of bug it is, one of ``KINDS``.
        found_by: the means that finds it, one of ``FOUND_BY``.
        raises: the error of the check. Another one is a failure of the exhibit. None if the bug is
            not found.
        says: a part of its message, or the reason why the bug is not found.
        usual: what people compare without this package, or a sentence why nobody can.
    """
    assert kind in KINDS, kind
    assert found_by in FOUND_BY, found_by
    assert (raises is None) == (found_by == NOT_FOUND), "without an error nothing is found"

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        module = sys.modules[test.__module__]
        title = (inspect.getdoc(module) or "").partition("\n")[0]
        assert title, "an exhibit begins with what happened"
        name = test.__module__
        EXHIBITS[name] = Exhibit(thread, year, kind, found_by, says, usual, title, name)
        marks = []
        if raises is not None:
            error = pytest.RaisesExc(raises, match=re.escape(says))
            reason = f"the bug is found: {says}"
            marks.append(pytest.mark.xfail(raises=error, strict=True, reason=reason))
        versions = [pytest.param(False, id="fixed"), pytest.param(True, id="bug", marks=marks)]
        return pytest.mark.parametrize("bug", versions)(test)

    return mark
