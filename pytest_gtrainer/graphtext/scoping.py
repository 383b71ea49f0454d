"""Compiling the chains of a text: which module, which value, seen from which section.

A text says most lines once for many layers, so each is compiled once, into a function of the
*place* where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.paths import Layer
from pytest_gtrainer.graphtext.scopes import NOWHERE, Scope, scope_of
from pytest_gtrainer.graphtext.sections import Key
from pytest_gtrainer.graphtext.syntax import Token, chain, refuse, shown, static_path

PathAt = Callable[[Layer | None], str]


@dataclass(slots=True)
class Place:
    """Where a statement stands: its section's space and layer, and the scope of its ``with``."""

    space: str
    layer: Layer | None
    scope: Scope = NOWHERE

    @classmethod
    def of(cls, key: Key) -> Place:
        return cls(key.space, key.layer)


ScopeAt = Callable[[Place], Scope]


def path_at(tokens: Sequence[Token]) -> PathAt:
    """The module path of a chain, as a function of the section's layer.

    Raises:
        TextError: at once, what can be no path; when called, one that is relative where there is no layer.
    """
    first = tokens[0]
    if first.value == "L" and first.kind == "name":
        rest = "".join(f".{name}" for name in _names(tokens[1:]))
        return lambda here: f"{_layer(here, first).container}.{_layer(here, first).number}{rest}"
    place = next((place for place, token in enumerate(tokens) if token.relative), None)
    if place is None:
        fixed = static_path(tokens)
        return lambda here: fixed
    token = tokens[place]
    if not place:
        raise refuse(token.node, f"expected the layers' module before `[...]`, found `{shown(token.node)}`")
    head = static_path(tokens[:place])
    rest = "".join(f".{name}" for name in _names(tokens[place + 1 :]))
    distance = int(token.value)  # type: ignore[arg-type]

    def relative(here: Layer | None) -> str:
        number = _layer(here, token).number + distance
        if number < 0:
            raise refuse(token.node, f"layer {number} of `{head}` does not exist")
        return f"{head}.{number}{rest}"

    return relative


def _names(tokens: Sequence[Token]) -> list[str]:
    return static_path(tokens).split(".") if tokens else []


def _layer(here: Layer | None, token: Token) -> Layer:
    if here is None:
        raise refuse(token.node, f"`{shown(token.node)}` is relative to a layer, and this section has none")
    return here


def scope_at(tokens: Sequence[Token], spaces: dict[str, str]) -> ScopeAt:
    """The scope that a chain names; ``spaces`` are the first words that name a space of its own."""
    space = None
    if tokens[0].kind == "name" and tokens[0].value in spaces and len(tokens) > 1:
        space, tokens = spaces[str(tokens[0].value)], tokens[1:]
    owners, is_bucket = _owners(tokens)
    return lambda place: scope_of(
        tuple([owner(place.layer) for owner in owners]), place.space if space is None else space, is_bucket
    )


def _owners(tokens: Sequence[Token]) -> tuple[list[PathAt], bool]:
    if tokens[0].value != "bucket" or tokens[0].kind != "name":
        return [path_at(tokens)], False
    roots = tokens[1].value if len(tokens) == 2 else None
    if not isinstance(roots, tuple) or not roots:
        raise refuse(tokens[-1].node, f"expected `bucket(layers[0])`, found `{shown(tokens[-1].node)}`")
    return [path_at(chain(owner)) for owner in roots], True
