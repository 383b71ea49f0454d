"""The dataflow of a graph, read from its records without torch.

A *value* is an input or one statement's result; its operands are places of earlier values, found by
resolving relative names. One walk over the records; a text is taken apart once, whatever the number of
layers it stands for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gtrainer.graphtext.errors import TextError
from pytest_gtrainer.graphtext.references import (
    COMPUTED_SPACES,
    INPUT_SPACES,
    Reference,
    Scope,
    absolute,
    dotted,
    place_of,
    scope_of,
)
from pytest_gtrainer.graphtext.sections import Record
from pytest_gtrainer.graphtext.statements import HOLE, SYMBOL, Statement, argument_parts, statement, type_parts
from pytest_gtrainer.graphtext.unfolding import unfold

_DEFINITION = re.compile(r"(?P<name>\w+) = (?P<value>.*)")
_HEADS = ("if ", "for ", "def ")
_BODY = "def "


class Symbol(NamedTuple):
    """A size that is known only when the graph runs: the ``number``-th one that ``value`` brings in."""

    value: int
    number: int


Operand = int | str | Symbol
"""A place among the values (negative: among the definitions, from -1 down), a symbol, or a literal."""


class Value(NamedTuple):
    """An input, or the result of a statement.

    Attributes:
        operator: "" for an input.
        type: with a hole for each symbol.
        arguments: with a hole for each reference and symbol.
        operands: what stands in the holes: the symbols of the type, the references, the other symbols.
        sources: the values among the operands, as often as they stand there; the operands if there is nothing else.
        tags: as written, but for paths, which are absolute.
        record: its place among the records.
    """

    scope: Scope
    name: str
    operator: str
    type: str
    arguments: str
    operands: tuple[Operand, ...]
    sources: tuple[int, ...]
    tags: str
    record: int

    @property
    def is_input(self) -> bool:
        return not self.operator

    def operand_at(self, place: int) -> int | None:
        """The value that stands in a hole of the arguments; None if it is none."""
        operand = self.operands[self.type.count(SYMBOL) + self.arguments.count(HOLE, 0, place)]
        return operand if isinstance(operand, int) and operand >= 0 else None


class Result(NamedTuple):
    """One thing that the graph returns: under a name or, where it has none, by position."""

    name: str
    arguments: str
    operands: tuple[Operand, ...]
    record: int


class Definition(NamedTuple):
    """A name that the head of a text gives: a process group, a body, a symbol, or a convention."""

    name: str
    kind: str
    content: str


@dataclass(slots=True)
class Dataflow:
    """A graph's values in the order of the schedule, and what it returns."""

    definitions: list[Definition] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    bodies: dict[str, tuple[Record, ...]] = field(default_factory=dict)
    others: list[Record] = field(default_factory=list)
    """Records that are no statements of a graph: those of the views."""
    inputs: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    tagged: list[int] = field(default_factory=list)
    """The places of inputs, of values that name a definition, of values with tags."""

    @property
    def computed(self) -> Iterator[int]:
        """The places of what is no input."""
        return (place for place, value in enumerate(self.values) if value.operator)


def dataflow(records: Iterable[Record]) -> Dataflow:
    """The values of a graph; what a reference does not find is taken as a literal."""
    return _Reader().read(records)


class _Tables(dict[tuple[str | None, str], Mapping[str, int]]):
    """Where a name is looked up, by the space and path that stand before it, as seen from one heading."""

    def __init__(self, find: Callable[[str | None, str], Mapping[str, int]]) -> None:
        self._find = find

    def __missing__(self, origin: tuple[str | None, str]) -> Mapping[str, int]:
        table = self[origin] = self._find(*origin)
        return table


class _Reader:
    """Resolves names in one walk over the records."""

    def __init__(self) -> None:
        self._made = Dataflow()
        self._defined: dict[str, int] = {}
        self._inputs: dict[tuple[str, str], int] = {}
        self._names: dict[Scope, dict[str, int]] = {}
        self._here: dict[tuple[str, str], tuple[Scope, dict[str, int], _Tables]] = {}
        self._symbols: dict[str, Symbol] = {}
        self._brought: Counter[int] = Counter()
        self._body: list[Record] | None = None
        self._record = 0

    def read(self, records: Iterable[Record]) -> Dataflow:
        section, space = "", ""
        for self._record, record in enumerate(records):
            if record.section is not section:
                section = record.section
                space = place_of(section).space
            if space in COMPUTED_SPACES and (parts := statement(record.text)) is not None:
                self._computed(record, parts)
            elif space in INPUT_SPACES and ": " in record.text:
                self._input(record)
            elif space == "out":
                self._result(record)
            elif record.section == "":
                self._head(record)
            else:
                self._made.others.append(record)
        self._end_body()
        return self._made

    # -- definitions

    def _head(self, record: Record) -> None:
        found = _DEFINITION.fullmatch(record.text)
        if record.text.startswith(_BODY) and not record.heading:
            self._end_body()
            self._body = [record]
        elif self._body is not None:
            self._body.append(record)
        elif found is None:
            self._made.others.append(record)
        else:
            kind = found["value"].partition("(")[0]
            kind = kind if kind in ("group", "size") else "convention"
            self._define(Definition(found["name"], kind, found["value"]))

    def _define(self, definition: Definition) -> None:
        self._made.definitions.append(definition)
        self._defined[definition.name] = -len(self._made.definitions)

    def _end_body(self) -> None:
        """A body ends where another begins, or with the head."""
        if self._body is None:
            return
        first, *lines = self._body
        self._body = None
        name = first.text.removeprefix(_BODY).partition("(")[0]
        self._made.bodies[name] = _records_of_body(lines)
        self._define(Definition(name, "body", ""))

    # -- values

    def _input(self, record: Record) -> None:
        self._end_body()
        self._here.clear()  # as what it is called may have been looked for
        name, _, kind = record.text.partition(": ")
        space, layer = place_of(record.section)
        path = absolute(name[1:].removeprefix("."), layer) if name[:1] == space else name
        typed, symbols = type_parts(kind)
        place = len(self._made.values)
        self._inputs[space, path] = place
        self._made.inputs.append(place)
        operands = self._noted(tuple([self._symbol(symbol, record.section, place) for symbol in symbols]))
        self._made.values.append(Value(Scope(space, path), "", "", typed, "", operands, (), "", self._record))

    def _computed(self, record: Record, parts: Statement) -> None:
        if self._body is not None:
            self._end_body()
        section, heading, _ = record
        name, kind, symbols, tags, operator, arguments, references, sizes = parts
        scope, names, tables = self._here.get((section, heading)) or self._enter(section, heading)
        place = len(self._made.values)
        found = tuple([tables[space, path].get(known) for space, path, known, _ in references])
        operands: tuple[Operand, ...] = found  # type: ignore[assignment]  # all of them, as mostly
        sources: tuple[int, ...] = found  # type: ignore[assignment]
        if None in found or symbols or sizes:
            operands = self._all_operands(parts, found, section)
            sources = tuple([known for known in operands if isinstance(known, int) and known >= 0])
        if tags:
            self._made.tagged.append(place)
            tags = absolute(tags, place_of(section).layer) if "(" in tags else tags
        self._made.values.append(Value(scope, name, operator, kind, arguments, operands, sources, tags, self._record))
        names[name] = place

    def _enter(self, section: str, heading: str) -> tuple[Scope, dict[str, int], _Tables]:
        scope = scope_of(section, heading)
        names = self._names.setdefault(scope, {})
        here = self._here[section, heading] = scope, names, self._tables(section, names)
        return here

    def _all_operands(self, parts: Statement, found: Sequence[int | None], section: str) -> tuple[Operand, ...]:
        """The operands with symbols, and with what stands for references that were not found."""
        place = len(self._made.values)
        typed = [self._symbol(symbol, section, place) for symbol in parts.symbols]
        operands = self._completed(parts.references, found, section)
        sizes = [self._symbol(size, section, place) for size in parts.sizes]
        return self._noted((*typed, *operands, *sizes))

    def _noted(self, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """The operands of the next value, which is a user of definitions if one is among them."""
        if any(isinstance(operand, int) and operand < 0 for operand in operands):
            self._made.users.append(len(self._made.values))
        return operands

    def _symbol(self, text: str, section: str, place: int) -> Operand:
        """A symbol belongs to the value that first mentions it."""
        if text in self._defined:
            return self._defined[text]
        name = absolute(text, place_of(section).layer)
        known = self._symbols.get(name)
        if known is None:
            known = self._symbols[name] = Symbol(place, self._brought[place])
            self._brought[place] += 1
        return known

    def _completed(self, references: Sequence[Reference], found: Sequence[int | None], section: str) -> list[Operand]:
        """What references stand for, given the values that were found: those, definitions, literals."""
        pairs = zip(references, found, strict=True)
        return [self._unfound(known, section) if value is None else value for known, value in pairs]

    def _unfound(self, known: Reference, section: str) -> Operand:
        space, path, name, _ = known
        if known.is_input:
            return f"{space}.{path}"
        if not path and name in self._defined:
            return self._defined[name]
        return absolute(f"{path}.{name}" if path else name, place_of(section).layer)

    def _tables(self, section: str, names: Mapping[str, int]) -> _Tables:
        """Look-ups as seen from a heading that stands over these names."""
        here, layer = place_of(section)

        def find(space: str | None, path: str) -> Mapping[str, int]:
            if space in INPUT_SPACES:  # the path is all of its name
                place = self._inputs.get((str(space), absolute(path, layer)))
                return {} if place is None else {"": place}
            return self._names.setdefault(Scope(space or here, absolute(path, layer)), {}) if path else names

        return _Tables(find)

    # -- results

    def _result(self, record: Record) -> None:
        self._end_body()
        name, text = _result_parts(record.text)
        arguments, references, sizes = argument_parts(text)
        tables = self._tables(record.section, {})
        found = [tables[space, path].get(known) for space, path, known, _ in references]
        operands = self._completed(references, found, record.section)
        symbols = [self._symbol(size, record.section, len(self._made.values)) for size in sizes]
        name = dotted(absolute(name, place_of(record.section).layer))
        self._made.results.append(Result(name, arguments, (*operands, *symbols), self._record))


def _result_parts(text: str) -> tuple[str, str]:
    """The name and the value of a line of the outputs.

    >>> _result_parts("L.w = bwd.L.view"), _result_parts("yield from {'a': fwd.x}")
    (('L.w', 'bwd.L.view'), ('', "from {'a': fwd.x}"))
    """
    if text.startswith("yield "):
        return "", text.removeprefix("yield ")
    name, _, value = text.partition(" = ")
    return name, value


def _records_of_body(lines: Sequence[Record]) -> tuple[Record, ...]:
    """A body's own records; its lines as they are where its text cannot be read.

    Its sections have lost their indent, and so are told by their first word.
    """
    text = []
    for _, heading, line in lines:
        is_head = not heading and line.startswith(_HEADS)
        text.append(line if is_head or _DEFINITION.fullmatch(line) else f"  {line}")
    try:
        return unfold("\n".join(text))
    except TextError:
        return tuple(lines)
