"""Names of values: operator and counter, inside the scope."""

from __future__ import annotations

import keyword
from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from pytest_gtrainer.graphtext.paths import RESERVED
from pytest_gtrainer.graphtext.scopes import Scope, Scopes

WORDS = RESERVED | {"i", "inf", "nan", "const", "device"} | frozenset(keyword.kwlist)
"""Names that mean something else where a value could stand."""


class Namer:
    """Hands out names, each once in its scope.

    >>> from pytest_gtrainer.graphtext.scopes import scope_of
    >>> namer, scope = Namer(), scope_of(("norm",), "fwd")
    >>> [namer.name(scope, short) for short in ("mul", "add", "mul", "is")]
    ['mul', 'add', 'mul_1', 'is_']
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._words = WORDS | frozenset(taken)
        self._uses: defaultdict[Scope, dict[str, int]] = defaultdict(dict)

    def name(self, scope: Scope, short: str) -> str:
        uses = self._uses[scope]
        name = base = f"{short}_" if short in self._words else short
        while name in uses:  # also where an operator is itself called `view_1`
            uses[base] += 1
            name = f"{base}_{uses[base] - 1}"
        uses[name] = 1
        return name


def names_of(scopes: Scopes, taken: Iterable[str]) -> dict[fx.Node, tuple[Scope, str]]:
    """The scope and the name in it of every computed value, in the order of the schedule; then ``topk[1]`` of items."""
    name = Namer(taken).name
    named = zip(scopes.computed, scopes.owners, scopes.operators, strict=True)
    names = {node: (scope, name(scope, operator.short)) for node, scope, operator in named}
    for item in scopes.items:
        source, place = item.args
        if (known := names.get(source)) is not None:
            names[item] = (known[0], f"{known[1]}[{place}]")
    return names
