"""The dataflow of a graph, read from its records without torch.

A *value* is an input or one statement's result; its operands are places of earlier values, found by
resolving relative names. One walk over the records; a text is taken apart once, whatever the number of
layers it stands for.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gtrainer.graphtext.folding import unfold
from pytest_gtrainer.graphtext.header import TextError
from pytest_gtrainer.graphtext.sections import GraphLine, Layer, Scope, SectionKey, scope_of
from pytest_gtrainer.graphtext.syntax import (
    AT,
    CHUNK,
    COMPUTED_SPACES,
    HOLE,
    INPUT_SPACES,
    SYMBOL,
    UNREADABLE,
    InputKey,
    LinePlace,
    Origin,
    Statement,
    Template,
    absolute,
    input_key_at,
    is_input,
    key_of,
    links_of,
    operand_template,
    scope_at,
    statement,
    type_template,
)

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
    bodies: dict[str, tuple[GraphLine, ...]] = field(default_factory=dict)
    others: list[GraphLine] = field(default_factory=list)
    """Records that are no statements of a graph: those of the views."""
    inputs: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    tagged: list[int] = field(default_factory=list)
    """The places of inputs, of values that name a definition, of values with tags."""

    @property
    def computed(self) -> Iterator[int]:
        """The places of what is no input."""
        return (place for place, value in enumerate(self.values) if value.operator)


def dataflow(records: Iterable[GraphLine]) -> Dataflow:
    """The values of a graph; what a reference does not find is taken as a literal."""
    with warnings.catch_warnings(action="ignore"):  # an odd escape in a string is no news to anybody
        return _Resolver().read(records)


class _Tables(dict[str, Mapping[str, int]]):
    """Where a name is looked up, by what stands before it, as seen from one heading."""

    def __init__(self, find: Callable[[str], Mapping[str, int]]) -> None:
        self._find = find

    def __missing__(self, origin: str) -> Mapping[str, int]:
        table = self[origin] = self._find(origin)
        return table


class _Resolver:
    """Resolves names in one walk over the records."""

    def __init__(self) -> None:
        self._made = Dataflow()
        self._defined: dict[str, int] = {}
        self._inputs: dict[InputKey, int] = {}
        self._names: dict[Scope, dict[str, int]] = {}
        self._here: dict[tuple[str, str], tuple[Scope, dict[str, int], _Tables]] = {}
        self._symbols: dict[str, Symbol] = {}
        self._brought: Counter[int] = Counter()
        self._body: list[GraphLine] | None = None
        self._record = 0

    def read(self, records: Iterable[GraphLine]) -> Dataflow:
        section, key = "", SectionKey("", None)
        for self._record, record in enumerate(records):
            if record.section is not section:
                section, key = record.section, key_of(record.section)
            if key.space in COMPUTED_SPACES and (parts := statement(record.text)) is not None:
                self._computed(record, key, parts)
            elif key.space in INPUT_SPACES and ": " in record.text:
                self._input(record, key)
            elif key.space == "out":
                self._result(record, key)
            elif section == "":
                self._head(record)
            else:
                self._made.others.append(record)
        self._end_body()
        return self._made

    # -- definitions

    def _head(self, record: GraphLine) -> None:
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

    def _input(self, record: GraphLine, key: SectionKey) -> None:
        self._end_body()
        self._here.clear()  # as what it is called may have been looked for
        name, _, kind = record.text.partition(": ")
        typed = type_template(kind)
        place = len(self._made.values)
        try:
            _, path, repeat = source = input_key_at(links_of(name))(key.layer)
        except UNREADABLE:
            _, path, repeat = source = key.space, name, 0
        self._inputs[source] = place
        self._made.inputs.append(place)
        operands = self._noted(tuple([self._symbol(symbol, key.layer, place) for symbol in typed.symbols]))
        scope = scope_of((f"{path}.#{repeat}" if repeat else path,), key.space)
        self._made.values.append(Value(scope, "", "", typed.text, "", operands, (), "", self._record))

    def _computed(self, record: GraphLine, key: SectionKey, parts: Statement) -> None:
        if self._body is not None:
            self._end_body()
        section, heading, _ = record
        name, (kind, _, symbols), tags, operator, (arguments, references, sizes) = parts
        here = self._here.get((section, heading))
        if here is None:
            scope = _scope_under(key, heading)
            names = self._names.setdefault(scope, {})
            here = self._here[section, heading] = scope, names, self._tables(key, names)
        scope, names, tables = here
        place = len(self._made.values)
        found = tuple([tables[origin].get(known) for origin, known in references])
        operands: tuple[Operand, ...] = found  # type: ignore[assignment]  # all of them, as mostly
        sources: tuple[int, ...] = found  # type: ignore[assignment]
        if None in found or symbols or sizes:
            typed = [self._symbol(symbol, key.layer, place) for symbol in symbols]
            operands = self._noted((*typed, *self._completed(parts.arguments, found, key.layer, place)))
            sources = tuple([known for known in operands if isinstance(known, int) and known >= 0])
        if tags:
            self._made.tagged.append(place)
            tags = _absolute_tags(tags, key.layer) if "(" in tags else tags
        self._made.values.append(Value(scope, name, operator, kind, arguments, operands, sources, tags, self._record))
        names[name] = place

    def _completed(
        self, template: Template, found: Sequence[int | None], layer: Layer | None, place: int
    ) -> list[Operand]:
        """What stands in the holes of arguments, given the values that were found; then their symbols."""
        pairs = zip(template.references, found, strict=True)
        operands = [self._unfound(known, layer) if value is None else value for known, value in pairs]
        return [*operands, *[self._symbol(symbol, layer, place) for symbol in template.symbols]]

    def _unfound(self, known: Origin, layer: Layer | None) -> Operand:
        """What stands for a reference that names no value: a definition, or a literal."""
        origin, name = known
        if not origin and name in self._defined:
            return self._defined[name]
        return absolute(f"{origin}.{name}" if origin and name else origin or name, layer)

    def _noted(self, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """The operands of the next value, which is a user of definitions if one is among them."""
        if any(isinstance(operand, int) and operand < 0 for operand in operands):
            self._made.users.append(len(self._made.values))
        return operands

    def _symbol(self, text: str, layer: Layer | None, place: int) -> Operand:
        """A symbol belongs to the value that first mentions it."""
        if text in self._defined:
            return self._defined[text]
        name = absolute(text, layer)
        known = self._symbols.get(name)
        if known is None:
            known = self._symbols[name] = Symbol(place, self._brought[place])
            self._brought[place] += 1
        return known

    def _tables(self, key: SectionKey, names: Mapping[str, int]) -> _Tables:
        """Look-ups as seen from a heading that stands over these names."""

        def find(origin: str) -> Mapping[str, int]:
            if not origin:
                return names
            try:
                links = links_of(origin)
                if is_input(links):
                    place = self._inputs.get(input_key_at(links)(key.layer))
                    return {} if place is None else {"": place}
                return self._names.setdefault(scope_at(links)(LinePlace(*key)), {})
            except UNREADABLE:
                return {}

        return _Tables(find)

    # -- results

    def _result(self, record: GraphLine, key: SectionKey) -> None:
        """``L.w = bwd.L.view``, ``yield loss``, ``yield from {'a': fwd.x}``."""
        self._end_body()
        name, _, text = record.text.partition(" = ")
        before = ""
        if record.text.startswith("yield "):
            name, text = "", record.text.removeprefix("yield ")
            before = "from " if text.startswith("from ") else ""
        returned = operand_template(text.removeprefix(before))
        tables = self._tables(key, {})
        found = [tables[origin].get(known) for origin, known in returned.references]
        operands = self._completed(returned, found, key.layer, len(self._made.values))
        name = absolute(name, key.layer)
        self._made.results.append(Result(name, before + returned.text, tuple(operands), self._record))


@functools.lru_cache(maxsize=1 << 16)
def _scope_under(key: SectionKey, heading: str) -> Scope:
    """The scope of a ``with`` heading.

    >>> _scope_under(SectionKey("bwd", Layer("layers", 3)), "L.attention"), _scope_under(SectionKey("fwd", None), "")
    (bwd layers.3.attention, fwd _)
    """
    try:
        return scope_at(links_of(heading or "_"))(LinePlace(*key))
    except UNREADABLE:
        return scope_of((heading,), key.space)


@functools.lru_cache(maxsize=1 << 12)
def _absolute_tags(tags: str, layer: Layer | None) -> str:
    """Tags with full names for the paths in them.

    >>> _absolute_tags("must_save | at(L.moe) | custom(stage=1)", Layer("layers", 3))
    'must_save | at(layers.3.moe) | custom(stage=1)'
    """
    paths = []
    for node in ast.walk(ast.parse(tags, mode="eval")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (AT, CHUNK) and node.args:
            paths.append(node.args[0])
    source = tags.encode()
    for path in sorted(paths, key=lambda path: path.col_offset, reverse=True):
        start, end = path.col_offset, path.end_col_offset or 0
        source = source[:start] + absolute(source[start:end].decode(), layer).encode() + source[end:]
    return source.decode()


def _records_of_body(lines: Sequence[GraphLine]) -> tuple[GraphLine, ...]:
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
