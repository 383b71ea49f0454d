"""What versions of torch call differently, so that one golden serves them all. No torch here.

An operator is in the table if a version put it in place of another that computes the same value
with the same strides. Texts made before and since such a version are compared in the words of the
newer one, all others as they are, so that a spelling hides nothing while torch stays.
docs/goldens.md says why it is so.
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
    reason: str  # what changed in torch, and what therefore cannot be told apart
    of: str = ""  # the operator that the first operand comes from; "" for any

    def __str__(self) -> str:
        return f"{self.after} for {self.before}" + (f" of {self.of}" if self.of else "")


SPELLINGS = (
    Spelling(
        since=(2, 14),
        before="aten.detach",
        after="aten.alias",
        reason="below autograd a detach is an alias, and since 2.14 it is dispatched as one. An alias that a user "
        "wrote looks the same: across 2.14 it is not told from a detach. Both give their operand, in its storage.",
    ),
    Spelling(
        since=(2, 15),
        before="aten.view",
        after="aten._unsafe_view",
        of="aten.addmm",
        reason="`linear` with a bias flattens an input of three dimensions. It folds the product back by "
        "`_unsafe_view`, as `matmul` always did: a view that autograd does not track, which the values do not show.",
    ),
)


def spellings_between(made: str | None, running: str | None) -> tuple[Spelling, ...]:
    """Return what one of two versions of torch spells differently; nothing if a version is not
    known.
    """
    versions = [minor_version(version) if version else None for version in (made, running)]
    known = [version for version in versions if version is not None]
    if len(known) < 2:
        return ()
    return tuple(spelling for spelling in SPELLINGS if min(known) < spelling.since <= max(known))


def same_but_for(
    spellings: Iterable[Spelling], old: Sequence[GraphLine], new: Sequence[GraphLine]
) -> bool:
    """Return whether two graphs are equal, line by line, in one spelling. Names of values follow
    from it, and may differ.
    """
    return _content(old, tuple(spellings)) == _content(new, tuple(spellings))


def respelled(
    lines: Sequence[GraphLine], spellings: Iterable[Spelling]
) -> tuple[tuple[GraphLine, ...], set[Spelling]]:
    """The lines in the words of the newer torch, for people to read, and the spellings that these
    lines needed.
    """
    made, used = list(lines), set()
    graph = dataflow(lines)
    for value in graph.values:
        if (spelling := _spelling_of(value, graph, spellings)) is not None:
            used.add(spelling)
            before, after = (f" = {operator}(" for operator in (spelling.before, spelling.after))
            line = made[value.line]
            made[value.line] = line._replace(text=line.text.replace(before, after, 1))
    return tuple(made), used


def _spelling_of(value: Value, graph: Dataflow, spellings: Iterable[Spelling]) -> Spelling | None:
    source = graph.values[value.sources[0]].operator if value.sources else ""
    return next(
        (each for each in spellings if value.operator == each.before and each.of in ("", source)),
        None,
    )


def _content(lines: Sequence[GraphLine], spellings: Sequence[Spelling]) -> list[Any]:
    """All that a graph's text says but the names of its values, in the words of the newer torch."""
    graph, values = dataflow(lines), []
    for value in graph.values:
        spelling = _spelling_of(value, graph, spellings)
        values.append(
            value._replace(name="", operator=spelling.after if spelling else value.operator)
        )
    places = [(section, heading) for section, heading, _ in lines]
    bodies = [(name, _content(body, spellings)) for name, body in graph.bodies.items()]
    return [places, values, graph.inputs, graph.results, graph.definitions, graph.others, bodies]
