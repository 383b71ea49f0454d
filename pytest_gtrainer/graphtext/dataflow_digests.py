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

from pytest_gtrainer.graphtext.dataflow import Dataflow, Operand, dataflow
from pytest_gtrainer.graphtext.extents import canonical
from pytest_gtrainer.graphtext.sections import Record
from pytest_gtrainer.graphtext.statements import SYMBOL

_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True)
class Digests:
    """Of a graph as a whole, and of its values and definitions in their order."""

    whole: str
    values: list[bytes]
    definitions: list[bytes]


def digest(records: Iterable[Record]) -> str:
    """The digest of a graph's dataflow, the same in every process."""
    return digests_of(dataflow(records)).whole


def digests_of(graph: Dataflow) -> Digests:
    """The digests of a graph and of its parts."""
    definitions = _definitions(graph)
    values = _values(graph, definitions)
    said = [d for d in graph.definitions if d.kind == "convention" and d.name != "owners"]
    parts = [
        *sorted(f"{name} = {content}".encode() for name, _, content in said),
        *[digest for value, digest in zip(graph.values, values, strict=True) if value.is_input],
        *sorted(digest for value, digest in zip(graph.values, values, strict=True) if value.operator),
        *[name.encode() + _hashed(what, operands, values, definitions) for name, what, operands, _ in graph.results],
        *sorted(_hash(sorted(values[user] for user in users)) for users in _users_of_twin_groups(graph)),
        *[str(record).encode() for record in graph.others],
    ]
    return Digests(_hash(parts).hex(), values, definitions)


def _definitions(graph: Dataflow) -> list[bytes]:
    """A definition's digest says what it stands for, never its number: that follows from the schedule."""
    digests = []
    for name, kind, content in graph.definitions:
        told = [kind, name]
        if kind == "group":
            told = [kind, _NUMBER.sub("", name), content]
        elif kind == "body":
            told = [kind, digest(graph.bodies[name])]
        digests.append(_hash(part.encode() for part in told))
    return digests


def _users_of_twin_groups(graph: Dataflow) -> Iterable[list[int]]:
    """Groups of one mesh dimension and the same ranks have equal digests: who shares one is told here."""
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, (name, kind, content) in enumerate(graph.definitions):
        if kind == "group":
            alike[_NUMBER.sub("", name), content].append(place)
    users: dict[int, list[int]] = {place: [] for places in alike.values() if len(places) > 1 for place in places}
    for user, value in enumerate(graph.values if users else ()):
        for operand in value.operands:
            if isinstance(operand, int) and ~operand in users:
                users[~operand].append(user)
    return users.values()


def _values(graph: Dataflow, known: Sequence[bytes]) -> list[bytes]:
    digests: list[bytes] = []
    for value in graph.values:
        what = f"{value.operator}\n{value.type}\n{value.arguments}"
        if value.is_input:
            what = f"{value.scope.space}{value.scope.path}\n{value.type}"
        digests.append(_hashed(what, value.operands, digests, known))
    return digests


def _hashed(what: str, operands: Sequence[Operand], digests: Sequence[bytes], known: Sequence[bytes]) -> bytes:
    """The digest of a statement whose operands have digests."""
    parts: list[bytes] = []
    symbols: list[str] = []
    for operand in operands:
        if isinstance(operand, int):
            parts.append(digests[operand] if operand >= 0 else known[~operand])
        elif isinstance(operand, str):
            parts.append(operand.encode())
        else:
            source, number = operand
            symbols.append((digests[source].hex() if source < len(digests) else "new") + f".{number}")
    if len(symbols) > 1:
        what = "\n".join(_in_order(what, symbols))
    else:
        parts += [symbol.encode() for symbol in symbols]
    return _hash([what.encode(), *parts])


def _in_order(what: str, symbols: Sequence[str]) -> Iterator[str]:
    """Each part of a statement that names symbols, spelled without regard to their numbers."""
    start = 0
    for part in what.split("\n"):
        meanings = symbols[start : start + part.count(SYMBOL)]
        yield canonical(part, meanings) if len(meanings) > 1 else "\n".join([part, *meanings])
        start += len(meanings)


def _hash(parts: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b"\n".join(parts), digest_size=16).digest()
