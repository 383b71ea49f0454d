"""Digests of a graph's dataflow that no order of the schedule changes.

The digest of a value says its operator, type, literals and the digests of its operands, never its
name or its place. That of a graph is made of all of them without order, so equal digests mean: the
same computation, maybe in another order.

Left out are modules, buckets and tags, the examples of symbols, and the order in which values in place
are changed and random numbers drawn, for which there is ``effects``. One walk over the values.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pytest_gtrainer.graphtext.dataflow import Dataflow, Definition, Operand, dataflow
from pytest_gtrainer.graphtext.extents import canonical
from pytest_gtrainer.graphtext.sections import Record
from pytest_gtrainer.graphtext.statements import SYMBOL

T = TypeVar("T")
_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True)
class Digests(Generic[T]):
    """Of a graph as a whole, and of its values and definitions in their order."""

    whole: T
    values: list[T]
    definitions: list[T]


class Mixer(Protocol[T]):
    """Makes one digest of texts and other digests: equal ones of equal parts, others of others."""

    def of(self, parts: Iterable[Any]) -> T: ...

    def spell(self, digest: T) -> str: ...


class Hashes:
    """Digests that may be kept, the same in every process."""

    def of(self, parts: Iterable[Any]) -> bytes:
        spelled = [part.encode() if isinstance(part, str) else part for part in parts]
        return hashlib.blake2b(b"\n".join(spelled), digest_size=16).digest()

    def spell(self, digest: bytes) -> str:
        return digest.hex()


class Numbers:
    """Numbers in place of digests: several times quicker, and good for graphs that share one of these."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def of(self, parts: Iterable[Any]) -> int:
        return self._known.setdefault(tuple(parts), len(self._known))

    def spell(self, digest: int) -> str:
        return str(digest)


def digest(records: Iterable[Record]) -> str:
    """The digest of a graph's dataflow, the same in every process."""
    return digests_of(dataflow(records), Hashes()).whole.hex()


def digests_of(graph: Dataflow, mixer: Mixer[T]) -> Digests[T]:
    """The digests of a graph and of its parts."""
    definitions = [_of_definition(graph, definition, mixer) for definition in graph.definitions]
    values = _values(graph, definitions, mixer)
    said = [d for d in graph.definitions if d.kind == "convention" and d.name != "owners"]
    parts = [
        *sorted(f"{name} = {content}" for name, _, content in said),
        *[values[place] for place in graph.inputs],
        *_sorted(values[place] for place in graph.computed),
        *[
            mixer.of([name, _mixed(what, operands, values, definitions, mixer)])
            for name, what, operands, _ in graph.results
        ],
        *_sorted(mixer.of(_sorted(values[user] for user in users)) for users in _users_of_twin_groups(graph)),
        *[str(record) for record in graph.others],
    ]
    return Digests(mixer.of(parts), values, definitions)


def _sorted(digests: Iterable[T]) -> list[T]:
    return sorted(digests)  # type: ignore[type-var]  # bytes or numbers


def _of_definition(graph: Dataflow, definition: Definition, mixer: Mixer[T]) -> T:
    """A definition's digest says what it stands for, never its number: that follows from the schedule."""
    name, kind, content = definition
    if kind == "group":
        return mixer.of([kind, _NUMBER.sub("", name), content])
    if kind == "body":
        return mixer.of([kind, digests_of(dataflow(graph.bodies[name]), mixer).whole])
    return mixer.of([kind, name])


def _users_of_twin_groups(graph: Dataflow) -> Iterable[list[int]]:
    """Groups of one mesh dimension and the same ranks have equal digests: who shares one is told here."""
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, (name, kind, content) in enumerate(graph.definitions):
        if kind == "group":
            alike[_NUMBER.sub("", name), content].append(place)
    users: dict[int, list[int]] = {place: [] for places in alike.values() if len(places) > 1 for place in places}
    for user in graph.users if users else ():
        for operand in graph.values[user].operands:
            if isinstance(operand, int) and ~operand in users:
                users[~operand].append(user)
    return users.values()


def _values(graph: Dataflow, definitions: Sequence[T], mixer: Mixer[T]) -> list[T]:
    digests: list[T] = []
    for scope, _, operator, kind, arguments, operands, sources, *_ in graph.values:
        what = f"{operator}\n{kind}\n{arguments}" if operator else f"{scope.space}{scope.path}\n{kind}"
        if operands is sources:  # all of them are values, as mostly
            digests.append(mixer.of((what, *[digests[source] for source in sources])))
        else:
            digests.append(_mixed(what, operands, digests, definitions, mixer))
    return digests


def _mixed(
    what: str, operands: Sequence[Operand], digests: Sequence[T], definitions: Sequence[T], mixer: Mixer[T]
) -> T:
    """The digest of a statement whose operands have digests."""
    parts: list[Any] = []
    symbols: list[str] = []
    for operand in operands:
        if isinstance(operand, int):
            parts.append(digests[operand] if operand >= 0 else definitions[~operand])
        elif isinstance(operand, str):
            parts.append(operand)
        else:
            source, number = operand
            symbols.append((mixer.spell(digests[source]) if source < len(digests) else "new") + f".{number}")
    if len(symbols) > 1:
        what = "\n".join(_in_order(what, symbols))
    else:
        parts += symbols
    return mixer.of([what, *parts])


def _in_order(what: str, symbols: Sequence[str]) -> Iterator[str]:
    """Each part of a statement that names symbols, spelled without regard to their numbers."""
    start = 0
    for part in what.split("\n"):
        meanings = symbols[start : start + part.count(SYMBOL)]
        yield canonical(part, meanings) if len(meanings) > 1 else "\n".join([part, *meanings])
        start += len(meanings)
