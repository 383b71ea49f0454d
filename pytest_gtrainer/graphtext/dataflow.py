"""Read the dataflow of a graph from the lines of its text, without torch.

A *value* is an input or the result of one statement. Its operands are places of earlier values,
found by resolving relative names. A *template* is a line without its names. One walk over the lines
is enough, because a statement names only what stands above it; results are read last. A line's
text is parsed once, however many layers it stands for.
"""

import functools
import re
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gtrainer.graphtext import syntax
from pytest_gtrainer.graphtext.folding import MOST_LINES, LineBudget, unfold
from pytest_gtrainer.graphtext.header import TextError
from pytest_gtrainer.graphtext.sections import GraphLine, Layer, Scope, SectionKey
from pytest_gtrainer.graphtext.syntax import UNREADABLE, LinePlace, absolute, links_of

# In a template: the place of a reference, and of a symbol of a size. No text contains them.
HOLE, SYMBOL = "\0", "\1"
_DEFINITION = re.compile(r"(?P<name>\w+|module\..+?) = (?P<value>.*)")
_BODY = "def "

Reference = tuple[str, str]
"""Origin and name: ``("saved.L", "mm")`` for ``saved.L.mm``, ``("L.w", "")`` for an input."""


class Template(NamedTuple):
    """A text with a hole for each reference, whose items stay, and for each symbol of a size."""

    text: str
    references: tuple[Reference, ...] = ()
    symbols: tuple[str, ...] = ()


class Statement(NamedTuple):
    """The parts of ``mm: bf16[2, L.u0] | must_save = aten.mm(x, L.y[1], alpha=2)``."""

    name: str
    type: Template
    tags: str
    operator: str
    arguments: Template


STRING = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_BUCKET = rf"bucket\((?:{STRING}|[^()\"'])*\)"
_NAME = r"[^\W\d]\w*"
_CHAIN = (
    rf"(?:{_BUCKET}|{_NAME})(?:\.{_BUCKET}|\.{_NAME}|\[(?:-?\d+|i(?: ?[+-] ?\d+)?|{STRING})\])*"
)
_TOKEN = re.compile(
    rf"{STRING}|\d[\w.]*|(?:True|False|None)\b|(?P<sym>sym\()|[^\W\d][\w.]*(?<!bucket)(?=[=(])"
    rf"|(?P<chain>{_CHAIN})|(?P<parenthesis>[()])"
)
_NAMED = re.compile(r"(?:(?P<origin>.+)\.)?(?P<name>\w+)(?:\[-?\d+\])*")
_SYMBOL_NAME = re.compile(r"(?:.+\.)?[a-z]+\d+")
_TAG = rf"\w+(?:\((?:{STRING}|[^\"'])*?\))?"
_STATEMENT = re.compile(
    rf"({_NAME}): (.*?)(?: \| ({_TAG}(?: \| {_TAG})*))? = ({_CHAIN})\((.*)\)", re.DOTALL
)
_PATH_OF_TAG = re.compile(
    rf"{STRING}|(?P<tag>\b(?:{syntax.AT}|{syntax.CHUNK})\()(?P<path>{_CHAIN})"
)


@functools.lru_cache(maxsize=1 << 14)
def statement(text: str) -> Statement | None:
    """Parse the line of a computed value; None for any other line."""
    if (found := _STATEMENT.fullmatch(text)) is None:
        return None
    name, kind, tags, operator, arguments = found.groups(default="")
    return Statement(name, template(kind, is_type=True), tags, operator, template(arguments))


@functools.lru_cache(maxsize=1 << 14)
def template(text: str, is_type: bool = False) -> Template:
    """Replace the references of operands, or of a type, by holes.

    Names inside ``sym(...)`` are symbols of sizes, and so is every name of a type.
    """
    references: list[Reference] = []
    symbols: list[str] = []
    pieces: list[str] = []
    end = 0
    # Inside a size: the number of its open parentheses. A type never leaves it.
    depth = int(is_type)
    for match in _TOKEN.finditer(text):
        token = match[0]
        pieces.append(text[end : match.start()])
        end = match.end()
        if match["sym"]:
            depth = 1
        elif match["parenthesis"] and depth:
            depth += 1 if token == "(" else -1
        elif match["chain"] and depth:
            # ``f32[`` of a type looks like a symbol, but for its bracket.
            if _SYMBOL_NAME.fullmatch(token) and text[end : end + 1] != "[":
                symbols.append(token)
                token = SYMBOL
        elif match["chain"] and token[0] in syntax.INPUT_SPACES and token[1:2] in (".", "["):
            references.append((token, ""))
            token = HOLE
        elif match["chain"] and (named := _NAMED.fullmatch(token)):
            references.append((named["origin"] or "", named["name"]))
            token = HOLE + token[named.end("name") :]

        pieces.append(token)

    pieces.append(text[end:])
    return Template("".join(pieces), tuple(references), tuple(symbols))


class Symbol(NamedTuple):
    """A data-dependent size: the ``number``-th one that ``value`` brings in."""

    value: int
    number: int


Operand = int | str | Symbol
"""A place among the values, a symbol, or a literal. Definitions have the places -1, -2, ..."""


class Value(NamedTuple):
    """An input, or the result of a statement."""

    scope: Scope
    name: str
    operator: str  # "" for an input
    type: str  # with a hole for each symbol
    arguments: str  # with a hole for each reference and symbol
    operands: tuple[Operand, ...]  # symbols of the type, then references, then other symbols
    sources: tuple[int, ...]  # the values among the operands, with repetitions
    tags: str  # as written, with absolute paths
    line: int  # its place among the lines

    @property
    def is_input(self) -> bool:
        return not self.operator


class Result(NamedTuple):
    """One value that the graph returns; its name is empty where position identifies it."""

    name: str
    arguments: str
    operands: tuple[Operand, ...]
    line: int


class Definition(NamedTuple):
    """A definition in the head of a text."""

    name: str
    kind: str  # "group", "size", "module", "body" or "convention"
    content: str


@dataclass
class Dataflow:
    """A graph's values in the order of the schedule, and what it returns."""

    definitions: list[Definition] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    # the lines of graphs inside the graph, by name
    bodies: dict[str, tuple[GraphLine, ...]] = field(default_factory=dict)
    others: list[GraphLine] = field(default_factory=list)  # lines of views, which are no statements

    @property
    def inputs(self) -> list[int]:
        """Places of the inputs."""
        return [place for place, value in enumerate(self.values) if value.is_input]

    @property
    def users(self) -> list[int]:
        """Places of the values that name a definition."""
        places = []
        for place, value in enumerate(self.values):
            if any(isinstance(operand, int) and operand < 0 for operand in value.operands):
                places.append(place)
        return places


def dataflow(lines: Iterable[GraphLine]) -> Dataflow:
    """Return the dataflow of a graph. A reference that leads to no value becomes a literal."""
    # Python warns of an odd escape in a string of the text, which nobody needs to know.
    with warnings.catch_warnings(action="ignore"):
        return _DataflowReader().read(tuple(lines))


_Find = Callable[[str], Mapping[str, int]]
"""Returns the values below an origin, by their names."""


class _DataflowReader:
    """Reads the lines of one graph in their order, and resolves names of earlier lines."""

    def __init__(self) -> None:
        self._graph = Dataflow()
        self._defined: dict[str, int] = {}
        self._inputs: dict[syntax.InputKey, dict[str, int]] = defaultdict(dict)
        self._names: dict[Scope, dict[str, int]] = defaultdict(dict)
        self._symbols: dict[str, Symbol] = {}
        self._symbols_of: Counter[int] = Counter()

    def read(self, lines: Sequence[GraphLine]) -> Dataflow:
        self._read_head([line for line in lines if not line.section])
        heading_of = functools.cache(self._resolve_heading)
        for number, line in enumerate(lines):
            (space, layer), scope, find = heading_of(line.section, line.heading)
            if space in syntax.COMPUTED_SPACES and (parts := statement(line.text)) is not None:
                self._read_statement(number, parts, layer, scope, find)
            elif space in syntax.INPUT_SPACES and ": " in line.text:
                self._read_input(number, SectionKey(space, layer), line.text)
            elif space == "out":
                self._read_result(number, line.text, layer, find)
            elif line.section:
                self._graph.others.append(line)

        return self._graph

    def _read_head(self, lines: Iterable[GraphLine]) -> None:
        """Read definitions, then bodies. A body ends where the next one begins."""
        bodies: list[list[GraphLine]] = []
        for line in lines:
            if line.text.startswith(_BODY):
                bodies.append([line])
            elif bodies:
                bodies[-1].append(line)
            elif found := _DEFINITION.fullmatch(line.text):
                kind = found["value"].partition("(")[0]
                if found["name"].startswith("module."):
                    kind = "module"
                elif kind not in ("group", "size"):
                    kind = "convention"
                self._graph.definitions.append(Definition(found["name"], kind, found["value"]))
            else:
                self._graph.others.append(line)

        budget = LineBudget(MOST_LINES)
        for first, *inner in bodies:
            name = first.text.removeprefix(_BODY).partition("(")[0]
            text = textwrap.dedent("\n".join(line.text for line in inner))
            try:
                self._graph.bodies[name] = unfold(text, budget)
            except TextError:
                self._graph.bodies[name] = tuple(inner)
            self._graph.definitions.append(Definition(name, "body", ""))

        for place, definition in enumerate(self._graph.definitions):
            self._defined[definition.name] = ~place

    def _resolve_heading(self, section: str, heading: str) -> tuple[SectionKey, Scope, _Find]:
        """Return the section, the scope, and the resolver of origins for lines under a heading."""
        key = syntax.key_of(section)
        here = LinePlace(*key)
        try:
            scope = syntax.scope_at(links_of(heading or "_"), here)
        except UNREADABLE:
            scope = Scope((heading,), key.space)

        def find(origin: str) -> Mapping[str, int]:
            if not origin:
                return self._names[scope]
            try:
                links = links_of(origin)
                if syntax.is_input(links):
                    # The result is cached, so it has to be the dict that a later input fills.
                    return self._inputs[syntax.input_key_at(links, key.layer)]
                return self._names[syntax.scope_at(links, here)]
            except UNREADABLE:
                return {}

        return key, scope, functools.cache(find)

    def _read_input(self, number: int, key: SectionKey, text: str) -> None:
        name, _, kind = text.partition(": ")
        typed = template(kind, is_type=True)
        place = len(self._graph.values)
        try:
            _, path, repeat = source = syntax.input_key_at(links_of(name), key.layer)
        except UNREADABLE:
            _, path, repeat = source = syntax.InputKey(key.space, name)

        self._inputs[source][""] = place
        operands = tuple([self._resolve_symbol(symbol, key.layer) for symbol in typed.symbols])
        if repeat:
            path += f".#{repeat}"
        scope = Scope((path,), key.space)
        self._graph.values.append(Value(scope, "", "", typed.text, "", operands, (), "", number))

    def _read_statement(
        self, number: int, parts: Statement, layer: Layer | None, scope: Scope, find: _Find
    ) -> None:
        name, (kind, _, symbols), tags, operator, arguments = parts
        typed = [self._resolve_symbol(symbol, layer) for symbol in symbols]
        operands = (*typed, *self._resolve_operands(arguments, layer, find))
        sources = tuple([known for known in operands if isinstance(known, int) and known >= 0])

        def spell_absolute(token: re.Match[str]) -> str:
            if not token["tag"]:
                return token[0]  # a string, which may hold anything
            return token["tag"] + absolute(token["path"], layer)

        # A tag such as ``at(L.mlp)`` names a module relative to the layer of its line.
        tags = _PATH_OF_TAG.sub(spell_absolute, tags)
        self._names[scope][name] = len(self._graph.values)
        self._graph.values.append(
            Value(scope, name, operator, kind, arguments.text, operands, sources, tags, number)
        )

    def _resolve_operands(
        self, arguments: Template, layer: Layer | None, find: _Find
    ) -> list[Operand]:
        """Return the operands of a template: its references, then its symbols."""
        operands: list[Operand] = []
        for origin, name in arguments.references:
            place = find(origin).get(name)
            if place is None and not origin:
                place = self._defined.get(name)
            if place is None:
                literal = ".".join(filter(None, (origin, name)))
                operands.append(absolute(literal, layer))
            else:
                operands.append(place)

        for symbol in arguments.symbols:
            operands.append(self._resolve_symbol(symbol, layer))
        return operands

    def _resolve_symbol(self, text: str, layer: Layer | None) -> Operand:
        """Return the symbol of that name; a new one belongs to the value that is being read."""
        if text in self._defined:
            return self._defined[text]
        name, place = absolute(text, layer), len(self._graph.values)
        if name not in self._symbols:
            self._symbols[name] = Symbol(place, self._symbols_of[place])
            self._symbols_of[place] += 1
        return self._symbols[name]

    def _read_result(self, number: int, text: str, layer: Layer | None, find: _Find) -> None:
        """Read ``L.w = bwd.L.view``, ``yield loss`` or ``yield from {'a': fwd.x}``."""
        name, _, returned = text.partition(" = ")
        prefix = ""
        if text.startswith("yield "):
            name, returned = "", text.removeprefix("yield ")
            if returned.startswith("from "):
                prefix = "from "
        arguments = template(returned.removeprefix(prefix))
        operands = tuple(self._resolve_operands(arguments, layer, find))
        result = Result(absolute(name, layer), prefix + arguments.text, operands, number)
        self._graph.results.append(result)
