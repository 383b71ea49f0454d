"""Module paths: from ``layers.3.attention.wq`` to how the text spells them."""

from __future__ import annotations

import functools
import keyword
import unicodedata
from typing import NamedTuple

NEAR = 2
"""Layers up to this far away are spelled relative to the section's own."""

RESERVED = frozenset({"P", "B", "I", "A", "L", "_", "fwd", "bwd", "saved", "bucket"})
"""First words of a reference, which no module path may begin with unquoted."""


class Layer(NamedTuple):
    """An element of a numbered container: ``layers.3``."""

    container: str
    number: int

    def __str__(self) -> str:
        return f"{spell(self.container)}[{self.number}]"


@functools.lru_cache(maxsize=1 << 16)
def split_layer(fqn: str) -> tuple[Layer | None, str]:
    """The layer that a module belongs to, and the rest of its path.

    >>> split_layer("layers.3.attention.wq")
    (Layer(container='layers', number=3), 'attention.wq')
    >>> split_layer("norm")
    (None, 'norm')
    """
    parts = fqn.split(".")
    for place, part in enumerate(parts):
        if place and _is_index(part):
            return Layer(".".join(parts[:place]), int(part)), ".".join(parts[place + 1 :])
    return None, fqn


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdecimal() and str(int(part)) == part


@functools.lru_cache(maxsize=1 << 16)
def spell(fqn: str) -> str:
    """A module path as a Python expression; the root is ``_``.

    >>> spell("layers.3.moe.experts.0"), spell("heads.en-de"), spell("L.x"), spell("")
    ('layers[3].moe.experts[0]', 'heads["en-de"]', '_["L"].x', '_')
    """
    if not fqn:
        return "_"
    first, *rest = fqn.split(".")
    plain = is_word(first) and first not in RESERVED
    return (first if plain else f"_[{_quoted(first)}]") + _tail(rest)


def _tail(parts: list[str]) -> str:
    return "".join(f"[{p}]" if _is_index(p) else f".{p}" if is_word(p) else f"[{_quoted(p)}]" for p in parts)


def is_word(part: str) -> bool:
    """Whether Python reads it as this name: some letters it reads as others.

    >>> is_word("wq"), is_word("class"), is_word("\ufb01")
    (True, False, False)
    """
    is_name = part.isidentifier() and not keyword.iskeyword(part)
    return is_name and (part.isascii() or unicodedata.normalize("NFKC", part) == part)


def _quoted(part: str) -> str:
    r"""A name in quotes.

    >>> print(_quoted("en-de"), _quoted('a"b'), _quoted("a\\b"))
    "en-de" "a\"b" "a\\b"
    """
    escaped = part.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in escaped) + '"'


@functools.lru_cache(maxsize=1 << 16)
def spell_from(fqn: str, here: Layer | None) -> str:
    """A module path as seen from a layer.

    >>> here = Layer("layers", 3)
    >>> spell_from("layers.3.attention", here), spell_from("layers.2", here), spell_from("norm", here)
    ('L.attention', 'layers[i-1]', 'norm')
    >>> spell_from("layers.0.attention", here)
    'layers[0].attention'
    """
    layer, rest = split_layer(fqn)
    if layer is None or here is None or layer.container != here.container:
        return spell(fqn)
    distance = layer.number - here.number
    if abs(distance) > NEAR:
        return spell(fqn)
    head = f"{spell(layer.container)}[i{distance:+d}]" if distance else "L"
    return head + _tail(rest.split(".") if rest else [])


@functools.lru_cache(maxsize=1 << 16)
def spell_input(space: str, fqn: str, here: Layer | None) -> str:
    """A graph input as seen from a layer.

    >>> spell_input("P", "layers.3.wq.weight", Layer("layers", 3)), spell_input("I", "0.tokens", None)
    ('P.L.wq.weight', 'I[0].tokens')
    """
    if _is_index(fqn.partition(".")[0]):
        return space + _tail(fqn.split("."))
    return f"{space}.{spell_from(fqn, here)}"


def common_parent(fqns: list[str]) -> str:
    """The longest path that all of them begin with.

    >>> common_parent(["layers.3.attention.wq", "layers.3.attention.wo"]), common_parent(["a", "b"])
    ('layers.3.attention', '')
    """
    if len(fqns) == 1:
        return fqns[0]
    shared = []
    for parts in zip(*(fqn.split(".") for fqn in fqns)):  # noqa: B905 - the shortest path ends it
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
