"""Read chains, paths, scopes and references in the lines of a text. No torch here.

``parsing`` and ``dataflow`` read syntax trees of Python with it; what is not in the grammar is
refused. A *chain* is a name with attributes and items: ``saved.layers[i-1].mm``. A text has most
lines once for many layers, so the meaning of a chain depends on the *place* of its line.
"""

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_gtrainer.graph import join_path
from pytest_gtrainer.graphtext.header import TextError
from pytest_gtrainer.graphtext.sections import NOWHERE, Layer, Scope, SectionKey

INPUT_SPACES = ("P", "B", "I", "A")
COMPUTED_SPACES = ("fwd", "bwd")
_SPACES = {"saved": "fwd", "fwd": "fwd", "bwd": "bwd"}
"""First words of a chain that name a space other than the section's own."""
# tags whose first argument is a module path
AT, CHUNK = "at", "chunk"
UNREADABLE = (TextError, SyntaxError, ValueError, RecursionError, MemoryError)
"""The errors of reading a text that nobody has checked."""


def refuse(node: ast.AST, message: str) -> TextError:
    """Return the error for the part of the text at ``node``."""
    return TextError(message, getattr(node, "lineno", 1), getattr(node, "col_offset", -1) + 1)


def excerpt(node: ast.AST) -> str:
    """Return a part of the text for a message, cut if it is long."""
    text = ast.unparse(node).partition("\n")[0]
    if len(text) > 60:
        text = text[:57] + "..."
    return text


def unexpected(node: ast.AST, expected: str) -> TextError:
    """Return the error for a part of the text in place of what was ``expected``."""
    return refuse(node, f"expected {expected}, found `{excerpt(node)}`")


def integer(node: ast.expr | None) -> int | None:
    """Return a whole number, with its sign; None if this is something else."""
    # ``True`` is an int, too, and no whole number of a text.
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = integer(node.operand)
        if number is not None:
            return -number
    return None


class Link(NamedTuple):
    """A link of a chain: a name, a quoted word, an index, or the arguments of a call."""

    kind: str  # "name", "word", "index" or "call"
    value: Any  # str of a name or a word, int of an index, tuple of ``ast.expr`` of a call
    node: ast.expr  # the chain up to this link
    relative: bool = False  # an index like ``[i+1]``


def chain(node: ast.expr) -> list[Link]:
    """Return the links of a chain, from its first name on."""
    links: list[Link] = []
    here: ast.expr = node
    while True:
        match here:
            case ast.Name(name):
                return [Link("name", name, here), *reversed(links)]
            case ast.Attribute(value, name):
                links.append(Link("name", name, here))
            case ast.Subscript(value):
                links.append(_index(here))
            case ast.Call(value, arguments, []):
                links.append(Link("call", tuple(arguments), here))
            case _:
                raise unexpected(here, "a name like `L.attention.mm`")
        here = value


def _index(node: ast.Subscript) -> Link:
    """Return the link of ``[3]``, ``["en-de"]`` or ``[i+1]``."""
    match node.slice:
        case ast.Constant(str(word)):
            return Link("word", word, node)
        case ast.Name("i"):
            return Link("index", 0, node, relative=True)
        case ast.BinOp(ast.Name("i"), ast.Add() | ast.Sub() as sign, right) if (
            away := integer(right)
        ) is not None:
            if isinstance(sign, ast.Sub):
                away = -away
            return Link("index", away, node, relative=True)
        case place if (number := integer(place)) is not None:
            return Link("index", number, node)

    raise refuse(
        node.slice,
        f'expected an index like `[3]`, `[i-1]` or `["name"]`, found `[{excerpt(node.slice)}]`',
    )


@functools.lru_cache(maxsize=1 << 16)
def links_of(text: str) -> tuple[Link, ...]:
    """Return the links of a chain that stands alone; raises ``UNREADABLE`` if this is none."""
    return tuple(chain(ast.parse(text, mode="eval").body))


def static_path(links: Sequence[Link]) -> str:
    """Return the module path of links that do not depend on the section."""
    for link in links:
        if link.kind == "call" or (link.kind == "index" and link.value < 0):
            raise unexpected(link.node, "a module path")
    # ``_`` is the root, which has no name in a path.
    names = [str(link.value) for link in links]
    if names[:1] == ["_"]:
        del names[0]
    return join_path(names)


@dataclass(slots=True)
class LinePlace:
    """The place of a statement: its section's space and layer, and the scope of its ``with``."""

    space: str
    layer: Layer | None
    scope: Scope = NOWHERE


def path_at(links: Sequence[Link], here: Layer | None) -> str:
    """Return the module path of a chain, as seen from a section's layer.

    Raises:
        TextError: this is no path, or relative to a layer that does not exist.
    """
    if links[0].value == "L" and links[0].kind == "name":
        link, head, distance, rest = links[0], "", 0, links[1:]
    else:
        relative = [place for place, each in enumerate(links) if each.relative]
        if not relative:
            return static_path(links)
        place, link = relative[0], links[relative[0]]
        # The space before an index, as in ``fwd[i-1]``, is no module.
        if not place:
            raise unexpected(link.node, "the layers' module before `[...]`")
        head, distance, rest = static_path(links[:place]), link.value, links[place + 1 :]

    tail = ""
    if rest:
        tail = f".{static_path(rest)}"
    if here is None:
        raise refuse(
            link.node, f"`{excerpt(link.node)}` is relative to a layer, and this section has none"
        )

    if here.number + distance < 0:
        raise refuse(link.node, f"layer {here.number + distance} of `{head}` does not exist")
    return f"{head or here.container}.{here.number + distance}{tail}"


def scope_at(links: Sequence[Link], place: LinePlace) -> Scope:
    """Return the scope of a chain: a module or bucket of the section's space, or of another one."""
    space = place.space
    # A chain of one link, as ``fwd``, is a module of that name.
    if links[0].kind == "name" and links[0].value in _SPACES and len(links) > 1:
        space, links = _SPACES[str(links[0].value)], links[1:]
    if links[0].value != "bucket" or links[0].kind != "name":
        return Scope((path_at(links, place.layer),), space)
    roots = links[1].value if len(links) == 2 else None
    if not isinstance(roots, tuple) or not roots:
        raise unexpected(links[-1].node, "`bucket(layers[0])`")
    owners = [path_at(chain(root), place.layer) for root in roots]
    return Scope(tuple(owners), space, is_bucket=True)


@functools.lru_cache(maxsize=1 << 12)
def key_of(section: str) -> SectionKey:
    """Return the key of a section by its name; a name that cannot be read is a space."""
    try:
        space, *path = links_of(section)
        layer = None
        if path:
            container, _, number = static_path(path).rpartition(".")
            layer = Layer(container, int(number))
        return SectionKey(str(space.value), layer)
    except UNREADABLE:
        return SectionKey(section, None)


@functools.lru_cache(maxsize=1 << 16)
def absolute(text: str, layer: Layer | None) -> str:
    """Return the full name of a chain as seen from a layer; a text that is no path as it is."""
    try:
        return path_at(links_of(text), layer)
    except UNREADABLE:
        return text


def reference(node: ast.expr) -> tuple[list[Link], str, list[int]]:
    """Split ``saved.L.topk[1]`` into ``saved.L``, ``topk`` and its items; an input has no name."""
    links, items = chain(node), []
    # Indices of an input belong to its name: ``I[0]``.
    if is_input(links):
        return links, "", []
    while len(links) > 1 and links[-1].kind == "index" and not links[-1].relative:
        items.append(links.pop().value)
    last = links.pop()
    if last.kind != "name":
        raise unexpected(node, "a value like `L.attention.mm`")
    return links, str(last.value), items[::-1]


def is_input(links: Sequence[Link]) -> bool:
    """Return whether a chain names an input of the graph: ``P.L.w``, ``I[0]``."""
    return links[0].value in INPUT_SPACES and len(links) > 1


class InputKey(NamedTuple):
    """A graph input: its space, its full name, and how many before it have both."""

    space: str
    fqn: str
    repeat: int = 0


def input_key_at(links: Sequence[Link], here: Layer | None) -> InputKey:
    """Return the key of an input: ``P.L.wq.weight``, ``I[0]``, ``P.w["#1"]``."""
    if not is_input(links):
        raise unexpected(links[-1].node, "an input like `P.L.w`")
    space, links, repeat = str(links[0].value), links[1:], 0
    if links[-1].kind == "word" and len(links) > 1:
        mark, number = str(links[-1].value)[:1], str(links[-1].value)[1:]
        if mark == "#" and number.isdecimal():
            links, repeat = links[:-1], int(number)
    return InputKey(space, path_at(links, here), repeat)
