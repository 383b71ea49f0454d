"""How types, symbols, constants, references and arguments are spelled, as seen from a section.

An unbacked symbol is numbered inside the layer that brings it in, so two MoE layers, each with its own data-dependent
sizes, have the same text. A backed symbol belongs to the whole graph, bodies included, and is defined with its hint:
``s0 = size(16)``.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import expression, hint, is_unbacked, static_type
from pytest_gtrainer.graph.dtypes import spell_dtype
from pytest_gtrainer.graphtext.literals import PLAIN, SPELLINGS, other_constant, spell_literal, tensor_content
from pytest_gtrainer.graphtext.operators import Group, Operator, word
from pytest_gtrainer.graphtext.scopes import Scope, Scopes, is_item, scope_of
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
_PLAIN = frozenset(PLAIN)
_NUMBERS = {
    torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool", bool: "bool", int: "int", float: "float"
}  # fmt: skip


class _ByType(dict[type, Callable[[Any], str]]):
    """How to spell a value of a type; a subclass is spelled as the first of its bases that is known.

    But not as a number or a string: an enum's or NumPy's ``repr`` is no literal.
    """

    def __missing__(self, kind: type) -> Callable[[Any], str]:
        self[kind] = found = next(self[base] for base in kind.__mro__ if base in self and base not in PLAIN)
        return found


_HERE = scope_of(("",), "")
"""In place of the scope of what has no name: it is spelled as a whole."""


class _Names(dict[fx.Node, tuple[Scope, str]]):
    """Scopes and names of values; what has none is spelled as a whole, and anew each time."""

    def __init__(self, names: Mapping[fx.Node, tuple[Scope, str]], spell: Callable[[fx.Node], str]) -> None:
        super().__init__(names)
        self._spell = spell

    def __missing__(self, node: fx.Node) -> tuple[Scope, str]:
        return _HERE, self._spell(node)


class _Prefixes(dict[Scope, str]):
    """What stands before the names of a scope's values, found once for each section."""

    def __init__(self, find: Callable[[Scope], str]) -> None:
        self._find = find

    def __missing__(self, scope: Scope) -> str:
        self[scope] = found = self._find(scope)
        return found


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
        self._gm, self._inputs, self._names = gm, scopes.inputs, _Names(names, self._nameless)
        self._groups, self._device, self._bodies = groups, device, bodies
        self._symbols = Symbols(backed)
        self._key = SectionKey("fwd", None)
        self._scope: Scope | None = None
        self._prefixes = _Prefixes(self._prefix)
        self._tensors: dict[Any, str] = {}
        self._spell = _ByType({
            fx.Node: self.reference,
            list: self._list,
            tuple: lambda items: _tuple([self.argument(item) for item in items]),
            dict: lambda items: f"{{{', '.join(f'{key!r}: {self.argument(item)}' for key, item in items.items())}}}",
            slice: lambda s: f"slice({', '.join(map(self.argument, (s.start, s.stop, s.step)))})",
            **SPELLINGS,
            object: self._literal,
        })  # fmt: skip
        self.types = _ByType({
            torch.Tensor: self._tensor_type, **dict.fromkeys(_NUMBERS, self._number_type), object: lambda value: "_",
            tuple: lambda items: _tuple([self.type_of(item) for item in items]),
            list: lambda items: f"[{', '.join([self.type_of(item) for item in items])}]",
        })  # fmt: skip

    # -- where we are

    def enter_section(self, key: SectionKey) -> None:
        self._key, self._scope = key, None
        self._prefixes.clear()

    def enter_scope(self, scope: Scope) -> str:
        """The ``with`` heading of a scope; names of its values are spelled bare from now on."""
        if self._scope is not None:
            del self._prefixes[self._scope]
        self._scope = scope
        self._prefixes[scope] = ""
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
        scope, name = self._names[node]
        return self._prefixes[scope] + name

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

    def _prefix(self, scope: Scope) -> str:
        """What stands before the name of a value of another scope."""
        if scope is _HERE:
            return ""
        if scope.space == self._key.space:
            return f"{self._path(scope)}."
        from_backward = scope.space == "fwd" and self._key.space == "bwd"
        return f"{'saved' if from_backward else scope.space}.{self._path(scope)}."

    # -- arguments

    def call(self, node: fx.Node, operator: Operator) -> str:
        """The right-hand side of a line: operator and arguments, keywords sorted."""
        groups = operator.group_arguments
        if not groups:
            spell, names, prefixes = self._spell, self._names, self._prefixes
            arguments = []
            for value in node.args:
                if type(value) is fx.Node:  # most are
                    scope, name = names[value]
                    arguments.append(prefixes[scope] + name)
                else:
                    arguments.append(spell[type(value)](value))
        else:
            arguments = [
                self._group(value) if place in groups else self.argument(value) for place, value in enumerate(node.args)
            ]
        keywords = node.kwargs
        if keywords:
            for name in sorted(keywords):
                value = keywords[name]
                arguments.append(f"{word(name)}={self._group(value) if name in groups else self.argument(value)}")
        return f"{operator.text}({', '.join(arguments)})"

    def _group(self, value: Any) -> str:
        group = self._groups.get(value) if isinstance(value, str) else None
        return group.symbol if group else self.argument(value)

    def argument(self, value: Any) -> str:
        """An operand, or a literal, or a container of them."""
        return self._spell[type(value)](value)

    def _list(self, value: list[Any]) -> str:
        if _PLAIN.issuperset(map(type, value)):  # most are shapes
            return list.__repr__(value)
        spell = self._spell
        return f"[{', '.join([spell[type(item)](item) for item in value])}]"

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
        return self.types[type(value)](value)

    def _number_type(self, value: Any) -> str:
        name = next(name for kind, name in _NUMBERS.items() if isinstance(value, kind))
        return f"{name}[{self.size(value)}]"

    def size(self, value: Any) -> str:
        """A number, symbolic or not: an extent, a stride, the value of a scalar."""
        if isinstance(value, _SYMBOLIC):
            return self._symbols.spell(expression(value), value, self._key.layer)
        return repr(value)

    def _tensor_type(self, value: torch.Tensor) -> str:
        kind = static_type(value)
        known = None if kind is None else self._tensors.get(kind)
        if known is not None:
            return known
        if value.layout is not torch.strided:
            return "_"  # it has no strides, and no fake tensor can be made from a text
        shape, strides = value.shape, value.stride()
        text = f"{spell_dtype(value.dtype)}[{', '.join(map(self.size, shape)) or '()'}]"
        if not is_contiguous([expression(e) for e in shape], [expression(s) for s in strides]):
            text += f"[{', '.join(map(self.size, strides))}]"
        if value.device.type != self._device:
            text += f" @ {value.device.type}"
        if kind is not None:
            self._tensors[kind] = text
        return text


def is_contiguous(shape: list[Any], strides: list[Any]) -> bool:
    """Whether strides are the row-major ones, where they matter; adds no guard to symbols.

    >>> is_contiguous([2, 3], [3, 1]), is_contiguous([2, 3], [1, 2]), is_contiguous([1, 3], [7, 1])
    (True, False, True)
    """
    if any(extent == 0 for extent in shape):
        return True
    expected: Any = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected = extent * expected
    return True


def _tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
