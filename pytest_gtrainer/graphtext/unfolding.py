"""Reading a graph text back, without torch: into records, or into a program of syntax trees.

``unfold`` reads canonical texts line by line and does not look inside statements, which is all that comparing goldens
needs. ``read`` takes what a person writes: other indentation, lines that go on, comments. It reads by the standard
library's ``ast``; what is not in the grammar is refused.

Terms: a *definition* is an assignment at the head; a *body* is a graph inside the graph.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gtrainer.graphtext import header
from pytest_gtrainer.graphtext.folding import INDENT, spell_line_name, visits_of
from pytest_gtrainer.graphtext.header import TextError, nearest
from pytest_gtrainer.graphtext.sections import GraphLine, Layer, Line, SectionKey
from pytest_gtrainer.graphtext.syntax import chain, integer, refuse, shown, static_path

SPACES = ("P", "B", "I", "A", "fwd", "bwd", "out")
EDITS = ("like", "drop", "after")
_BODY_NAME = re.compile(r"\w+_graph_\d+", re.ASCII)
MOST_LAYERS = 100_000
MOST_LINES = 1 << 20
"""Of a heading, and of a text with its layers counted out: a damaged number must not take all memory."""
_LAYERS = re.compile(
    r"for i in (?P<path>.+)\[(?P<first>[0-9]{1,9})(?P<range>:(?P<stop>[0-9]{0,9})(?P<down>:-1)?)?\]:(  # .*)?"
)
_SPACE = re.compile(r"if (?P<space>\w+):")
_HEADINGS = re.compile(rf"\n(?!{INDENT}|\n|\Z)")
"""Before a heading or a definition; empty and indented lines belong to the one above."""
_UNDER_A_MODULE = 2 * INDENT
_EDIT = re.compile(r"(?P<kind>like|drop|after)\((?P<name>.*)\)")


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A heading's layers (none: one section without a layer) and the lines below, as printed."""

    number: int
    keys: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def model(self) -> str | None:
        """The section that this one is told by."""
        edit = _EDIT.fullmatch(self.lines[0].text) if self.lines else None
        return edit["name"] if edit and edit["kind"] == "like" else None


def unfold(text: str) -> tuple[GraphLine, ...]:
    """The records of a graph text. Comments at its head count for nothing.

    Raises:
        TextError: with the line.
    """
    records: list[GraphLine] = []
    for key, lines in _sections(list(_blocks(text))):
        records += [GraphLine(key, heading, told) for heading, told, _ in lines]
    return tuple(records)


def are_alike(text: str, other: str) -> bool:
    """Whether two texts have the same records, told quickly; False may also be for sections cut in another way.

    Raises:
        TextError: as ``unfold``.
    """
    known: dict[str, tuple[Line, ...]] = {}
    return list(_sections(list(_blocks(text, known)))) == list(_sections(list(_blocks(other, known))))


def expand(blocks: Sequence[TextBlock]) -> Iterator[tuple[str, Line]]:
    """Every line with the section that it stands in: layers counted out, edits applied.

    Raises:
        TextError: a `like`, `drop` or `after` names nothing.
    """
    for key, lines in _sections(blocks):
        for line in lines:
            yield key, line


def _sections(blocks: Sequence[TextBlock]) -> Iterator[tuple[str, Sequence[Line]]]:
    models = _models(blocks)
    total = 0
    for block in blocks:
        lines = block.lines
        if block.model is not None:
            if block.model not in models:
                hint = nearest(block.model, models)
                raise TextError(f"like({block.model}): no section of that name is told in full{hint}", block.number)
            lines = tuple(_edited(models[block.model], block))
        total = counted(block, lines, total)
        for key in block.keys:
            yield key, lines


def counted(block: TextBlock, lines: Sequence[Line], before: int) -> int:
    """How many lines a text has after a block of these lines, its layers counted out.

    Raises:
        TextError: more than ``MOST_LINES``.
    """
    total = before + len(block.keys) * max(len(lines), 1)
    if total > MOST_LINES:
        raise TextError(f"expected at most {MOST_LINES} lines, layers counted out, found {total}", block.number)
    return total


def _models(blocks: Sequence[TextBlock]) -> dict[str, Sequence[Line]]:
    """What `like` may name: sections printed in full, by key and visit."""
    keys = [(key, block) for block in blocks for key in block.keys]
    visits = visits_of(key for key, _ in keys)
    return {
        key if visit == 1 else f"{key}, visit={visit}": block.lines
        for (key, block), visit in zip(keys, visits, strict=True)
        if block.model is None
    }


def _blocks(text: str, known: dict[str, tuple[Line, ...]] | None = None) -> Iterator[TextBlock]:
    """The blocks of a text; ``known`` holds what stands below headings, as layers repeat it."""
    known = {} if known is None else known
    head: tuple[int, tuple[str, ...]] | None = None
    lines: tuple[Line, ...] = ()
    number, total = 1, 0
    told = ["" if line.startswith("#") or line.isspace() else line for line in text.splitlines()]
    for piece in _HEADINGS.split("\n".join(told)):
        first, _, body = piece.partition("\n")
        if not first or first.startswith(INDENT):  # before the first heading
            for place, line in enumerate(piece.split("\n")):
                if line:
                    raise TextError("expected a section (`if fwd:`), found an indented line", number + place)
        else:
            if head:
                block = TextBlock(*head, lines)
                total = counted(block, lines, total)
                yield block
            head = number, _keys(first, number)
            if body not in known:
                known[body] = tuple(_lines(body))
            lines = known[body]
            if head[1] == ("",):
                lines = (Line("", first), *lines)  # a definition at the head of the text
        number += piece.count("\n") + 1
    if head:
        yield TextBlock(*head, lines)


def _lines(body: str) -> Iterator[Line]:
    """The lines below a heading, with the modules that they stand under."""
    heading = ""
    for raw in body.split("\n"):
        if raw.startswith(_UNDER_A_MODULE):  # most are
            yield Line(heading, raw[len(_UNDER_A_MODULE) :])
            continue
        line = raw.removeprefix(INDENT)
        if line.startswith("with ") and line.endswith(":"):
            heading = line[len("with ") : -1]
        elif line:
            heading = ""
            yield Line(heading, line)


def _keys(raw: str, number: int) -> tuple[str, ...]:
    """The sections that a heading stands for; a definition stands for itself."""
    if found := _SPACE.fullmatch(raw):
        return (found["space"],)
    if not raw.startswith("for "):
        return ("",)
    if not (found := _LAYERS.fullmatch(raw)):
        raise TextError(f"expected `for i in fwd.layers[0:8]:`, found {raw[:80]!r}", number)
    first = int(found["first"])
    if found["range"] is None:
        return (f"{found['path']}[{first}]",)
    step = -1 if found["down"] else 1
    stop = int(found["stop"]) if found["stop"] else -1
    layers = range(first, stop, step)
    if not 0 < len(layers) <= MOST_LAYERS:
        raise TextError(f"expected 1 to {MOST_LAYERS} layers, found {len(layers)}", number)
    return tuple([f"{found['path']}[{index}]" for index in layers])


def _edited(model: Sequence[Line], block: TextBlock) -> list[Line]:
    """Apply the edits that ``folding.difference`` printed."""
    lines = {spell_line_name(line): [line] for line in model}
    front: list[Line] = []
    target: list[Line] | None = None
    for line in block.lines[1:]:
        edit = _EDIT.fullmatch(line.text) if not line.heading else None
        if edit is None and target is not None:
            target.append(line)
            continue
        name = edit["name"] if edit else spell_line_name(line)
        if name and name not in lines:
            raise TextError(f"{block.model} has no line {name}{nearest(name, lines)}", block.number)
        if edit is None:
            lines[name][0] = line
        elif edit["kind"] == "drop":
            del lines[name]
        else:
            target = lines[name] if name else front
    return front + [line for group in lines.values() for line in group]


# -- texts of a person


class Source(NamedTuple):
    """The syntax tree of a line, and of the module or bucket that it stands under."""

    node: ast.stmt
    scope: ast.expr | None


@dataclass(slots=True)
class TextProgram:
    """A graph as its text has it: definitions, bodies, and the lines of its sections."""

    definitions: dict[str, ast.expr] = field(default_factory=dict)
    bodies: dict[str, TextProgram] = field(default_factory=dict)
    blocks: list[TextBlock] = field(default_factory=list)
    places: dict[str, SectionKey] = field(default_factory=dict)

    def statements(self) -> Iterator[tuple[SectionKey, Source]]:
        """Every statement, unfolded, with the section that it stands in."""
        for key, line in expand(self.blocks):
            yield self.places[key], line.source


def read(text: str) -> TextProgram:
    """The statements of a text.

    Raises:
        TextError: it is not Python, or not the part of Python that graph text is.
    """
    fields, version = header.read(text), header.version_of(text)
    if (view := fields.get("view")) in header.PARTIAL_VIEWS:
        raise TextError(f"this is the {view} view of a graph, a part of it: render the full view to parse it", 1)
    if version is not None and version != header.VERSION:
        advice = f"remake it with `{fields['remake']}`" if "remake" in fields else "render the graph again"
        if version > header.VERSION:
            advice = "it was made by a newer pytest-gtrainer, so upgrade"
        raise TextError(f"format v{version}, and this pytest-gtrainer reads v{header.VERSION}: {advice}", 1)
    try:
        with warnings.catch_warnings(action="ignore"):  # an odd escape in a string is no news to anybody
            tree = ast.parse(text)
    except SyntaxError as error:
        raise TextError(f"{error.msg}: graph text is a part of Python", error.lineno or 1, error.offset or 0) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "it is nested too deeply" if not isinstance(error, ValueError) else str(error)
        raise TextError(f"this cannot be read as Python: {reason}", 1) from None
    return _program(tree.body)


def _program(statements: Sequence[ast.stmt]) -> TextProgram:
    program, lines = TextProgram(), 0
    for node in statements:
        if isinstance(node, ast.FunctionDef):
            _define_body(program, node)
        elif isinstance(node, ast.Assign):
            name = node.targets[0]
            if len(node.targets) > 1 or not isinstance(name, ast.Name):
                raise refuse(node, f"expected a definition like `fsdp = group(range(0, 8))`, found `{shown(node)}`")
            if name.id in program.definitions:
                raise refuse(node, f"`{name.id}` is defined twice")
            program.definitions[name.id] = node.value
        elif isinstance(node, ast.For | ast.If):
            block = _block(program, node)
            lines = counted(block, block.lines, lines)
            program.blocks.append(block)
        else:
            raise refuse(node, f"expected a section (`if fwd:`, `for i in fwd.layers[0]:`), found `{shown(node)}`")
    return program


def _define_body(program: TextProgram, node: ast.FunctionDef) -> None:
    arguments = node.args
    if any((arguments.args, arguments.posonlyargs, arguments.kwonlyargs, arguments.vararg, arguments.kwarg)):
        raise refuse(node, f"a body takes its inputs in a section `if A:`: expected `def {node.name}():`")
    if node.decorator_list or node.returns:
        raise refuse(node, f"expected `def {node.name}():` and no more")
    if node.name in program.bodies or not _BODY_NAME.fullmatch(node.name):
        raise refuse(node, f"a body's name is its own and ends like `cond_graph_0`, found `{node.name}`")
    program.bodies[node.name] = _program(node.body)


def _block(program: TextProgram, node: ast.For | ast.If) -> TextBlock:
    if node.orelse:
        raise refuse(node.orelse[0], "a section has no `else`")
    if isinstance(node, ast.For):
        keys = _layer_keys(node)
    elif isinstance(node.test, ast.Name) and node.test.id in SPACES:
        keys = [SectionKey(node.test.id, None)]
    else:
        found = shown(node.test)
        raise refuse(node.test, f"expected one of {', '.join(SPACES)}, found `{found}`{nearest(found, SPACES)}")
    named = {_name(key): key for key in keys}
    program.places |= named
    return TextBlock(node.lineno, tuple(named), tuple(_program_lines(node.body)))


def _name(key: SectionKey) -> str:
    """As ``ast.unparse`` spells it in ``like(...)``."""
    text = str(key)
    return text if text.isascii() and '"' not in text else ast.unparse(ast.parse(text, mode="eval"))


def _layer_keys(node: ast.For) -> list[SectionKey]:
    """The sections of ``for i in fwd.layers[0:8]:``."""
    expected = "expected `for i in fwd.layers[0]:` or `for i in fwd.layers[0:8]:`"
    if not isinstance(node.target, ast.Name) or node.target.id != "i" or not isinstance(node.iter, ast.Subscript):
        raise refuse(node, f"{expected}, found `{shown(node)}`")
    numbers = _numbers(node.iter.slice, expected)
    space, *path = chain(node.iter.value)
    if space.kind != "name" or space.value not in SPACES or not path:
        raise refuse(node.iter, f"{expected}, found `{shown(node.iter)}`")
    if any(token.relative for token in path):
        raise refuse(node.iter, "a section's own path is not relative")
    container = static_path(path)
    return [SectionKey(str(space.value), Layer(container, number)) for number in numbers]


def _numbers(place: ast.expr, expected: str) -> Sequence[int]:
    if (number := integer(place)) is not None and number >= 0:
        return [number]
    if not isinstance(place, ast.Slice):
        raise refuse(place, f"{expected}, found the index `{shown(place)}`")
    first, step = integer(place.lower), integer(place.step) if place.step else 1
    stop = integer(place.upper) if place.upper else (-1 if step == -1 else None)
    if first is None or stop is None or step not in (1, -1) or first < 0:
        raise refuse(place, f"{expected}: a range has a first layer, an end and at most the step -1")
    count = max(0, (stop - first) * step)  # len(range(...)) has no number beyond a machine word
    if not 0 < count <= MOST_LAYERS:
        raise refuse(place, f"expected 1 to {MOST_LAYERS} layers, found {count}")
    return range(first, stop, step)


def _program_lines(statements: Sequence[ast.stmt]) -> Iterator[Line]:
    for node in statements:
        if not isinstance(node, ast.With):
            yield _program_line(node, "", None)
            continue
        if len(node.items) != 1 or node.items[0].optional_vars is not None:
            raise refuse(node, "expected one module or bucket, `with layers[0].attention:`")
        scope = node.items[0].context_expr
        heading = ast.unparse(scope)
        for inner in node.body:
            yield _program_line(inner, heading, scope)


def _program_line(node: ast.stmt, heading: str, scope: ast.expr | None) -> Line:
    """A statement under its name."""
    source = Source(node, scope)
    if isinstance(node, ast.AnnAssign):
        name = node.target.id if isinstance(node.target, ast.Name) else ast.unparse(node.target)
        return Line(heading, name, source)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return Line(heading, ast.unparse(node.targets[0]) + " =", source)
    if isinstance(node, ast.Expr):
        value = node.value
        is_edit = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in EDITS
        if is_edit or isinstance(value, ast.Yield | ast.YieldFrom):
            return Line(heading, ast.unparse(node), source)
    expected = "expected `mm: f32[2, 4] = aten.mm(x, y)`"
    raise refuse(node, f"{expected}, found `{shown(node)}`")
