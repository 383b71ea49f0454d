"""How types, symbols, constants, references and arguments are spelled, as seen from a section.

An unbacked symbol is numbered inside the layer that brings it in, so two MoE layers, each with its own data-dependent
sizes, have the same text. A backed symbol belongs to the whole graph, bodies included, and is defined with its hint:
``s0 = size(16)``.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import expression, hint, is_unbacked
from pytest_gtrainer.graph.dtypes import spell_dtype
from pytest_gtrainer.graphtext.literals import other_constant, spell_literal, tensor_content
from pytest_gtrainer.graphtext.operators import Group, operator_of, word
from pytest_gtrainer.graphtext.scopes import Scope, Scopes, is_item
from pytest_gtrainer.graphtext.sections import Layer, SectionKey, spell_from, spell_input

_KIND = re.compile(r"[a-z]+")
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
        told, known = expression, self._spelled.get((expression, here))
        if known is None:
            if self._backed.sizes == "examples":
                backed = [symbol for symbol in expression.free_symbols if not is_unbacked(symbol)]
                expression = expression.xreplace({one: sympy.sympify(hint(one, value)) for one in backed})
            free = sorted(expression.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name))
            renamed = {  # with the assumptions that decide how an expression is printed
                symbol: sympy.Symbol(self._name(symbol, value, here), integer=symbol.is_integer, real=symbol.is_real)
                for symbol in free
            }
            is_example = expression.is_Float and told is not expression
            spelled = repr(float(expression)) if is_example else str(expression.xreplace(renamed))
            known = self._spelled[told, here] = spelled
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


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = {
    torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool", bool: "bool", int: "int", float: "float"
}  # fmt: skip


class Speller:
    """Spells what stands in the lines of one graph.

    Where it is seen from, the section and the scope, is set by ``enter_section`` and
    ``enter_scope``; the other methods depend on it.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        scopes: Scopes,
        names: Mapping[fx.Node, tuple[Scope, str]],
        groups: Mapping[str, Group],
        device: str,
        bodies: Mapping[str, str],
        backed: Backed,
    ) -> None:
        self._gm, self._inputs, self._names = gm, scopes.inputs, names
        self._groups, self._device, self._bodies = groups, device, bodies
        self._symbols = Symbols(backed)
        self._key = SectionKey("fwd", None)
        self._scope: Scope | None = None

    # -- where we are

    def enter_section(self, key: SectionKey) -> None:
        self._key, self._scope = key, None

    def enter_scope(self, scope: Scope) -> str:
        """The ``with`` heading of a scope; names of its values are spelled bare from now on."""
        self._scope = scope
        path = self._path(scope)
        return path if scope.space == self._key.space else f"{scope.space}.{path}"

    def module(self, fqn: str) -> str:
        """A module path as seen from the section."""
        return spell_from(fqn, self._key.layer)

    def _path(self, scope: Scope) -> str:
        here = self._key.layer
        if not scope.is_bucket:
            return spell_from(scope.owners[0], here)
        return f"bucket({', '.join([spell_from(owner, here) for owner in scope.owners])})"

    # -- references

    def reference(self, node: fx.Node) -> str:
        """A value, seen from the current scope: ``mm``, ``L.wo.mm``, ``saved.L.add``, ``topk[1]``."""
        if node not in self._names:
            return self._nameless(node)
        scope, name = self._names[node]
        if scope == self._scope:
            return name
        if scope.space == self._key.space:
            return f"{self._path(scope)}.{name}"
        from_backward = scope.space == "fwd" and self._key.space == "bwd"
        return f"{'saved' if from_backward else scope.space}.{self._path(scope)}.{name}"

    def _nameless(self, node: fx.Node) -> str:
        """A value without a line in the schedule."""
        if is_item(node):
            return f"{self.reference(node.args[0])}[{node.args[1]}]"
        if node.op != "get_attr":
            space, fqn, repeat = self._inputs[node]
            spelled = spell_input(space, fqn, self._key.layer if space != "I" else None)
            return f'{spelled}["#{repeat}"]' if repeat else spelled
        target = str(node.target)
        return self._bodies.get(target) or self._literal(operator.attrgetter(target)(self._gm))

    # -- arguments

    def call(self, node: fx.Node) -> str:
        """The right-hand side of a line: operator and arguments, keywords sorted."""
        operator = operator_of(node)
        groups = operator.group_arguments
        given = [("", place, value) for place, value in enumerate(node.args)]
        given += [(f"{word(name)}=", name, node.kwargs[name]) for name in sorted(node.kwargs)]
        told = [f"{to}{self._group(value) if at in groups else self.argument(value)}" for to, at, value in given]
        return f"{operator.text}({', '.join(told)})"

    def _group(self, value: Any) -> str:
        group = self._groups.get(value) if isinstance(value, str) else None
        return group.symbol if group else self.argument(value)

    def argument(self, value: Any) -> str:
        """An operand, or a literal, or a container of them."""
        if isinstance(value, fx.Node):
            return self.reference(value)
        if isinstance(value, tuple):
            return _tuple([self.argument(item) for item in value])
        if isinstance(value, list):
            return f"[{', '.join([self.argument(item) for item in value])}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self.argument(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.argument, (value.start, value.stop, value.step)))})"
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        known = spell_literal(value)
        if known is not None:
            return known
        if isinstance(value, _SYMBOLIC):
            return f"sym({self.size(value)})"
        if isinstance(value, torch.Tensor):
            return f"const({self.type_of(value)}, {tensor_content(value)})"
        return other_constant(value)

    # -- types

    def type_of(self, value: Any) -> str:
        """``bf16[64, 64]``, with strides unless contiguous and with the device unless the default."""
        if isinstance(value, torch.Tensor):
            return self._tensor_type(value)
        if isinstance(value, tuple):
            return _tuple([self.type_of(item) for item in value])
        if isinstance(value, list):
            return f"[{', '.join([self.type_of(item) for item in value])}]"
        name = _NUMBERS.get(type(value))
        return f"{name}[{self.size(value)}]" if name else "_"

    def size(self, value: Any) -> str:
        """A number, symbolic or not: an extent, a stride, the value of a scalar."""
        if isinstance(value, _SYMBOLIC):
            return self._symbols.spell(expression(value), value, self._key.layer)
        return repr(value)

    def _tensor_type(self, value: torch.Tensor) -> str:
        if value.layout is not torch.strided:
            return "_"  # it has no strides, and no fake tensor can be made from a text
        shape, strides = value.shape, value.stride()
        text = f"{spell_dtype(value.dtype)}[{', '.join(map(self.size, shape)) or '()'}]"
        if not is_contiguous(list(map(expression, shape)), list(map(expression, strides))):
            text += f"[{', '.join(map(self.size, strides))}]"
        if value.device.type != self._device:
            text += f" @ {value.device.type}"
        return text


def is_contiguous(shape: list[Any], strides: list[Any]) -> bool:
    """Whether strides are the row-major ones, where they matter; adds no guard to symbols.

    >>> is_contiguous([2, 3], [3, 1]), is_contiguous([2, 3], [1, 2]), is_contiguous([1, 3], [7, 1])
    (True, False, True)
    """
    if 0 in shape:
        return True
    expected: Any = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected = extent * expected
    return True


def _tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
