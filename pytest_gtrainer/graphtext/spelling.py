"""How types, symbols, constants, references and arguments are spelled; constants depend on nothing else.

Types, symbols and references are spelled as seen from a section. An unbacked symbol is numbered inside the layer that
brings it in, so two MoE layers, each with its own data-dependent sizes, have the same text. A backed symbol belongs to
the whole graph, bodies included, and is defined with its hint: ``s0 = size(16)``.

A constant is a word of torch, a literal, or a digest; ``constants`` gives what a text tells by a digest only.
"""

import contextlib
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn

from pytest_gtrainer._torch.graph_text import (
    SYMBOLIC,
    expression,
    hint,
    hooks_of,
    is_kernel_call,
    is_unbacked,
    kernel_of,
)
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.graph.foreign import AnyGraph, adopted
from pytest_gtrainer.graph.nodes import spell_dtype
from pytest_gtrainer.graphtext.identity import (
    CannotShow,
    description,
    digest_of,
    digest_of_text,
    function_under,
    is_known_by_name,
    kernel_description,
    name_of,
)
from pytest_gtrainer.graphtext.literals import PLAIN, spell_literal, tensor_content
from pytest_gtrainer.graphtext.operators import groups_of, operator_of, word
from pytest_gtrainer.graphtext.scopes import Scope, is_item, names_of, scopes_of
from pytest_gtrainer.graphtext.sections import Layer, SectionKey, spell, spell_from, spell_input

_SPELLED_WHOLE = (fx.Node, fx.GraphModule, slice, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Operands that have no spelling of their own and stand in a text with all that they are."""


def held_values(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """Yield what the nodes of a graph, and of graphs inside it, call or hold that is neither a literal nor an operator.

    These are Python functions, called modules without a graph, tensors, and other objects. The hooks of a graph come
    with its output.
    """
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        if hooks := hooks_of(module):
            yield module.graph.output_node(), hooks
        for node in module.graph.nodes:
            held: list[Any] = pytree.tree_leaves((node.args, node.kwargs))
            if node.op == "get_attr":
                held.append(operator.attrgetter(str(node.target))(module))
            elif node.op == "call_module":
                held.append(module.get_submodule(str(node.target)))
            elif node.op == "call_function":
                held += [
                    *_kernel_of(node),
                    *([] if is_known_by_name(node.target) else [node.target]),
                ]
            for value in held:
                if not isinstance(value, _SPELLED_WHOLE) and spell_literal(value) is None:
                    yield node, value


def _kernel_of(node: fx.Node) -> list[Any]:
    """The Triton kernel of a node, and its constants, which the node names by their places in tables of torch."""
    if not is_kernel_call(node.target):
        return []
    kernel, constants = kernel_of(node.kwargs)
    return [*pytree.tree_leaves(constants), *([] if kernel is None else [function_under(kernel)])]


class HiddenValue(ValueError):
    """A graph calls or holds something that no text can show, so that two different graphs would have equal texts."""


def refuse_hidden(gm: fx.GraphModule) -> None:
    """Raise HiddenValue if the full text of a graph, or of one inside it, would not show what a node calls or holds."""
    for node, value in held_values(gm):
        if isinstance(value, torch.Tensor):
            continue
        try:
            digest_of(value)
        except CannotShow as error:
            where = f"{node.name} ({node.op} of {node.target})"
            raise HiddenValue(
                f"{where} has a {name_of(value)} that no text can show: {error}. A golden would accept any other in "
                "its place: give the graph numbers, tensors or functions instead, or check a text of your own"
            ) from error
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if is_kernel_call(node.target) and kernel_of(node.kwargs)[0] is None:
                raise HiddenValue(
                    f"{node.name} calls a Triton kernel that torch's table of kernels does not hold any more, so a "
                    "golden would accept any other: check the graph in the process and the test that traced it"
                )


def constants(graph: AnyGraph) -> dict[str, Any]:
    """What a text shows by digest, and called modules by path, bodies included; ``parse`` takes it as ``constants``."""
    found: dict[str, Any] = {}
    for node, value in held_values(adopted(graph)):
        if isinstance(value, torch.Tensor):
            content = tensor_content(value).strip("'")
            if content.startswith("sha256:"):
                found[content] = value
        elif isinstance(value, nn.Module) and node.op == "call_module":
            found[str(node.target)] = value
        else:
            with contextlib.suppress(CannotShow):
                found[digest_of(value)] = value
    return found


_SMALL_STRUCTURE = 8  # longer runs of results are written as a range

SIZES = ("both", "symbols", "examples")
"""How sizes that are dynamic are told: as symbols with their examples, or as one of the two."""


@dataclass(slots=True)
class Backed:
    """The backed symbols of a graph and its bodies, what is known of their values, and which of ``SIZES`` is told."""

    sizes: str = "both"
    _known: dict[sympy.Symbol, tuple[str, Any]] = field(
        default_factory=dict
    )  # its name and its hint
    _counts: Counter[str] = field(default_factory=Counter)

    def name(self, symbol: sympy.Symbol, value: Any) -> str:
        if symbol not in self._known:
            kind = _kind(symbol)
            self._known[symbol] = f"{kind}{self._counts[kind]}", hint(symbol, value)
            self._counts[kind] += 1
        return self._known[symbol][0]

    def definitions(self) -> list[str]:
        """``s0 = size(16)`` for each."""
        return [
            f"{name} = size({known if self.sizes == 'both' else ''})"
            for name, known in self._known.values()
        ]


def _kind(symbol: sympy.Symbol) -> str:
    found = re.match("[a-z]+", symbol.name)
    return found[0] if found else "s"


_NUMBERS = {
    torch.SymInt: "int",
    torch.SymFloat: "float",
    torch.SymBool: "bool",
    bool: "bool",
    int: "int",
    float: "float",
}


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
        self.names = names_of(
            self.scopes, [*(group.symbol for group in self.groups.values()), *self._bodies.values()]
        )
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
        kernel = kernel_of(node.kwargs) if is_kernel_call(node.target) else None
        given = [("", place, value) for place, value in enumerate(node.args)]
        given += [(f"{word(name)}=", name, node.kwargs[name]) for name in sorted(node.kwargs)]
        arguments = []
        for to, at, value in given:
            if at in operator.group_arguments and isinstance(value, str) and value in self.groups:
                arguments.append(f"{to}{self.groups[value].symbol}")
            elif kernel is not None and at == "kernel_idx":
                arguments.append(f"{to}{spell_kernel(kernel[0])}")
            elif kernel is not None and at == "constant_args_idx":
                arguments.append(f"{to}{self.argument(dict(kernel[1]))}")
            else:
                arguments.append(f"{to}{self.argument(value)}")
        return f"{operator.text}{_code_of_target(node)}({', '.join(arguments)})"

    def module_definition(self, path: str) -> str:
        """What a called module is: ``module.seq[1] = torch.nn.modules.dropout.Dropout(inplace=False, p=0.1)``."""
        called = f"module.{spell(path)}"
        if path in self._bodies:
            return f"{called} = {self._bodies[path]}"
        return f"{called} = {spell_description(self._gm.get_submodule(path))}"

    def argument(self, value: Any) -> str:
        """An operand, or a literal, or a container of them."""
        if isinstance(value, fx.Node):
            return self.reference(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = zip(value._fields, value, strict=True)
            inner = ", ".join([f"{word(name)}={self.argument(item)}" for name, item in fields])
            return f"namedtuple({name_of(type(value))!r}, {inner})"
        if isinstance(value, tuple | list):
            return _sequence(value, self.argument)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{spell_key(key)}: {self.argument(item)}' for key, item in value.items())}}}"
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
        return spell_object(value)

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
            symbol: sympy.Symbol(
                self._symbol(symbol, value, here), integer=symbol.is_integer, real=symbol.is_real
            )
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
        return (
            name
            if layer is None
            else f"{spell_from(f'{layer.container}.{layer.number}', here)}.{name}"
        )


def spell_object(value: Any) -> str:
    """``const('Colour.RED', '0123456789ab')``; without a digest, which a golden refuses, if nothing can be shown."""
    try:
        return f"const({name_of(value)!r}, {digest_of(value)!r})"
    except CannotShow:
        return f"const({name_of(value)!r})"


def spell_description(value: Any) -> str:
    """A module without a graph, or hooks: ``torch.nn.modules.dropout.Dropout(inplace=False, p=0.1)``.

    As an object if it has no description.
    """
    try:
        return description(value)
    except CannotShow:
        return spell_object(value)


def spell_kernel(kernel: Any) -> str:
    """A Triton kernel: ``const('kernels.add', '0123456789ab')``."""
    try:
        digest = digest_of_text(kernel_description(kernel))
    except CannotShow:
        return f"const({name_of(function_under(kernel))!r})"
    return "None" if kernel is None else f"const({name_of(function_under(kernel))!r}, {digest!r})"


def spell_structure(structure: Any) -> str | None:
    """The structure of what a graph's code returns, results by their numbers, ``{'loss': 0, 'logits': [1, 2]}``.

    None if that is a flat tuple, as of most graphs. A structure that was parsed is its text.
    """
    if isinstance(structure, str):
        return structure
    if structure.type is tuple and all(child.is_leaf() for child in structure.children()):
        return None
    return _structure_below(structure, itertools.count())


def _structure_below(structure: Any, numbers: Iterator[int]) -> str:
    if structure.is_leaf():
        return str(next(numbers))
    if structure.type in (list, tuple) and all(child.is_leaf() for child in structure.children()):
        found = [next(numbers) for _ in structure.children()]
        if len(found) > _SMALL_STRUCTURE:  # as many as a model has parameters
            return _sequence(structure.type([f"*range({found[0]}, {found[-1] + 1})"]), str)
        return _sequence(structure.type(found), str)
    items = [_structure_below(child, numbers) for child in structure.children()]
    if structure.type is dict:
        pairs = zip(structure.context, items, strict=True)
        return "{" + ", ".join(f"{spell_key(key)}: {item}" for key, item in pairs) + "}"
    if structure.type in (list, tuple):
        return _sequence(structure.type(items), str)
    return (
        f"{name_of(structure.type)}({', '.join([repr(_spell_context(structure.context)), *items])})"
    )


def _spell_context(context: Any) -> str:
    """What a container of a user's own holds beside its items: the keys, the class of a named tuple."""
    if isinstance(context, type) and hasattr(context, "_fields"):
        return f"{name_of(context)}({', '.join(context._fields)})"
    try:
        return description(context)
    except CannotShow:
        return name_of(context)


def spell_key(key: Any) -> str:
    """The key of a dictionary."""
    return repr(key) if type(key) in PLAIN else spell_literal(key) or spell_object(key)


def _code_of_target(node: fx.Node) -> str:
    """``["0123456789ab"]`` behind a function whose name does not say what it does; ``[...]`` if nothing can."""
    if node.op != "call_function" or is_known_by_name(node.target):
        return ""
    try:
        return f'["{digest_of(node.target)}"]'
    except CannotShow:
        return "[...]"


def is_contiguous(shape: list[Any], strides: list[Any]) -> bool:
    """Whether strides are the row-major ones, where they matter; adds no guard to symbols."""
    steps = itertools.accumulate(reversed(shape), lambda step, extent: extent * step, initial=1)
    told = zip(reversed(shape), reversed(strides), steps)  # noqa: B905 - the last step is that of the whole
    return 0 in shape or all(extent == 1 or stride == step for extent, stride, step in told)


def _sequence(items: Sequence[Any], spell: Callable[[Any], str]) -> str:
    told = ", ".join([spell(item) for item in items])
    return (
        f"[{told}]" if isinstance(items, list) else f"({told},)" if len(items) == 1 else f"({told})"
    )
