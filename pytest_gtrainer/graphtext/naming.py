"""Names of values: operator and counter, inside the scope."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterable

from torch import fx

from pytest_gtrainer.graphtext.operators import operator_of, word
from pytest_gtrainer.graphtext.paths import RESERVED
from pytest_gtrainer.graphtext.scopes import Scope, input_of, is_computed

WORDS = RESERVED | {"i", "inf", "nan", "const", "device"}
"""Names that mean something else where a value could stand."""


class Namer:
    """Hands out names, each once in its scope.

    >>> namer, scope = Namer(), Scope(("norm",), "fwd")
    >>> [namer.name(scope, short) for short in ("mul", "add", "mul", "is")]
    ['mul', 'add', 'mul_1', 'is_']
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._words = WORDS | frozenset(taken)
        self._uses: Counter[tuple[Scope, str]] = Counter()

    def name(self, scope: Scope, short: str) -> str:
        base = f"{short}_" if short in self._words or keyword.iskeyword(short) else short
        while True:
            count = self._uses[scope, base]
            self._uses[scope, base] += 1
            if count == 0:
                return base
            # an operator may itself be called `view_1`
            if not self._uses[scope, f"{base}_{count}"]:
                self._uses[scope, f"{base}_{count}"] = 1
                return f"{base}_{count}"


def names_of(
    nodes: Iterable[fx.Node], scopes: dict[fx.Node, Scope], taken: Iterable[str]
) -> dict[fx.Node, str]:
    """The name of every input and computed value."""
    namer = Namer(taken)
    names: dict[fx.Node, str] = {}
    inputs = 0
    for node in nodes:
        if node.op == "placeholder":
            leaf = input_of(node, inputs)[1].rpartition(".")[2]
            names[node] = namer.name(scopes[node], f"arg{leaf}" if leaf.isdecimal() else word(leaf))
            inputs += 1
        elif is_computed(node):
            names[node] = namer.name(scopes[node], operator_of(node).short)
    return names
