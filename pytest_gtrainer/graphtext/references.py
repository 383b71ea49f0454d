"""Absolute names for what a text refers to relatively: ``saved.L.mm[0]`` seen from layer 3. No torch here.

Terms: a *scope* is a space and a path, both as text; a path is absolute if it says ``layers[3]`` where
a section says ``L`` or ``layers[i-1]``. Work is done once for each distinct pair of section and prefix.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import NamedTuple

from pytest_gtrainer.graphtext.paths import Layer

INPUT_SPACES = ("P", "B", "I", "A")
COMPUTED_SPACES = ("fwd", "bwd")
_SPACES = {"saved": "fwd", "fwd": "fwd", "bwd": "bwd"}
_STRING = r'"(?:[^"\\]|\\.)*+"|\'(?:[^\'\\]|\\.)*+\''
_SECTION = re.compile(r"(?P<space>[^.\[]+)(?:\.(?P<container>.+)\[(?P<number>\d+)\])?")
_RELATIVE = re.compile(rf"{_STRING}|(?<![\w.])L(?![\w])|\[i(?P<distance>[+-]\d+)\]")
_ITEMS = re.compile(r"(?P<value>.*?)(?P<items>(?:\[\d+\])*)", re.DOTALL)
_LINK = re.compile(rf"\[(?P<index>\d+)\]|\[(?P<quoted>{_STRING})\]|\.?(?P<name>[^.\[\]]+)")


class Scope(NamedTuple):
    """Where a value belongs: ``Scope("fwd", "layers[3].attention")``, ``Scope("bwd", "bucket(norm, lm_head)")``."""

    space: str
    path: str

    @property
    def is_bucket(self) -> bool:
        return self.path.startswith("bucket(")

    @property
    def modules(self) -> tuple[str, ...]:
        """Full names of its modules, several only of a bucket; "" is the root.

        >>> Scope("bwd", "bucket(norm, layers[3].moe)").modules
        ('norm', 'layers.3.moe')
        """
        return _modules(self.path)


@functools.lru_cache(maxsize=1 << 16)
def _modules(path: str) -> tuple[str, ...]:
    inner = path[len("bucket(") : -1] if path.startswith("bucket(") else path
    return tuple([dotted(part) for part in inner.split(", ")])


class Place(NamedTuple):
    """A section: its space, and its layer or None."""

    space: str
    layer: Layer | None


class Reference(NamedTuple):
    """A reference taken apart: ``saved.L.mm[0]`` is item ``[0]`` of ``mm`` in ``L`` of ``fwd``.

    ``space`` is None where it is that of the section; ``path`` is "" for a bare name. An input's path is
    all of its name.
    """

    space: str | None
    path: str
    name: str
    items: str

    @property
    def is_input(self) -> bool:
        return self.space in INPUT_SPACES


@functools.lru_cache(maxsize=1 << 12)
def place_of(section: str) -> Place:
    """What a section's name says.

    >>> place_of("bwd.layers[3]"), place_of("fwd")
    (Place(space='bwd', layer=Layer(container='layers', number=3)), Place(space='fwd', layer=None))
    """
    found = _SECTION.fullmatch(section)
    if found is None:
        return Place(section, None)
    layer = Layer(found["container"], int(found["number"])) if found["container"] else None
    return Place(found["space"], layer)


@functools.lru_cache(maxsize=1 << 17)
def reference(text: str) -> Reference:
    """A reference's parts.

    >>> reference("saved.layers[i-1].wo.mm[1]"), reference("topk")
    (Reference(space='fwd', path='layers[i-1].wo', name='mm', items='[1]'), Reference(space=None, path='', name='topk', items=''))
    >>> reference("P.L.w"), reference("I[0]")
    (Reference(space='P', path='L.w', name='', items=''), Reference(space='I', path='[0]', name='', items=''))
    """  # noqa: E501
    if text.isidentifier():
        return Reference(None, "", text, "")
    if text[0] in "PBIA" and text[1:2] in (".", "["):
        return Reference(text[0], text[1:].removeprefix("."), "", "")
    value, items = _ITEMS.fullmatch(text).groups()  # type: ignore[union-attr]
    path, _, name = value.rpartition(".")
    first, dot, rest = path.partition(".")
    if first in _SPACES:
        return Reference(_SPACES[first], rest if dot else "_", name, items)
    return Reference(None, path, name, items)


@functools.lru_cache(maxsize=1 << 17)
def absolute(path: str, layer: Layer | None) -> str:
    """A path, or several in a text, as seen from nowhere.

    >>> absolute("bucket(L.moe, layers[i+1])", Layer("layers", 3)), absolute("norm", None)
    ('bucket(layers[3].moe, layers[4])', 'norm')
    >>> absolute('_["L"].x', Layer("layers", 3))
    '_["L"].x'
    """
    if layer is None or ("L" not in path and "[i" not in path):
        return path

    def count(found: re.Match[str]) -> str:
        if found[0] == "L":
            return f"{layer.container}[{layer.number}]"
        return found[0] if found["distance"] is None else f"[{layer.number + int(found['distance'])}]"

    return _RELATIVE.sub(count, path)


@functools.lru_cache(maxsize=1 << 16)
def scope_of(section: str, heading: str) -> Scope:
    """The scope of a ``with`` heading.

    >>> scope_of("bwd.layers[3]", "L.attention"), scope_of("bwd.layers[3]", "fwd.norm"), scope_of("fwd", "")
    (Scope(space='bwd', path='layers[3].attention'), Scope(space='fwd', path='norm'), Scope(space='fwd', path='_'))
    """
    space, layer = place_of(section)
    first, dot, rest = heading.partition(".")
    if dot and first in COMPUTED_SPACES:
        space, heading = first, rest
    return Scope(space, absolute(heading or "_", layer))


@functools.lru_cache(maxsize=1 << 16)
def dotted(path: str) -> str:
    """A path as torch spells it.

    >>> dotted('layers[3].moe["en-de"]'), dotted("_"), dotted('_["L"].x'), dotted("[0].x")
    ('layers.3.moe.en-de', '', 'L.x', '0.x')
    """
    parts = [link["index"] or link["name"] or ast.literal_eval(link["quoted"]) for link in _LINK.finditer(path)]
    return ".".join(parts[1:] if parts[:1] == ["_"] else parts)
