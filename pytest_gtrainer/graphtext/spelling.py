"""How types, symbols, constants, references and arguments are spelled; constants depend on nothing else.

Types, symbols and references are spelled as seen from a section. An unbacked symbol is numbered inside the layer that
brings it in, so two MoE layers, each with its own data-dependent sizes, have the same text. A backed symbol belongs to
the whole graph, bodies included, and is defined with its hint: ``s0 = size(16)``.

A constant is a word of torch, a literal, or a digest; ``constants`` gives what a text tells by a digest only.
"""

import ctypes
import hashlib
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
from pytest_gtrainer._torch.values import FakeTensor, HigherOrderOperator, OpOverload, pytree
from pytest_gtrainer.graph.nodes import DTYPES, spell_dtype
from pytest_gtrainer.graphtext.operators import function_of, groups_of, operator_of, word
from pytest_gtrainer.graphtext.scopes import Scope, is_item, names_of, scopes_of
from pytest_gtrainer.graphtext.sections import Layer, SectionKey, spell_from, spell_input

_SMALL = 8  # constant tensors of at most so many elements show their values, larger ones a digest
PLAIN = (type(None), bool, int, float, str, complex)
SPELLINGS: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((*PLAIN, range), repr),
    torch.dtype: spell_dtype,
    **dict.fromkeys((torch.layout, torch.memory_format), lambda value: str(value).removeprefix("torch.")),
    torch.device: lambda value: f'device("{value.type}")',
}
"""How constants of a type are spelled; none of these types has subclasses that are spelled alike."""
_TOLD = (fx.Node, fx.GraphModule, slice, torch.SymInt, torch.SymFloat, torch.SymBool)
"""What has no spelling of its own and is told in full."""
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
TORCH_WORDS = {SPELLINGS[type(one)](one): one for one in vars(torch).values() if isinstance(one, _NAMED)}
DTYPE_OF = {word: value for word, value in TORCH_WORDS.items() if isinstance(value, torch.dtype)}
CONSTANTS: dict[str, object] = {
    **TORCH_WORDS,
    "inf": float("inf"), "nan": float("nan"), "infj": complex(0, float("inf")), "nanj": complex(0, float("nan")),
}  # fmt: skip
"""What a bare word that is no value of the graph stands for."""


def spell_literal(value: Any) -> str | None:
    """A constant that depends on nothing else; None if it has no spelling."""
    if (spell := SPELLINGS.get(type(value))) is not None:
        return spell(value)
    return function_of(value).text if isinstance(value, OpOverload | HigherOrderOperator) else None


def tensor_content(value: torch.Tensor) -> str:
    """What a constant holds: by content, not by name, as the tracer's numbering of constants drifts."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return "None"
    if value.numel() <= _SMALL and value.dtype in DTYPES:
        return repr(value.tolist())
    content = bytes_of(value)
    memory = ctypes.string_at(content.data_ptr(), content.numel())  # `numpy()` would need NumPy
    return repr("sha256:" + hashlib.sha256(memory).hexdigest()[:16])


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, element by element, whatever its strides."""
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def object_digest(value: Any) -> str:
    """The digest of an object's ``repr``; the name of its type where that is an address."""
    shown = repr(value)
    return type(value).__name__ if " at 0x" in shown else hashlib.sha256(shown.encode()).hexdigest()[:12]


def constants(gm: fx.GraphModule) -> dict[str, Any]:
    """What a text tells by digest, and called modules by path, bodies included; ``parse`` takes it as ``constants``."""
    found: dict[str, Any] = {}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_module":
                found[str(node.target)] = module.get_submodule(str(node.target))
            held = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None
            for value in [held, *pytree.tree_leaves((node.args, node.kwargs))]:
                if isinstance(value, torch.Tensor):
                    told = tensor_content(value).strip("'")
                    if told.startswith("sha256:"):
                        found[told] = value
                elif spell_literal(value) is None and not isinstance(value, _TOLD):
                    found[object_digest(value)] = value
    return found


SIZES = ("both", "symbols", "examples")
"""How sizes that are dynamic are told: as symbols with their examples, or as one of the two."""


@dataclass(slots=True)
class Backed:
    """The backed symbols of a graph and its bodies, what is known of their values, and which of ``SIZES`` is told."""

    sizes: str = "both"
    _known: dict[sympy.Symbol, tuple[str, Any]] = field(default_factory=dict)  # its name and its hint
    _counts: Counter[str] = field(default_factory=Counter)

    def name(self, symbol: sympy.Symbol, value: Any) -> str:
        if symbol not in self._known:
            kind = _kind(symbol)
            self._known[symbol] = f"{kind}{self._counts[kind]}", hint(symbol, value)
            self._counts[kind] += 1
        return self._known[symbol][0]

    def definitions(self) -> list[str]:
        """``s0 = size(16)`` for each."""
        return [f"{name} = size({known if self.sizes == 'both' else ''})" for name, known in self._known.values()]


def _kind(symbol: sympy.Symbol) -> str:
    found = re.match("[a-z]+", symbol.name)
    return found[0] if found else "s"


_NUMBERS = {
    torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool", bool: "bool", int: "int", float: "float"
}  # fmt: skip


class Speller:
    """Spells what stands in the lines of one graph, as seen from where ``enter_section`` and ``enter_scope`` stand."""

    def __init__(
        self, gm: fx.GraphModule, mesh: Mapping[str, int], backed: Backed, device: str = "cpu",
        bodies: Mapping[str, str] | None = None, most_owners: int | None = None,
    ) -> None:  # fmt: skip
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
        name, digest = type(value).__name__, object_digest(value)
        return f"const({name!r})" if digest == name else f"const({name!r}, {digest!r})"

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
            self._owner[symbol] = (here, f"{kind}{self._counts[here, kind]}")
            self._counts[here, kind] += 1
        layer, name = self._owner[symbol]
        return name if layer is None else f"{spell_from(f'{layer.container}.{layer.number}', here)}.{name}"


def is_contiguous(shape: list[Any], strides: list[Any]) -> bool:
    """Whether strides are the row-major ones, where they matter; adds no guard to symbols."""
    steps = itertools.accumulate(reversed(shape), lambda step, extent: extent * step, initial=1)
    told = zip(reversed(shape), reversed(strides), steps)  # noqa: B905 - the last step is that of the whole
    return 0 in shape or all(extent == 1 or stride == step for extent, stride, step in told)


def _sequence(items: Sequence[Any], spell: Callable[[Any], str]) -> str:
    told = ", ".join([spell(item) for item in items])
    return f"[{told}]" if isinstance(items, list) else f"({told},)" if len(items) == 1 else f"({told})"
