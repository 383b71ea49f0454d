"""Checks as methods, and as a text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType, TracebackType
from typing import TypedDict, Unpack

import torch
from torch import fx

from pytest_gtrainer.checks.arguments import OperatorPattern
from pytest_gtrainer.checks.matcher import Matcher, run_checks
from pytest_gtrainer.checks.predicates import (
    Check,
    HasType,
    InBucket,
    InDirection,
    InModule,
    Pattern,
    Predicate,
    UsedBy,
    Where,
)
from pytest_gtrainer.checks.subject import CheckError, Subject
from pytest_gtrainer.checks.syntax import parse_check, parse_pattern

_HERE = os.path.dirname(__file__)


class Conditions(TypedDict, total=False):
    """What a node must be beside what the text says.

    ``name`` captures it; a ``shape`` has None for any extent and ``...`` for any number of them.
    """

    module: str
    bucket: str | Sequence[str]
    direction: str
    dtype: torch.dtype
    shape: Sequence[int | EllipsisType | None]
    users: str
    where: Callable[[fx.Node], object]
    name: str


def check_graph(
    gm: fx.GraphModule, *, before: fx.GraphModule | None = None, mesh: Mapping[str, int] | None = None
) -> GraphChecker:
    """Checks of a graph, one method each, in a ``with`` block that ends them::

        with check_graph(gm) as check:
            check.then("all_gather_into_tensor", bucket=["layers.0"], name="g").next("wait_tensor(g)")
            check.never("reduce_scatter_tensor", direction="fwd")

    Args:
        before: the graph that a pass was given: modules that the pass has emptied may be named.
        mesh: dimensions and extents over all ranks, outermost first, which name the process groups.
    """
    return GraphChecker(Subject(gm, before=before, mesh=mesh))


def assert_graph(
    gm: fx.GraphModule,
    checks: str,
    *,
    before: fx.GraphModule | None = None,
    mesh: Mapping[str, int] | None = None,
) -> None:
    """Check a graph by a text, a check a line; empty lines and lines that begin with ``#`` say nothing::

        assert_graph(gm, '''
            then all_gather_into_tensor in bucket(layers.0) as g
            next wait_tensor(g)
            never reduce_scatter_tensor in fwd
        ''')

    Raises:
        CheckFailure: the graph is not as a check says.
        CheckError: a check cannot be read, cannot match or cannot fail, or there is none.
    """
    __tracebackhide__ = True
    file = _place(with_line=False)
    run_checks(Subject(gm, before=before, mesh=mesh), list(checks_in(checks, file)))


def checks_in(text: str, file: str) -> Iterable[Check]:
    """The checks of a text, a line each."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield parse_check(line, f"{file}, line {number} of the checks")


class GraphChecker:
    """The methods are the kinds of checks; each takes a node as text, and conditions by keyword.

    They return the checker, so that checks may be chained.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._matcher: Matcher | None = None

    def __enter__(self) -> GraphChecker:
        self._matcher = Matcher(self._subject)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        matcher, self._matcher = self._matcher, None
        if kind is None and matcher is not None:
            matcher.finish()

    def then(self, node: str = "", **conditions: Unpack[Conditions]) -> GraphChecker:
        """The first such node behind the last match."""
        __tracebackhide__ = True
        return self._run("then", node, conditions)

    def next(self, node: str = "", **conditions: Unpack[Conditions]) -> GraphChecker:
        """The node right behind the last match is such a one."""
        __tracebackhide__ = True
        return self._run("next", node, conditions)

    def same(self, node: str = "", **conditions: Unpack[Conditions]) -> GraphChecker:
        """The last match is such a node."""
        __tracebackhide__ = True
        return self._run("same", node, conditions)

    def never(self, node: str = "", **conditions: Unpack[Conditions]) -> GraphChecker:
        """No such node stands between the last match and the next, or the end."""
        __tracebackhide__ = True
        return self._run("never", node, conditions)

    def count(self, node: str, number: int, **conditions: Unpack[Conditions]) -> GraphChecker:
        """The whole graph has so many such nodes."""
        __tracebackhide__ = True
        return self._run("count", node, conditions, number)

    def start(self) -> GraphChecker:
        """The search begins again at the graph's first node; captures stay."""
        __tracebackhide__ = True
        return self._run("start", "", {})

    def _run(self, kind: str, node: str, conditions: Conditions, number: int | None = None) -> GraphChecker:
        __tracebackhide__ = True
        if self._matcher is None:
            raise CheckError("checks stand in a block, which ends them: `with check_graph(gm) as check:`")
        place = _place()
        try:
            check = Check(kind, _pattern(node, conditions), _as_text(kind, node, conditions, number), place, number)
        except CheckError as error:
            raise CheckError(f"{place}: {_as_text(kind, node, conditions, number)}\n{error}") from None
        self._matcher.run(check)
        return self


def _pattern(node: str, conditions: Conditions) -> Pattern:
    said = parse_pattern(node)
    unknown = sorted(set(conditions) - set(Conditions.__annotations__))
    if unknown:
        raise CheckError(f"there is no condition {unknown[0]!r}; there are {', '.join(Conditions.__annotations__)}")
    if said.name and "name" in conditions:
        raise CheckError(f"a node gets one name, not {said.name} and {conditions['name']}")
    return Pattern((*said.predicates, *_predicates(conditions)), conditions.get("name", said.name))


def _predicates(conditions: Conditions) -> Iterable[Predicate]:
    if "direction" in conditions:
        yield InDirection(conditions["direction"])
    if "module" in conditions:
        yield InModule(conditions["module"])
    if "bucket" in conditions:
        bucket = conditions["bucket"]
        yield InBucket((bucket,) if isinstance(bucket, str) else tuple(bucket))
    if "dtype" in conditions or "shape" in conditions:
        shape = conditions.get("shape")
        yield HasType(conditions.get("dtype"), None if shape is None else tuple(shape))
    if "users" in conditions:
        yield UsedBy(OperatorPattern(conditions["users"]))
    if "where" in conditions:
        yield Where(conditions["where"])


def _as_text(kind: str, node: str, conditions: Conditions, number: int | None) -> str:
    """The check as a message shows it.

    >>> _as_text("count", "aten.mm", {"module": "layers.0"}, 2)
    "count 2 aten.mm, module='layers.0'"
    """
    told = f"{kind} {number} {node}" if number is not None else f"{kind} {node}"
    return ", ".join([told.strip(), *(f"{name}={value!r}" for name, value in conditions.items())])


def _place(*, with_line: bool = True) -> str:
    """File and line of the code that called this package, relative to where one stands if below."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _HERE:
        frame = frame.f_back
    path = os.path.relpath(frame.f_code.co_filename)
    file = frame.f_code.co_filename if path.startswith("..") else path
    return f"{file}:{frame.f_lineno}" if with_line else file
