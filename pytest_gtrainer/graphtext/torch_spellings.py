"""Operators that versions of torch call differently, so one golden serves all. No torch here.

An operator is in the table if a version put it in place of another that computes the same value
with the same strides. Texts made before and since such a version are compared in the words of the
newer one. All others are compared as they are, so a spelling hides nothing while torch stays.
docs/goldens.md gives the reasons.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gtrainer.environment import minor_version
from pytest_gtrainer.graphtext.dataflow import Dataflow, Value, dataflow
from pytest_gtrainer.graphtext.sections import GraphLine


@dataclass(frozen=True, slots=True)
class Spelling:
    """An operator that torch spells in another way."""

    since: tuple[int, int]  # the version that brought it
    before: str  # the operator in older versions, without ``.default``
    after: str  # the operator in newer ones
    reason: str  # the change in torch, and the difference that no check can see because of it
    of: str = ""  # the operator that computes the first operand; "" for any

    def __str__(self) -> str:
        words = f"{self.after} for {self.before}"
        if self.of:
            words += f" of {self.of}"
        return words


SPELLINGS = (
    Spelling(
        since=(2, 14),
        before="aten.detach",
        after="aten.alias",
        reason="below autograd a detach is an alias, and since 2.14 it is dispatched as one. An "
        "alias that a user wrote looks the same, so across 2.14 it passes for a detach. Both "
        "return their operand, in its storage.",
    ),
    Spelling(
        since=(2, 15),
        before="aten.view",
        after="aten._unsafe_view",
        of="aten.addmm",
        reason="`linear` with a bias flattens an input of three dimensions. It folds the product "
        "back by `_unsafe_view`, as `matmul` always did: a view that autograd does not track, "
        "which the values do not show.",
    ),
)


def spellings_between(made: str | None, running: str | None) -> tuple[Spelling, ...]:
    """Return the spellings that differ between two versions; none if a version is not known."""
    old, new = minor_version(made or ""), minor_version(running or "")
    if old is None or new is None:
        return ()
    # The golden may be of the newer version, too.
    old, new = sorted([old, new])
    return tuple(spelling for spelling in SPELLINGS if old < spelling.since <= new)


def same_but_for(
    spellings: Iterable[Spelling], old: Sequence[GraphLine], new: Sequence[GraphLine]
) -> bool:
    """Return whether two graphs are equal, line by line, in the words of the newer torch.

    Names of values do not count, because a value is named after its operator.
    """
    return _content(old, tuple(spellings)) == _content(new, tuple(spellings))


def respelled(
    lines: Sequence[GraphLine], spellings: Iterable[Spelling]
) -> tuple[tuple[GraphLine, ...], set[Spelling]]:
    """Return the lines in the words of the newer torch, and the spellings that they needed."""
    found, used = list(lines), set()
    graph = dataflow(lines)
    for value in graph.values:
        spelling = _spelling_of(value, graph, spellings)
        if spelling is not None:
            used.add(spelling)
            line = found[value.line]
            # The operator stands before the arguments, so its first occurrence is the call.
            text = line.text.replace(f" = {spelling.before}(", f" = {spelling.after}(", 1)
            found[value.line] = line._replace(text=text)
    return tuple(found), used


def _spelling_of(value: Value, graph: Dataflow, spellings: Iterable[Spelling]) -> Spelling | None:
    """Return the spelling that applies to a value; None for none."""
    source = graph.values[value.sources[0]].operator if value.sources else ""
    for spelling in spellings:
        if value.operator == spelling.before and spelling.of in ("", source):
            return spelling
    return None


def _content(lines: Sequence[GraphLine], spellings: Sequence[Spelling]) -> list[Any]:
    """Return the content of a text without names of values, in the words of the newer torch."""
    graph, values = dataflow(lines), []
    for value in graph.values:
        spelling = _spelling_of(value, graph, spellings)
        operator = spelling.after if spelling else value.operator
        values.append(value._replace(name="", operator=operator))
    places = [line[:2] for line in lines]  # section and heading
    bodies = [(name, _content(body, spellings)) for name, body in graph.bodies.items()]
    return [places, values, graph.inputs, graph.results, graph.definitions, graph.others, bodies]
