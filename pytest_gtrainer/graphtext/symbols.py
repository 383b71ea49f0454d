"""Symbolic sizes: an unbacked symbol is numbered inside the layer that brings it in.

So two MoE layers, each with its own data-dependent sizes, have the same text.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import sympy  # type: ignore[import-untyped]

from pytest_gtrainer.graphtext.paths import Layer, spell_from


class Symbols:
    """Spells expressions over sizes, as seen from a layer."""

    def __init__(self) -> None:
        self._owner: dict[sympy.Symbol, tuple[Layer | None, str]] = {}
        self._counts: Counter[tuple[Layer | None, str]] = Counter()
        self._spelled: dict[tuple[Any, Layer | None], str] = {}

    def spell(self, expression: sympy.Basic, here: Layer | None) -> str:
        """The expression over canonical symbols; its terms are sorted after the renaming."""
        known = self._spelled.get((expression, here))
        if known is None:
            free = sorted(expression.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name))
            renamed = {symbol: sympy.Symbol(self._name(symbol, here), integer=True) for symbol in free}
            known = self._spelled[expression, here] = str(expression.xreplace(renamed))
        return known

    def _name(self, symbol: sympy.Symbol, here: Layer | None) -> str:
        if symbol not in self._owner:
            letter = symbol.name[0]
            layer = here if letter in "uz" else None  # backed sizes belong to the whole graph
            count = self._counts[layer, letter]
            self._counts[layer, letter] += 1
            self._owner[symbol] = (layer, f"{letter}{count}")
        layer, name = self._owner[symbol]
        if layer is None:
            return name
        return f"{spell_from(f'{layer.container}.{layer.number}', here)}.{name}"
