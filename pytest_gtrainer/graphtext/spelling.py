"""How types, symbols, constants, references and arguments are spelled, as seen from a section.

An unbacked symbol is numbered inside the layer that brings it in, so two MoE layers, each with its own data-dependent
sizes, have the same text. A backed symbol belongs to the whole graph, bodies included, and is defined with its hint:
``s0 = size(16)``.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import SYMBOLIC, expression, hint, is_unbacked
from pytest_gtrainer.graph.dtypes import spell_dtype
from pytest_gtrainer.graphtext.literals import other_constant, spell_literal, tensor_content
from pytest_gtrainer.graphtext.operators import groups_of, operator_of, word
from pytest_gtrainer.graphtext.scopes import Scope, is_item, names_of, scopes_of
from pytest_gtrainer.graphtext.sections import Layer, SectionKey, spell_from, spell_input

SIZES = ("both", "symbols", "examples")
"""How sizes that are dynamic are told: as symbols with their examples, or as one of the two."""


@dataclass(slots=True)
class Backed:
    """The backed symbols of a graph and its bodies, what is known of their values, and which of ``SIZES`` is told."""

    sizes: str = "both"
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
        return [f"{name} = size({known if self.sizes == 'both' else ''})" for name, known in self.hints.items()]


def _kind(symbol: sympy.Symbol) -> str:
    found = re.match("[a-z]+", symbol.name)
    return found[0] if found else "s"


_NUMBERS = {
    torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool", bool: "bool", int: "int", float: "float"
}  # fmt: skip


class Speller:
    """Spells what stands in the lines of one graph, as seen from where ``enter_section`` and ``enter_scope`` stand."""

    def __init__(
        self,
        gm: fx.GraphModule,
        mesh: Mapping[str, int],
        backed: Backed,
        device: str = "cpu",
        bodies: Mapping[str, str] | None = None,
        most_owners: int | None = None,
    ) -> None:
        self._gm, self._backed, self._device, self._bodies = gm, backed, device, bodies or {}
        self._most_owners = most_owners
        self.scopes, self.groups = scopes_of(gm.graph.nodes), groups_of(gm, mesh)
        self.names = names_of(self.scopes, [*(group.symbol for group in self.groups.values()), *self._bodies.values()])
        self._key = SectionKey("fwd", None)
        self._scope: Scope | None = None
        self._owner: dict[sympy.Symbol, tuple[Layer | None, str]] = {}
        self._counts: Counter[tuple[Layer | None, str]] = Counter()
        self._spelled: dict[tuple[Any, Layer | None], str] = {}

    def enter_section(self, key: SectionKey) -> None:
        self._key, self._scope = key, None

    def enter_scope(self, scope: Scope) -> str:
        """The ``with`` heading of a scope; names of its values are spelled bare from now on."""
        self._scope = scope
        return self.heading(scope)

    def heading(self, scope: Scope) -> str:
        """A module or bucket as seen from the section."""
        path = self._path(scope)
        return path if scope.space == self._key.space else f"{scope.space}.{path}"

    def module(self, fqn: str) -> str:
        """A module path as seen from the section."""
        return spell_from(fqn, self._key.layer)

    def _path(self, scope: Scope) -> str:
        owners = [self.module(owner) for owner in scope.owners]
        if not scope.is_bucket:
            return owners[0]
        shown = owners if len(owners) <= (self._most_owners or len(owners)) else [owners[0], "..."]
        return f"bucket({', '.join(shown)})"

    def reference(self, node: fx.Node) -> str:
        """A value, seen from the current scope: ``mm``, ``L.wo.mm``, ``saved.L.add``, ``topk[1]``."""
        if is_item(node):
            return f"{self.reference(node.args[0])}[{node.args[1]}]"
        if node.op == "get_attr":
            target = str(node.target)
            return self._bodies.get(target) or self._literal(operator.attrgetter(target)(self._gm))
        if node in self.scopes.inputs:
            space, fqn, repeat = self.scopes.inputs[node]
            spelled = spell_input(space, fqn, self._key.layer if space != "I" else None)
            return f'{spelled}["#{repeat}"]' if repeat else spelled
        scope, name = self.names[node]
        if scope == self._scope:
            return name
        is_saved = scope.space == "fwd" and self._key.space == "bwd"
        return f"saved.{self._path(scope)}.{name}" if is_saved else f"{self.heading(scope)}.{name}"

    def call(self, node: fx.Node) -> str:
        """The right-hand side of a line: operator and arguments, keywords sorted."""
        operator = operator_of(node)
        given = [("", place, value) for place, value in enumerate(node.args)]
        given += [(f"{word(name)}=", name, node.kwargs[name]) for name in sorted(node.kwargs)]
        told = []
        for to, at, value in given:
            group = self.groups.get(value) if at in operator.group_arguments and isinstance(value, str) else None
            told.append(f"{to}{group.symbol if group else self.argument(value)}")
        return f"{operator.text}({', '.join(told)})"

    def argument(self, value: Any) -> str:
        """An operand, or a literal, or a container of them."""
        if isinstance(value, fx.Node):
            return self.reference(value)
        if isinstance(value, tuple | list):
            return _sequence(value, self.argument)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self.argument(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.argument, (value.start, value.stop, value.step)))})"
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        if (known := spell_literal(value)) is not None:
            return known
        if isinstance(value, SYMBOLIC):
            return f"sym({self.size(value)})"
        if isinstance(value, torch.Tensor):
            return f"const({self.type_of(value)}, {tensor_content(value)})"
        return other_constant(value)

    def type_of(self, value: Any) -> str:
        """``bf16[64, 64]``, with strides unless contiguous and with the device unless the default."""
        if isinstance(value, tuple | list):
            return _sequence(value, self.type_of)
        if not isinstance(value, torch.Tensor):
            name = _NUMBERS.get(type(value))
            return f"{name}[{self.size(value)}]" if name else "_"
        if value.layout is not torch.strided:
            return "_"  # it has no strides, and no fake tensor can be made from a text
        shape, strides = value.shape, value.stride()
        text = f"{spell_dtype(value.dtype)}[{', '.join(map(self.size, shape)) or '()'}]"
        if not is_contiguous(list(map(expression, shape)), list(map(expression, strides))):
            text += f"[{', '.join(map(self.size, strides))}]"
        return text if value.device.type == self._device else f"{text} @ {value.device.type}"

    def size(self, value: Any) -> str:
        """A number, symbolic or not: an extent, a stride, the value of a scalar."""
        if isinstance(value, SYMBOLIC):
            return self._expression(expression(value), value, self._key.layer)
        return repr(value)

    def _expression(self, told: sympy.Basic, value: Any, here: Layer | None) -> str:
        """The expression of a symbolic ``value`` over canonical symbols; terms are sorted after the renaming."""
        if (told, here) in self._spelled:
            return self._spelled[told, here]
        expression = told
        if self._backed.sizes == "examples":
            backed = [symbol for symbol in told.free_symbols if not is_unbacked(symbol)]
            expression = told.xreplace({one: sympy.sympify(hint(one, value)) for one in backed})
        free = sorted(expression.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name))
        renamed = {  # with the assumptions that decide how an expression is printed
            symbol: sympy.Symbol(self._symbol(symbol, value, here), integer=symbol.is_integer, real=symbol.is_real)
            for symbol in free
        }
        is_example = expression.is_Float and told is not expression
        spelled = repr(float(expression)) if is_example else str(expression.xreplace(renamed))
        self._spelled[told, here] = spelled
        return spelled

    def _symbol(self, symbol: sympy.Symbol, value: Any, here: Layer | None) -> str:
        if not is_unbacked(symbol):
            return self._backed.name(symbol, value)
        if symbol not in self._owner:
            kind = _kind(symbol)
            count = self._counts[here, kind]
            self._counts[here, kind] += 1
            self._owner[symbol] = (here, f"{kind}{count}")
        layer, name = self._owner[symbol]
        return name if layer is None else f"{spell_from(f'{layer.container}.{layer.number}', here)}.{name}"


def is_contiguous(shape: list[Any], strides: list[Any]) -> bool:
    """Whether strides are the row-major ones, where they matter; adds no guard to symbols.

    >>> is_contiguous([2, 3], [3, 1]), is_contiguous([2, 3], [1, 2]), is_contiguous([1, 3], [7, 1])
    (True, False, True)
    """
    steps = itertools.accumulate(reversed(shape), lambda step, extent: extent * step, initial=1)
    told = zip(reversed(shape), reversed(strides), steps)  # noqa: B905 - the last step is that of the whole
    return 0 in shape or all(extent == 1 or stride == step for extent, stride, step in told)


def _sequence(items: Sequence[Any], spell: Callable[[Any], str]) -> str:
    told = ", ".join([spell(item) for item in items])
    return f"[{told}]" if isinstance(items, list) else f"({told},)" if len(items) == 1 else f"({told})"
