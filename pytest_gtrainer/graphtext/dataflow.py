"""The dataflow of a graph, read from its lines without torch, in one walk.

A *value* is an input or one statement's result; its operands are places of earlier values, found by resolving relative
names. A *template* is what a line says apart from names. A text is taken apart once, however many layers it stands for.
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

HOLE, SYMBOL = "\0", "\1"  # stand in a template for a reference, and for the symbol of a size
_DEFINITION = re.compile(r"(?P<name>\w+|module\..+?) = (?P<value>.*)")
_BODY = "def "

Origin = tuple[
    str, str
]  # what stands before a name, and the name; of an input all of it, and nothing


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


_STRING = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_BUCKET = rf"bucket\((?:{_STRING}|[^()\"'])*\)"
_NAME = r"[^\W\d]\w*"
_CHAIN = (
    rf"(?:{_BUCKET}|{_NAME})(?:\.{_BUCKET}|\.{_NAME}|\[(?:-?\d+|i(?: ?[+-] ?\d+)?|{_STRING})\])*"
)
_TOKEN = re.compile(
    rf"{_STRING}|\d[\w.]*|(?:True|False|None)\b|(?P<sym>sym\()|[^\W\d][\w.]*(?<!bucket)(?=[=(])"
    rf"|(?P<chain>{_CHAIN})|(?P<parenthesis>[()])"
)
_NAMED = re.compile(r"(?:(?P<origin>.+)\.)?(?P<name>\w+)(?:\[-?\d+\])*")
_SYMBOL = re.compile(r"(?:.+\.)?[a-z]+\d+")
_TAG = rf"\w+(?:\((?:{_STRING}|[^\"'])*?\))?"
_STATEMENT = re.compile(
    rf"({_NAME}): (.*?)(?: \| ({_TAG}(?: \| {_TAG})*))? = ({_CHAIN})\((.*)\)", re.DOTALL
)
_PATH_OF_TAG = re.compile(
    rf"{_STRING}|(?P<tag>\b(?:{syntax.AT}|{syntax.CHUNK})\()(?P<path>{_CHAIN})"
)


@functools.lru_cache(maxsize=1 << 14)
def statement(text: str) -> Statement | None:
    """A computed value's line; None if it is none."""
    if (found := _STATEMENT.fullmatch(text)) is None:
        return None
    name, kind, tags, operator, arguments = found.groups(default="")
    return Statement(name, template(kind, is_type=True), tags, operator, template(arguments))


@functools.lru_cache(maxsize=1 << 14)
def template(text: str, is_type: bool = False) -> Template:
    """Operands; or a type, which has holes for symbols as ``sym(...)`` among operands has."""
    references: list[Origin] = []
    symbols: list[str] = []
    depth = int(is_type)  # of parentheses inside of a size

    def filled(token: re.Match[str]) -> str:
        nonlocal depth
        told = token[0]
        if token["sym"]:
            depth = 1
        elif token["parenthesis"] and depth:
            depth += 1 if told == "(" else -1
        elif not token["chain"]:
            return told
        elif depth:
            if _SYMBOL.fullmatch(told) and text[token.end() : token.end() + 1] != "[":
                symbols.append(told)
                return SYMBOL
        elif told[0] in syntax.INPUT_SPACES and told[1:2] in (".", "["):
            references.append((told, ""))
            return HOLE
        elif named := _NAMED.fullmatch(told):
            references.append((named["origin"] or "", named["name"]))
            return HOLE + told[named.end("name") :]
        return told

    return Template(_TOKEN.sub(filled, text), tuple(references), tuple(symbols))


class Symbol(NamedTuple):
    """A size that is known only when the graph runs: the ``number``-th one that ``value`` brings in."""

    value: int
    number: int


Operand = int | str | Symbol
"""A place among the values (negative: among the definitions, from -1 down), a symbol, or a literal."""


class Value(NamedTuple):
    """An input, or the result of a statement."""

    scope: Scope
    name: str
    operator: str  # "" for an input
    type: str  # with a hole for each symbol
    arguments: str  # with a hole for each reference and symbol
    operands: tuple[
        Operand, ...
    ]  # what stands in the holes: symbols of the type, references, other symbols
    sources: tuple[int, ...]  # the values among the operands, as often as they stand there
    tags: str  # as written, but for paths, which are absolute
    line: int  # its place among the lines

    @property
    def is_input(self) -> bool:
        return not self.operator


class Result(NamedTuple):
    """One thing that the graph returns: under a name or, where it has none, by position."""

    name: str
    arguments: str
    operands: tuple[Operand, ...]
    line: int


class Definition(NamedTuple):
    """A name that the head of a text gives: a process group, a body, a symbol, a called module, or a convention."""

    name: str
    kind: str
    content: str


@dataclass
class Dataflow:
    """A graph's values in the order of the schedule, and what it returns."""

    definitions: list[Definition] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    bodies: dict[str, tuple[GraphLine, ...]] = field(
        default_factory=dict
    )  # the lines of graphs inside the graph
    others: list[GraphLine] = field(default_factory=list)  # lines of views, which are no statements

    @property
    def inputs(self) -> list[int]:
        """The places of inputs."""
        return [place for place, value in enumerate(self.values) if value.is_input]

    @property
    def users(self) -> list[int]:
        """The places of values that name a definition."""
        every = enumerate(self.values)
        return [
            place
            for place, value in every
            if any(isinstance(o, int) and o < 0 for o in value.operands)
        ]


def dataflow(lines: Iterable[GraphLine]) -> Dataflow:
    """The values of a graph; what a reference does not find is taken as a literal."""
    with warnings.catch_warnings(
        action="ignore"
    ):  # an odd escape in a string is no news to anybody
        return _Resolver().read(tuple(lines))


_Find = Callable[
    [str], Mapping[str, int]
]  # the values that what stands before a name leads to, by their names


class _Resolver:
    def __init__(self) -> None:
        self._made = Dataflow()
        self._defined: dict[str, int] = {}
        self._inputs: dict[syntax.InputKey, dict[str, int]] = defaultdict(dict)
        self._names: dict[Scope, dict[str, int]] = defaultdict(dict)
        self._symbols: dict[str, Symbol] = {}
        self._brought: Counter[int] = Counter()

    def read(self, lines: Sequence[GraphLine]) -> Dataflow:
        self._head([line for line in lines if not line.section])
        heading_of = functools.cache(self._heading)
        for number, line in enumerate(lines):
            (space, layer), scope, find = heading_of(line.section, line.heading)
            if space in syntax.COMPUTED_SPACES and (parts := statement(line.text)) is not None:
                self._computed(number, parts, layer, scope, find)
            elif space in syntax.INPUT_SPACES and ": " in line.text:
                self._input(number, SectionKey(space, layer), line.text)
            elif space == "out":
                self._result(number, line.text, layer, find)
            elif line.section:
                self._made.others.append(line)
        return self._made

    def _head(self, lines: Iterable[GraphLine]) -> None:
        """Definitions, then bodies; one ends where the next begins."""
        bodies: list[list[GraphLine]] = []
        for line in lines:
            if line.text.startswith(_BODY):
                bodies.append([line])
            elif bodies:
                bodies[-1].append(line)
            elif found := _DEFINITION.fullmatch(line.text):
                kind = found["value"].partition("(")[0]
                kind = kind if kind in ("group", "size") else "convention"
                kind = "module" if found["name"].startswith("module.") else kind
                self._made.definitions.append(Definition(found["name"], kind, found["value"]))
            else:
                self._made.others.append(line)
        budget = LineBudget(MOST_LINES)
        for first, *inner in bodies:
            name = first.text.removeprefix(_BODY).partition("(")[0]
            try:
                self._made.bodies[name] = unfold(
                    textwrap.dedent("\n".join(line.text for line in inner)), budget
                )
            except TextError:
                self._made.bodies[name] = tuple(inner)
            self._made.definitions.append(Definition(name, "body", ""))
        self._defined = {
            definition.name: ~place for place, definition in enumerate(self._made.definitions)
        }

    def _heading(self, section: str, heading: str) -> tuple[SectionKey, Scope, _Find]:
        """What lines under one heading share."""
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
                    return self._inputs[
                        syntax.input_key_at(links, key.layer)
                    ]  # of one that comes later, too
                return self._names[syntax.scope_at(links, here)]
            except UNREADABLE:
                return {}

        return key, scope, functools.cache(find)

    def _input(self, number: int, key: SectionKey, text: str) -> None:
        name, _, kind = text.partition(": ")
        typed = template(kind, is_type=True)
        place = len(self._made.values)
        try:
            _, path, repeat = source = syntax.input_key_at(links_of(name), key.layer)
        except UNREADABLE:
            _, path, repeat = source = syntax.InputKey(key.space, name)
        self._inputs[source][""] = place
        operands = tuple([self._symbol(symbol, key.layer) for symbol in typed.symbols])
        scope = Scope((f"{path}.#{repeat}" if repeat else path,), key.space)
        self._made.values.append(Value(scope, "", "", typed.text, "", operands, (), "", number))

    def _computed(
        self, number: int, parts: Statement, layer: Layer | None, scope: Scope, find: _Find
    ) -> None:
        name, (kind, _, symbols), tags, operator, arguments = parts
        typed = [self._symbol(symbol, layer) for symbol in symbols]
        operands = (*typed, *self._operands(arguments, layer, find))
        sources = tuple([known for known in operands if isinstance(known, int) and known >= 0])
        tags = _PATH_OF_TAG.sub(
            lambda tag: tag["tag"] + absolute(tag["path"], layer) if tag["tag"] else tag[0], tags
        )
        self._names[scope][name] = len(self._made.values)
        self._made.values.append(
            Value(scope, name, operator, kind, arguments.text, operands, sources, tags, number)
        )

    def _operands(self, told: Template, layer: Layer | None, find: _Find) -> list[Operand]:
        """What stands in the holes: values, definitions, literals; then symbols."""
        operands: list[Operand] = []
        for origin, name in told.references:
            if (found := find(origin).get(name)) is None and not origin:
                found = self._defined.get(name)
            literal = f"{origin}.{name}" if origin and name else origin or name
            operands.append(absolute(literal, layer) if found is None else found)
        return [*operands, *[self._symbol(symbol, layer) for symbol in told.symbols]]

    def _symbol(self, text: str, layer: Layer | None) -> Operand:
        """A symbol belongs to the value that first mentions it."""
        if text in self._defined:
            return self._defined[text]
        name, place = absolute(text, layer), len(self._made.values)
        if name not in self._symbols:
            self._symbols[name] = Symbol(place, self._brought[place])
            self._brought[place] += 1
        return self._symbols[name]

    def _result(self, number: int, text: str, layer: Layer | None, find: _Find) -> None:
        """``L.w = bwd.L.view``, ``yield loss``, ``yield from {'a': fwd.x}``."""
        name, _, returned = text.partition(" = ")
        if text.startswith("yield "):
            name, returned = "", text.removeprefix("yield ")
        before = "" if name or not returned.startswith("from ") else "from "
        told = template(returned.removeprefix(before))
        operands = tuple(self._operands(told, layer, find))
        self._made.results.append(
            Result(absolute(name, layer), before + told.text, operands, number)
        )
