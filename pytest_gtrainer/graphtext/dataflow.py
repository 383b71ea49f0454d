"""The dataflow of a graph, read from its lines without torch.

A *value* is an input or one statement's result; its operands are places of earlier values, found by
resolving relative names. A *template* is what a line says apart from names: a text with a hole for each.
One walk over the lines; a text is taken apart once, whatever the number of layers it stands for.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gtrainer.graphtext.folding import unfold
from pytest_gtrainer.graphtext.header import TextError
from pytest_gtrainer.graphtext.sections import GraphLine, Layer, Scope, SectionKey
from pytest_gtrainer.graphtext.syntax import (
    AT,
    CHUNK,
    COMPUTED_SPACES,
    INPUT_SPACES,
    UNREADABLE,
    InputKey,
    LinePlace,
    absolute,
    computed,
    input_key_at,
    is_input,
    key_of,
    links_of,
    reference,
    scope_at,
)

HOLE, SYMBOL = "\0", "\1"
"""Stand in a template for a reference, and for the symbol of a size."""
_SYMBOL = re.compile(r"[a-z]+\d+")
_DEFINITION = re.compile(r"(?P<name>\w+) = (?P<value>.*)")
_HEADS = ("if ", "for ", "def ")
_BODY = "def "


# -- lines as templates

Origin = tuple[str, str]
"""What stands before a name, and the name; of an input all of it, and nothing."""


class Template(NamedTuple):
    """A text with a hole for each reference, whose items stay, and for each symbol of a size."""

    text: str
    references: tuple[Origin, ...] = ()
    symbols: tuple[str, ...] = ()


class Statement(NamedTuple):
    """``mm: bf16[2, L.u0] | must_save = aten.mm(x, L.y[1], alpha=2)``, with what is left of it wherever it stands."""

    name: str
    type: Template
    tags: str
    operator: str
    arguments: Template


class _Hole(NamedTuple):
    """Columns of a reference, which is an origin and then a name; a symbol has no ``name``."""

    start: int
    origin_end: int
    name: int | None
    end: int


def _cut(text: str, start: int, end: int, holes: Iterable[_Hole]) -> Template:
    """A part of a text, by columns, as a template."""
    pieces: list[str] = []
    references: list[Origin] = []
    symbols: list[str] = []
    for hole in holes:
        pieces += [text[start : hole.start], SYMBOL if hole.name is None else HOLE]
        if hole.name is None:
            symbols.append(text[hole.start : hole.end])
        else:
            references.append((text[hole.start : hole.origin_end], text[hole.name : hole.end]))
        start = hole.end
    return Template("".join([*pieces, text[start:end]]), tuple(references), tuple(symbols))


def statement(text: str) -> Statement | None:
    """A computed value's line; None if it is none.

    >>> found = statement("mm: bf16[2, L.u0] | must_save = aten.mm(x, L.y[1], 1e-05, dtype=f32)")
    >>> found.type, found.tags
    (Template(text='bf16[2, \\x01]', references=(), symbols=('L.u0',)), 'must_save')
    >>> found.arguments[:2]
    ('\\x00, \\x00[1], 1e-05, dtype=\\x00', (('', 'x'), ('L', 'y'), ('', 'f32')))
    """
    if (columns := _columns(text.translate(_DIGITS))) is None:
        return None
    name, kind, tags, operator, arguments = columns
    return Statement(text[name], _cut(text, *kind), text[tags], text[operator], _cut(text, *arguments))


_DIGITS = str.maketrans("123456789", "0" * 9)
"""Makes one text of lines that differ in digits alone, as a graph's lines mostly do: only such a text is parsed."""
_Cut = tuple[int, int, list[_Hole]]


@functools.lru_cache(maxsize=1 << 14)
def _columns(text: str) -> tuple[slice, _Cut, slice, slice, _Cut] | None:
    """Where name, type, tags, operator and arguments of a statement stand; None if it is none."""
    try:
        (node,) = ast.parse(text).body
        _count_characters(node, text)
        if (parts := computed(node)) is None:
            return None
        name, kind, tags, call = parts
        arguments = [*call.args, *[keyword.value for keyword in call.keywords]]
        return (
            slice(_end(name)),
            (kind.col_offset, _end(kind), sorted(map(_symbol_hole, _symbols(kind)))),
            slice(_end(kind) + len(" | "), _end(tags[-1]) if tags else 0),
            slice(call.func.col_offset, _end(call.func)),
            (_end(call.func) + 1, _end(call) - 1, sorted(hole for part in arguments for hole in _holes(part))),
        )
    except UNREADABLE:
        return None


@functools.lru_cache(maxsize=1 << 14)
def template(text: str, is_type: bool = False) -> Template:
    """An operand, or several in a container; or a type, which has holes for its symbols.

    >>> template("bf16[L.u0 + L.u1, 64]", is_type=True)
    Template(text='bf16[\\x01 + \\x01, 64]', references=(), symbols=('L.u0', 'L.u1'))
    >>> template("float8_e4m3fn[4, 4][1, 4] @ cuda", is_type=True).symbols
    ()
    """
    try:
        node = ast.parse(text, mode="eval").body
        _count_characters(node, text)
        holes = map(_symbol_hole, _symbols(node)) if is_type else _holes(node)
        return _cut(text, 0, len(text), sorted(holes))
    except UNREADABLE:
        return Template(text)


def _count_characters(tree: ast.AST, text: str) -> None:
    """Let the columns of a syntax tree count characters; ``ast`` counts bytes."""
    source = text.encode()
    for node in () if text.isascii() else ast.walk(tree):
        if isinstance(node, ast.expr):
            node.col_offset = len(source[: node.col_offset].decode())
            node.end_col_offset = len(source[: node.end_col_offset].decode())


def _end(node: ast.expr) -> int:
    return node.end_col_offset or 0


def _holes(node: ast.expr) -> Iterator[_Hole]:
    """The references of an operand, and the symbols of its sizes."""
    if isinstance(node, ast.Constant):
        return
    if isinstance(node, ast.Call):
        is_size = isinstance(node.func, ast.Name) and node.func.id == "sym"
        for part in [*node.args, *[keyword.value for keyword in node.keywords]]:
            yield from map(_symbol_hole, _symbols(part)) if is_size else _holes(part)
        return
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        try:
            head, name, _, last = reference(node)
            start, end = node.col_offset, _end(last)
            yield _Hole(start, _end(head[-1].node) if head else start, end - len(name), end)
            return
        except TextError:  # a type, as of a constant
            pass
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _holes(child)


def _symbol_hole(node: ast.expr) -> _Hole:
    return _Hole(node.col_offset, node.col_offset, None, _end(node))


def _symbols(node: ast.expr) -> Iterator[ast.expr]:
    """The symbols in a type or a size; what stands before `[` or `(` is none."""
    if isinstance(node, ast.Name | ast.Attribute):
        if _SYMBOL.fullmatch(node.id if isinstance(node, ast.Name) else node.attr):
            yield node
        return
    skipped = node.value if isinstance(node, ast.Subscript) else node.func if isinstance(node, ast.Call) else None
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and not (child is skipped and isinstance(child, ast.Name | ast.Attribute)):
            yield from _symbols(child)


# -- graphs


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
        sources: the values among the operands, as often as they stand there.
        tags: as written, but for paths, which are absolute.
        line: its place among the lines.
    """

    scope: Scope
    name: str
    operator: str
    type: str
    arguments: str
    operands: tuple[Operand, ...]
    sources: tuple[int, ...]
    tags: str
    line: int

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
    line: int


class Definition(NamedTuple):
    """A name that the head of a text gives: a process group, a body, a symbol, or a convention."""

    name: str
    kind: str
    content: str


@dataclass
class Dataflow:
    """A graph's values in the order of the schedule, and what it returns.

    Attributes:
        bodies: the lines of graphs inside the graph.
        others: lines that are no statements of a graph: those of the views.
    """

    definitions: list[Definition] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    bodies: dict[str, tuple[GraphLine, ...]] = field(default_factory=dict)
    others: list[GraphLine] = field(default_factory=list)

    @functools.cached_property
    def inputs(self) -> list[int]:
        """The places of inputs."""
        return [place for place, value in enumerate(self.values) if value.is_input]

    @functools.cached_property
    def users(self) -> list[int]:
        """The places of values that name a definition."""
        every = enumerate(self.values)
        return [place for place, value in every if any(isinstance(o, int) and o < 0 for o in value.operands)]


def dataflow(lines: Iterable[GraphLine]) -> Dataflow:
    """The values of a graph; what a reference does not find is taken as a literal."""
    with warnings.catch_warnings(action="ignore"):  # an odd escape in a string is no news to anybody
        return _Resolver().read(tuple(lines))


class _Heading(NamedTuple):
    """What lines under one heading share; ``find`` gives the values that what stands before a name leads to."""

    key: SectionKey
    scope: Scope
    find: Callable[[str], Mapping[str, int]]


class _Resolver:
    """Resolves names in one walk over the lines."""

    def __init__(self) -> None:
        self._made = Dataflow()
        self._defined: dict[str, int] = {}
        self._inputs: dict[InputKey, dict[str, int]] = defaultdict(dict)
        self._names: dict[Scope, dict[str, int]] = defaultdict(dict)
        self._symbols: dict[str, Symbol] = {}
        self._brought: Counter[int] = Counter()

    def read(self, lines: Sequence[GraphLine]) -> Dataflow:
        self._head([line for line in lines if not line.section])
        heading_of = functools.cache(self._heading)
        for number, line in enumerate(lines):
            section, heading, text = line
            under = heading_of(section, heading)
            space = under.key.space
            if space in COMPUTED_SPACES and (parts := statement(text)) is not None:
                self._computed(number, under, parts)
            elif space in INPUT_SPACES and ": " in text:
                self._input(number, under.key, text)
            elif space == "out":
                self._result(number, under, text)
            elif section:
                self._made.others.append(line)
        return self._made

    def _head(self, lines: Iterable[GraphLine]) -> None:
        """Definitions, then bodies; one ends where the next begins."""
        bodies: list[list[GraphLine]] = []
        for line in lines:
            if line.text.startswith(_BODY) and not line.heading:
                bodies.append([line])
            elif bodies:
                bodies[-1].append(line)
            elif found := _DEFINITION.fullmatch(line.text):
                kind = found["value"].partition("(")[0]
                kind = kind if kind in ("group", "size") else "convention"
                self._made.definitions.append(Definition(found["name"], kind, found["value"]))
            else:
                self._made.others.append(line)
        for first, *inner in bodies:
            name = first.text.removeprefix(_BODY).partition("(")[0]
            self._made.bodies[name] = _lines_of_body(inner)
            self._made.definitions.append(Definition(name, "body", ""))
        self._defined = {definition.name: ~place for place, definition in enumerate(self._made.definitions)}

    def _heading(self, section: str, heading: str) -> _Heading:
        key = key_of(section)
        here = LinePlace(*key)
        try:
            scope = scope_at(links_of(heading or "_"), here)
        except UNREADABLE:
            scope = Scope((heading,), key.space)

        def find(origin: str) -> Mapping[str, int]:
            if not origin:
                return self._names[scope]
            try:
                links = links_of(origin)
                if is_input(links):
                    return self._inputs[input_key_at(links, key.layer)]  # of one that comes later, too
                return self._names[scope_at(links, here)]
            except UNREADABLE:
                return {}

        return _Heading(key, scope, functools.cache(find))

    def _input(self, number: int, key: SectionKey, text: str) -> None:
        name, _, kind = text.partition(": ")
        typed = template(kind, is_type=True)
        place = len(self._made.values)
        try:
            _, path, repeat = source = input_key_at(links_of(name), key.layer)
        except UNREADABLE:
            _, path, repeat = source = key.space, name, 0
        self._inputs[source][""] = place
        operands = tuple([self._symbol(symbol, key.layer, place) for symbol in typed.symbols])
        scope = Scope((f"{path}.#{repeat}" if repeat else path,), key.space)
        self._made.values.append(Value(scope, "", "", typed.text, "", operands, (), "", number))

    def _computed(self, number: int, under: _Heading, parts: Statement) -> None:
        name, (kind, _, symbols), tags, operator, (arguments, references, _) = parts
        (_, layer), scope, find = under
        place = len(self._made.values)
        found = [find(origin).get(known) for origin, known in references]
        typed = [self._symbol(symbol, layer, place) for symbol in symbols]
        operands = (*typed, *self._operands(parts.arguments, found, layer))
        sources = tuple([known for known in operands if isinstance(known, int) and known >= 0])
        if "(" in tags:
            tags = _absolute_tags(tags, layer)
        self._made.values.append(Value(scope, name, operator, kind, arguments, operands, sources, tags, number))
        self._names[scope][name] = place

    def _operands(self, told: Template, found: Sequence[int | None], layer: Layer | None) -> list[Operand]:
        """What stands in the holes, given the values that were found: a definition or a literal for None; symbols."""
        operands: list[Operand] = []
        for (origin, name), value in zip(told.references, found, strict=True):
            if value is not None:
                operands.append(value)
            elif not origin and name in self._defined:
                operands.append(self._defined[name])
            else:
                operands.append(absolute(f"{origin}.{name}" if origin and name else origin or name, layer))
        return [*operands, *[self._symbol(symbol, layer, len(self._made.values)) for symbol in told.symbols]]

    def _symbol(self, text: str, layer: Layer | None, place: int) -> Operand:
        """A symbol belongs to the value that first mentions it."""
        if text in self._defined:
            return self._defined[text]
        name = absolute(text, layer)
        if name not in self._symbols:
            self._symbols[name] = Symbol(place, self._brought[place])
            self._brought[place] += 1
        return self._symbols[name]

    def _result(self, number: int, under: _Heading, text: str) -> None:
        """``L.w = bwd.L.view``, ``yield loss``, ``yield from {'a': fwd.x}``."""
        name, _, returned = text.partition(" = ")
        before = ""
        if text.startswith("yield "):
            name, returned = "", text.removeprefix("yield ")
            before = "from " if returned.startswith("from ") else ""
        told = template(returned.removeprefix(before))
        found = [under.find(origin).get(known) for origin, known in told.references]
        operands = self._operands(told, found, under.key.layer)
        name = absolute(name, under.key.layer)
        self._made.results.append(Result(name, before + told.text, tuple(operands), number))


@functools.lru_cache(maxsize=1 << 12)
def _absolute_tags(tags: str, layer: Layer | None) -> str:
    """Tags with full names for the paths in them.

    >>> _absolute_tags("must_save | at(L.moe) | custom(stage=1)", Layer("layers", 3))
    'must_save | at(layers.3.moe) | custom(stage=1)'
    """
    tree = ast.parse(tags, mode="eval")
    _count_characters(tree, tags)
    paths = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (AT, CHUNK) and node.args:
            paths.append(node.args[0])
    for path in sorted(paths, key=lambda path: path.col_offset, reverse=True):
        start, end = path.col_offset, _end(path)
        tags = tags[:start] + absolute(tags[start:end], layer) + tags[end:]
    return tags


def _lines_of_body(lines: Sequence[GraphLine]) -> tuple[GraphLine, ...]:
    """The lines of a body as of a graph; as they are where their text cannot be read.

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
