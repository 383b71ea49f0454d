"""The one reader of what stands in a line: chains, paths, scopes, references. No torch here.

It reads syntax trees of Python, for ``parsing`` and for ``dataflow``; what is not in the grammar is
refused. A *chain* names something: ``saved.layers[i-1].mm``. As a text says most lines once for
many layers, what it means depends on the *place* where it stands.
"""

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_gtrainer.graph import joined
from pytest_gtrainer.graphtext.header import TextError
from pytest_gtrainer.graphtext.sections import NOWHERE, Layer, Scope, SectionKey

INPUT_SPACES = ("P", "B", "I", "A")
COMPUTED_SPACES = ("fwd", "bwd")
_SPACES = {"saved": "fwd", "fwd": "fwd", "bwd": "bwd"}
"""First words of a chain that name a space other than the section's own."""
AT, CHUNK = "at", "chunk"  # tags that name a module path first
UNREADABLE = (TextError, SyntaxError, ValueError, RecursionError, MemoryError)
"""What reading a text that nobody has checked may raise."""


def refuse(node: ast.AST, message: str) -> TextError:
    """The error for what stands at ``node``."""
    return TextError(message, getattr(node, "lineno", 1), getattr(node, "col_offset", -1) + 1)


def shown(node: ast.AST) -> str:
    """A part of the text for a message, cut where it is long."""
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 60 else text[:57] + "..."


def unexpected(node: ast.AST, expected: str) -> TextError:
    """Return the error for a part of the text in place of what was ``expected``."""
    return refuse(node, f"expected {expected}, found `{shown(node)}`")


def integer(node: ast.expr | None) -> int | None:
    """A whole number, with its sign; None if it is something else."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = integer(node.operand)
        return None if number is None else -number
    return None


class Link(NamedTuple):
    """A link of a chain: a name, a quoted word, an index, or the arguments of a call; ``node`` ends
    with it.
    """

    kind: str
    value: str | int | tuple[ast.expr, ...]
    node: ast.expr
    relative: bool = False


def chain(node: ast.expr) -> list[Link]:
    """The links of a chain, from its first name on."""
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
                raise refuse(here, f"expected a name like `L.attention.mm`, found `{shown(here)}`")
        here = value


def _index(node: ast.Subscript) -> Link:
    """``[3]``, ``["en-de"]``, ``[i+1]``."""
    match node.slice:
        case ast.Constant(str(word)):
            return Link("word", word, node)
        case ast.Name("i"):
            return Link("index", 0, node, relative=True)
        case ast.BinOp(ast.Name("i"), ast.Add() | ast.Sub() as sign, right) if (
            away := integer(right)
        ) is not None:
            return Link("index", away if isinstance(sign, ast.Add) else -away, node, relative=True)
        case place if (number := integer(place)) is not None:
            return Link("index", number, node)
    raise refuse(
        node.slice,
        f'expected an index like `[3]`, `[i-1]` or `["name"]`, found `[{shown(node.slice)}]`',
    )


@functools.lru_cache(maxsize=1 << 16)
def links_of(text: str) -> tuple[Link, ...]:
    """The links of a chain that stands alone; raises ``UNREADABLE`` if it is none."""
    return tuple(chain(ast.parse(text, mode="eval").body))


def static_path(links: Sequence[Link]) -> str:
    """The module path of links that do not depend on the section."""
    for link in links:
        if link.kind == "call" or (link.kind == "index" and int(link.value) < 0):  # type: ignore[arg-type]
            raise refuse(link.node, f"expected a module path, found `{shown(link.node)}`")
    names = [str(link.value) for link in links]
    return joined(names[1:] if names[:1] == ["_"] else names)


@dataclass(slots=True)
class LinePlace:
    """Where a statement stands: its section's space and layer, and the scope of its ``with``."""

    space: str
    layer: Layer | None
    scope: Scope = NOWHERE


def path_at(links: Sequence[Link], here: Layer | None) -> str:
    """The module path of a chain, as seen from a section's layer; TextError if it is none, or
    relative to no layer.
    """
    link = next((link for link in links if link.relative), None)
    if links[0].value == "L" and links[0].kind == "name":
        link, head, distance, rest = links[0], "", 0, links[1:]
    elif link is None:
        return static_path(links)
    else:
        place, distance = links.index(link), int(link.value)  # type: ignore[arg-type]
        if not place:
            raise refuse(
                link.node, f"expected the layers' module before `[...]`, found `{shown(link.node)}`"
            )
        head, rest = static_path(links[:place]), links[place + 1 :]
    tail = f".{static_path(rest)}" if rest else ""
    if here is None:
        raise refuse(
            link.node, f"`{shown(link.node)}` is relative to a layer, and this section has none"
        )
    if here.number + distance < 0:
        raise refuse(link.node, f"layer {here.number + distance} of `{head}` does not exist")
    return f"{head or here.container}.{here.number + distance}{tail}"


def scope_at(links: Sequence[Link], place: LinePlace) -> Scope:
    """The scope that a chain names: a module or a bucket, of the section's space or of another."""
    space = place.space
    if links[0].kind == "name" and links[0].value in _SPACES and len(links) > 1:
        space, links = _SPACES[str(links[0].value)], links[1:]
    if links[0].value != "bucket" or links[0].kind != "name":
        return Scope((path_at(links, place.layer),), space)
    roots = links[1].value if len(links) == 2 else None
    if not isinstance(roots, tuple) or not roots:
        raise refuse(
            links[-1].node, f"expected `bucket(layers[0])`, found `{shown(links[-1].node)}`"
        )
    return Scope(
        tuple([path_at(chain(root), place.layer) for root in roots]), space, is_bucket=True
    )


@functools.lru_cache(maxsize=1 << 12)
def key_of(section: str) -> SectionKey:
    """Return what a section's name says; one that cannot be read is a space."""
    try:
        space, *path = links_of(section)
        container, _, number = static_path(path).rpartition(".")
        return SectionKey(str(space.value), Layer(container, int(number)) if path else None)
    except UNREADABLE:
        return SectionKey(section, None)


@functools.lru_cache(maxsize=1 << 16)
def absolute(text: str, layer: Layer | None) -> str:
    """A chain by its full name, whichever layer it is seen from; as it is where it is no path."""
    try:
        return path_at(links_of(text), layer)
    except UNREADABLE:
        return text


def reference(node: ast.expr) -> tuple[list[Link], str, list[int]]:
    """``saved.L.topk[1]`` as ``saved.L``, ``topk`` and its items; an input has no name; what is
    none is a TextError.
    """
    links, items = chain(node), []
    if is_input(links):
        return links, "", []
    while len(links) > 1 and links[-1].kind == "index" and not links[-1].relative:
        items.append(int(links.pop().value))  # type: ignore[arg-type]
    last = links.pop()
    if last.kind != "name":
        raise refuse(node, f"expected a value like `L.attention.mm`, found `{shown(node)}`")
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
    """The key of an input: ``P.L.wq.weight``, ``I[0]``, ``P.w["#1"]``."""
    if not is_input(links):
        raise refuse(
            links[-1].node, f"expected an input like `P.L.w`, found `{shown(links[-1].node)}`"
        )
    space, links, repeat = str(links[0].value), links[1:], 0
    last = links[-1]
    if (
        last.kind == "word"
        and str(last.value)[:1] == "#"
        and str(last.value)[1:].isdecimal()
        and len(links) > 1
    ):
        links, repeat = links[:-1], int(str(last.value)[1:])
    return InputKey(space, path_at(links, here), repeat)
