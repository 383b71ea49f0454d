"""Symbolic sizes: an unbacked symbol is numbered inside the layer that brings it in.

So two MoE layers, each with its own data-dependent sizes, have the same text. A backed symbol
belongs to the whole graph, bodies included, and is defined with its hint: ``s0 = size(16)``.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]

from pytest_gtrainer._torch.graph_text import hint, is_unbacked
from pytest_gtrainer.graphtext.paths import Layer, spell_from

_KIND = re.compile(r"[a-z]+")


@dataclass(slots=True)
class Backed:
    """The backed symbols of a graph and its bodies, and what is known of their values."""

    names: dict[sympy.Symbol, str] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)

    def name(self, symbol: sympy.Symbol, value: Any) -> str:
        if symbol not in self.names:
            kind = _kind(symbol)
            self.names[symbol] = f"{kind}{self._counts[kind]}"
            self._counts[kind] += 1
            self.hints[self.names[symbol]] = hint(symbol, value)
        return self.names[symbol]

    def definitions(self) -> list[str]:
        """``s0 = size(16)`` for each."""
        return [f"{name} = size({known})" for name, known in self.hints.items()]


def _kind(symbol: sympy.Symbol) -> str:
    found = _KIND.match(symbol.name)
    return found[0] if found else "s"


class Symbols:
    """Spells expressions over sizes, as seen from a layer."""

    def __init__(self, backed: Backed) -> None:
        self._backed = backed
        self._owner: dict[sympy.Symbol, tuple[Layer | None, str]] = {}
        self._counts: Counter[tuple[Layer | None, str]] = Counter()
        self._spelled: dict[tuple[Any, Layer | None], str] = {}

    def spell(self, expression: sympy.Basic, value: Any, here: Layer | None) -> str:
        """The expression of a symbolic ``value`` over canonical symbols; terms are sorted after the renaming."""
        known = self._spelled.get((expression, here))
        if known is None:
            free = sorted(expression.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name))
            renamed = {symbol: _like(symbol, self._name(symbol, value, here)) for symbol in free}
            known = self._spelled[expression, here] = str(expression.xreplace(renamed))
        return known

    def _name(self, symbol: sympy.Symbol, value: Any, here: Layer | None) -> str:
        if not is_unbacked(symbol):
            return self._backed.name(symbol, value)
        if symbol not in self._owner:
            kind = _kind(symbol)
            count = self._counts[here, kind]
            self._counts[here, kind] += 1
            self._owner[symbol] = (here, f"{kind}{count}")
        layer, name = self._owner[symbol]
        if layer is None:
            return name
        return f"{spell_from(f'{layer.container}.{layer.number}', here)}.{name}"


def _like(symbol: sympy.Symbol, name: str) -> sympy.Symbol:
    """Under another name, with the assumptions that decide how an expression is printed."""
    return sympy.Symbol(name, integer=symbol.is_integer, real=symbol.is_real)
