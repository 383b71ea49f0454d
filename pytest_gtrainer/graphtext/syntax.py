"""From a text to statements, by the standard library's ``ast``: what is not in the grammar is refused.

``unfolding`` reads canonical texts line by line, which is all that comparing goldens needs;
this reads what a person writes: other indentation, lines that go on, comments. Nothing is
evaluated here, and torch is not needed.

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
from pytest_gtrainer.graphtext.errors import TextError, nearest
from pytest_gtrainer.graphtext.paths import Layer
from pytest_gtrainer.graphtext.sections import Key, Line
from pytest_gtrainer.graphtext.unfolding import MOST_LAYERS, Block, counted, expand

SPACES = ("P", "B", "I", "A", "fwd", "bwd", "out")
EDITS = ("like", "drop", "after")
_BODY_NAME = re.compile(r"\w+_graph_\d+", re.ASCII)
_LONGEST = 100_000


class Token(NamedTuple):
    """A link of a chain like ``saved.layers[i-1].mm``: a name, an index or the arguments of a call."""

    kind: str
    value: str | int | tuple[ast.expr, ...]
    node: ast.expr
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Statement:
    """One line of a section, and the module or bucket that it stands under."""

    node: ast.stmt
    scope: ast.expr | None


@dataclass(slots=True)
class Program:
    """A graph as its text has it: definitions, bodies, and the lines of its sections."""

    definitions: dict[str, ast.expr] = field(default_factory=dict)
    bodies: dict[str, Program] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    places: dict[str, Key] = field(default_factory=dict)

    def statements(self) -> Iterator[tuple[Key, Statement]]:
        """Every statement, unfolded, with the section that it stands in."""
        for key, line in expand(self.blocks):
            yield self.places[key], line.source


def read(text: str) -> Program:
    """The statements of a text.

    Raises:
        TextError: it is not Python, or not the part of Python that graph text is.
    """
    _check_version(text)
    try:
        with warnings.catch_warnings(action="ignore"):  # an odd escape in a string is no news to anybody
            tree = ast.parse(text)
    except SyntaxError as error:
        raise TextError(f"{error.msg}: graph text is a part of Python", error.lineno or 1, error.offset or 0) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "it is nested too deeply" if not isinstance(error, ValueError) else str(error)
        raise TextError(f"this cannot be read as Python: {reason}", 1) from None
    return _program(tree.body)


def _check_version(text: str) -> None:
    view = header.read(text).get("view")
    if view in header.PARTIAL_VIEWS:
        raise TextError(f"this is the {view} view of a graph, a part of it: render the full view to parse it", 1)
    version = header.version_of(text)
    if version is None or version == header.VERSION:
        return
    remake = header.read(text).get("remake")
    if version > header.VERSION:
        advice = "it was made by a newer pytest-gtrainer, so upgrade"
    else:
        advice = f"remake it with `{remake}`" if remake else "render the graph again"
    raise TextError(f"format v{version}, and this pytest-gtrainer reads v{header.VERSION}: {advice}", 1)


def refuse(node: ast.AST, message: str) -> TextError:
    """The error for what stands at ``node``."""
    return TextError(message, getattr(node, "lineno", 1), getattr(node, "col_offset", -1) + 1)


def shown(node: ast.AST) -> str:
    """A part of the text for a message, cut where it is long."""
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 60 else text[:57] + "..."


def _program(statements: Sequence[ast.stmt]) -> Program:
    program, lines = Program(), 0
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


def _define_body(program: Program, node: ast.FunctionDef) -> None:
    arguments = node.args
    if any((arguments.args, arguments.posonlyargs, arguments.kwonlyargs, arguments.vararg, arguments.kwarg)):
        raise refuse(node, f"a body takes its inputs in a section `if A:`: expected `def {node.name}():`")
    if node.decorator_list or node.returns:
        raise refuse(node, f"expected `def {node.name}():` and no more")
    if node.name in program.bodies or not _BODY_NAME.fullmatch(node.name):
        raise refuse(node, f"a body's name is its own and ends like `cond_graph_0`, found `{node.name}`")
    program.bodies[node.name] = _program(node.body)


def _block(program: Program, node: ast.For | ast.If) -> Block:
    if node.orelse:
        raise refuse(node.orelse[0], "a section has no `else`")
    keys = _layer_keys(node) if isinstance(node, ast.For) else [_space_key(node.test)]
    named = {_name(key): key for key in keys}
    program.places |= named
    return Block(node.lineno, tuple(named), tuple(_lines(node.body)))


def _name(key: Key) -> str:
    """As ``ast.unparse`` spells it in ``like(...)``."""
    text = str(key)
    return text if text.isascii() and '"' not in text else ast.unparse(ast.parse(text, mode="eval"))


def _space_key(test: ast.expr) -> Key:
    if not isinstance(test, ast.Name) or test.id not in SPACES:
        near = nearest(shown(test), SPACES)
        raise refuse(test, f"expected one of {', '.join(SPACES)}, found `{shown(test)}`{near}")
    return Key(test.id, None)


def _layer_keys(node: ast.For) -> list[Key]:
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
    return [Key(str(space.value), Layer(container, number)) for number in numbers]


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


def integer(node: ast.expr | None) -> int | None:
    """A whole number, with its sign; None if it is something else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = integer(node.operand)
        return None if number is None else -number
    return None


def _lines(statements: Sequence[ast.stmt]) -> Iterator[Line]:
    for node in statements:
        if not isinstance(node, ast.With):
            yield _line(node, "", None)
            continue
        if len(node.items) != 1 or node.items[0].optional_vars is not None:
            raise refuse(node, "expected one module or bucket, `with layers[0].attention:`")
        scope = node.items[0].context_expr
        heading = ast.unparse(scope)
        for inner in node.body:
            yield _line(inner, heading, scope)


def _line(node: ast.stmt, heading: str, scope: ast.expr | None) -> Line:
    """A statement under its name."""
    source = Statement(node, scope)
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


# -- chains


def chain(node: ast.expr) -> list[Token]:
    """The links of a chain, from its first name on.

    >>> [token.value for token in chain(ast.parse("saved.layers[i-1].mm", mode="eval").body)]
    ['saved', 'layers', -1, 'mm']
    """
    tokens: list[Token] = []
    here: ast.expr = node
    while not isinstance(here, ast.Name):
        if len(tokens) > _LONGEST:
            raise refuse(node, "this chain is too long")
        if isinstance(here, ast.Attribute):
            tokens.append(Token("name", here.attr, here))
            here = here.value
        elif isinstance(here, ast.Subscript):
            tokens.append(_index(here))
            here = here.value
        elif isinstance(here, ast.Call) and not here.keywords:
            tokens.append(Token("call", tuple(here.args), here))
            here = here.func
        else:
            raise refuse(here, f"expected a name like `L.attention.mm`, found `{shown(here)}`")
    tokens.append(Token("name", here.id, here))
    return tokens[::-1]


def _index(node: ast.Subscript) -> Token:
    """``[3]``, ``["en-de"]``, ``[i+1]``."""
    place = node.slice
    if isinstance(place, ast.Constant) and isinstance(place.value, str):
        return Token("word", place.value, node)
    if (number := integer(place)) is not None:
        return Token("index", number, node)
    if isinstance(place, ast.Name) and place.id == "i":
        return Token("index", 0, node, relative=True)
    if isinstance(place, ast.BinOp) and isinstance(place.left, ast.Name) and place.left.id == "i":
        distance = integer(place.right)
        if distance is not None and isinstance(place.op, ast.Add | ast.Sub):
            return Token("index", distance if isinstance(place.op, ast.Add) else -distance, node, relative=True)
    raise refuse(place, f'expected an index like `[3]`, `[i-1]` or `["name"]`, found `[{shown(place)}]`')


def static_path(tokens: Sequence[Token]) -> str:
    """The module path of links that do not depend on the section.

    >>> static_path(chain(ast.parse('heads["en-de"].layers[3]', mode="eval").body))
    'heads.en-de.layers.3'
    """
    for token in tokens:
        if token.kind == "call" or (token.kind == "index" and int(token.value) < 0):  # type: ignore[arg-type]
            raise refuse(token.node, f"expected a module path, found `{shown(token.node)}`")
    names = [str(token.value) for token in tokens]
    return ".".join(names[1:] if names[0] == "_" else names)
