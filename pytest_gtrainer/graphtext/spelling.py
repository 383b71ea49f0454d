"""Spelling of types, symbols, constants, references and arguments in graph text.

Types, symbols and references are spelled relative to a section. An unbacked symbol is numbered in
the layer that brings it in, so two MoE layers, each with its own data-dependent sizes, have the
same text. A backed symbol belongs to the whole graph, bodies included, and is defined with its
hint: ``s0 = size(16)``.

A constant is a word of torch, a literal, or a digest. Its spelling does not depend on the section.
``constants`` returns the values that a text shows by a digest only.
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
from pytest_gtrainer.graph.foreign import AnyGraph, adopt
from pytest_gtrainer.graph.nodes import graphs_in, spell_dtype
from pytest_gtrainer.graph.same_on_ranks import nodes_within
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
"""Operands that the lines of a text show completely, or that a body shows."""


def held_values(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """Yield each node of a graph, or of a graph inside it, with each value that it calls or holds.

    These are Python functions, called modules without a graph, tensors, and other objects, but not
    literals and operators. The hooks of a graph come with its output node.
    """
    for module in graphs_in(gm):
        if hooks := hooks_of(module):
            yield module.graph.output_node(), hooks
        for node in module.graph.nodes:
            for value in _operands_and_target(module, node):
                if not isinstance(value, _SPELLED_WHOLE) and spell_literal(value) is None:
                    yield node, value


def _operands_and_target(module: fx.GraphModule, node: fx.Node) -> list[Any]:
    """Return the leaves of a node's arguments, and what it gets or calls."""
    held: list[Any] = pytree.tree_leaves((node.args, node.kwargs))
    if node.op == "get_attr":
        held.append(operator.attrgetter(str(node.target))(module))
    elif node.op == "call_module":
        held.append(module.get_submodule(str(node.target)))
    elif node.op == "call_function":
        if is_kernel_call(node.target):
            # The node has only the place of its kernel in a table of torch.
            kernel, kernel_constants = kernel_of(node.kwargs)
            held += pytree.tree_leaves(kernel_constants)
            if kernel is not None:
                held.append(function_under(kernel))
        if not is_known_by_name(node.target):
            held.append(node.target)

    return held


class HiddenValue(ValueError):
    """A graph holds a value that no text can show, so another graph could have the same text."""


def refuse_hidden(gm: fx.GraphModule) -> None:
    """Check that the full text of a graph shows everything that its nodes call and hold.

    Raises:
        HiddenValue: a node of the graph, or of a graph inside it, has a value without description.
    """
    for node, value in held_values(gm):
        if isinstance(value, torch.Tensor):
            continue
        try:
            digest_of(value)
        except CannotShow as error:
            where = f"{node.name} ({node.op} of {node.target})"
            raise HiddenValue(
                f"{where} has a {name_of(value)} that no text can show: {error}. A golden would "
                "accept any other in its place: give the graph numbers, tensors or functions "
                "instead, or check a text of your own"
            ) from error

    for node in nodes_within(gm):
        if is_kernel_call(node.target) and kernel_of(node.kwargs)[0] is None:
            raise HiddenValue(
                f"{node.name} calls a Triton kernel that torch's table of kernels does not hold "
                "any more, so a golden would accept any other: check the graph in the process and "
                "the test that traced it"
            )


def constants(graph: AnyGraph) -> dict[str, Any]:
    """Return the values that the text of a graph shows by their digests only, under these digests.

    Called modules are returned under their paths. Graphs inside the graph are included. ``parse``
    takes the result as its argument ``constants``.
    """
    found: dict[str, Any] = {}
    for node, value in held_values(adopt(graph)):
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
"""Spellings of dynamic sizes: symbols that are defined with their examples, or one of the two."""


@dataclass(slots=True)
class Backed:
    """The backed symbols of a graph and its bodies, with the spelling of ``SIZES`` for them.

    So are indices of devices: they belong to the graph as a whole.
    """

    sizes: str = "both"
    # the name and the hint of each symbol
    _known: dict[sympy.Symbol, tuple[str, Any]] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _indices: dict[str, list[int]] = field(default_factory=dict)  # by type, in order of use

    def device(self, device: torch.device) -> str:
        """Return ``cuda`` for the first device of a type, ``cuda:1`` for the second one.

        A rank has its own index, and all ranks have one text. So an index alone is left out, and
        only a second one in the same graph shows.
        """
        if device.index is None or device.type in ("cpu", "meta"):
            return device.type
        known = self._indices.setdefault(device.type, [])
        if device.index not in known:
            known.append(device.index)
        number = known.index(device.index)
        return f"{device.type}:{number}" if number else device.type

    def name(self, symbol: sympy.Symbol, value: Any) -> str:
        """Return the canonical name of a symbol of the symbolic ``value``: ``s0``, ``s1``, ..."""
        if symbol not in self._known:
            kind = _symbol_kind(symbol)
            self._known[symbol] = f"{kind}{self._counts[kind]}", hint(symbol, value)
            self._counts[kind] += 1
        return self._known[symbol][0]

    def definitions(self) -> list[str]:
        """Return ``s0 = size(16)`` for each symbol."""
        lines = []
        for name, example in self._known.values():
            shown = example if self.sizes == "both" else ""
            lines.append(f"{name} = size({shown})")
        return lines


def _symbol_kind(symbol: sympy.Symbol) -> str:
    """Return the letters of a symbol's name: ``s`` of a size, ``u`` of an unbacked one."""
    found = re.match("[a-z]+", symbol.name)
    if found is None:
        return "s"
    return found[0]


_NUMBERS = {
    torch.SymInt: "int",
    torch.SymFloat: "float",
    torch.SymBool: "bool",
    bool: "bool",
    int: "int",
    float: "float",
}


class Speller:
    """Spells nodes of one graph relative to the section and scope that were entered last."""

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
        """Return the ``with`` heading of a scope, whose values have bare names from now on."""
        self._scope = scope
        return self.heading(scope)

    def heading(self, scope: Scope) -> str:
        """Return a module or bucket relative to the section."""
        path = self._path(scope)
        if scope.space != self._key.space:
            path = f"{scope.space}.{path}"
        return path

    def module(self, fqn: str) -> str:
        """Return a module path relative to the section."""
        return spell_from(fqn, self._key.layer)

    def _path(self, scope: Scope) -> str:
        owners = [self.module(owner) for owner in scope.owners]
        if not scope.is_bucket:
            return owners[0]
        if self._most_owners and len(owners) > self._most_owners:
            owners = [owners[0], "..."]
        return f"bucket({', '.join(owners)})"

    def reference(self, node: fx.Node) -> str:
        """Return a value's name from here: ``mm``, ``L.wo.mm``, ``saved.L.add``, ``topk[1]``."""
        if is_item(node):
            return f"{self.reference(node.args[0])}[{node.args[1]}]"
        if node.op == "get_attr":
            target = str(node.target)
            return self._bodies.get(target) or self._literal(operator.attrgetter(target)(self._gm))
        if node in self.scopes.inputs:
            space, fqn, repeat = self.scopes.inputs[node]
            layer = None if space == "I" else self._key.layer
            spelled = spell_input(space, fqn, layer)
            if repeat:
                spelled += f'["#{repeat}"]'
            return spelled

        scope, name = self.names[node]
        if scope == self._scope:
            return name
        if scope.space == "fwd" and self._key.space == "bwd":
            return f"saved.{self._path(scope)}.{name}"
        return f"{self.heading(scope)}.{name}"

    def call(self, node: fx.Node) -> str:
        """Return the right-hand side of a line: operator and arguments, keywords sorted."""
        operator = operator_of(node)
        kernel = kernel_of(node.kwargs) if is_kernel_call(node.target) else None

        def spell_argument(parameter: int | str, value: Any) -> str:
            # Names of process groups depend on how many a process has made before.
            is_group = parameter in operator.group_arguments and isinstance(value, str)
            if is_group and value in self.groups:
                return self.groups[value].symbol
            # A place in torch's table of kernels depends on what was traced before.
            if kernel is not None and parameter == "kernel_idx":
                return spell_kernel(kernel[0])
            if kernel is not None and parameter == "constant_args_idx":
                return self.argument(dict(kernel[1]))
            return self.argument(value)

        arguments = [spell_argument(place, value) for place, value in enumerate(node.args)]
        for name in sorted(node.kwargs):
            arguments.append(f"{word(name)}={spell_argument(name, node.kwargs[name])}")
        return f"{operator.text}{_code_of_target(node)}({', '.join(arguments)})"

    def module_definition(self, path: str) -> str:
        """Return ``module.seq[1] = torch.nn.modules.dropout.Dropout(inplace=False, p=0.1)``."""
        called = f"module.{spell(path)}"
        if path in self._bodies:
            return f"{called} = {self._bodies[path]}"
        return f"{called} = {spell_description(self._gm.get_submodule(path))}"

    def argument(self, value: Any) -> str:
        """Return an operand, a literal, or a container of them."""
        if isinstance(value, fx.Node):
            return self.reference(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = zip(value._fields, value, strict=True)
            inner = ", ".join(f"{word(name)}={self.argument(item)}" for name, item in fields)
            return f"namedtuple({name_of(type(value))!r}, {inner})"

        if isinstance(value, tuple | list):
            return _sequence(value, self.argument)
        if isinstance(value, dict):
            pairs = [f"{spell_key(key)}: {self.argument(item)}" for key, item in value.items()]
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.argument, (value.start, value.stop, value.step)))})"
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        if isinstance(value, torch.device):
            return f'device("{self._backed.device(value)}")'
        literal = spell_literal(value)
        if literal is not None:
            return literal
        if isinstance(value, SYMBOLIC):
            return f"sym({self.size(value)})"
        if isinstance(value, torch.Tensor):
            return f"const({self.type_of(value)}, {tensor_content(value)})"
        return spell_object(value)

    def type_of(self, value: Any) -> str:
        """Return ``bf16[64, 64]``, with strides and device unless they are the default."""
        if isinstance(value, tuple | list):
            return _sequence(value, self.type_of)
        name = _NUMBERS.get(type(value))
        if name:
            return f"{name}[{self.size(value)}]"
        if not isinstance(value, torch.Tensor):
            return "_"
        if value.layout is not torch.strided:
            return "_"  # it has no strides, and no fake tensor can be made from a text
        shape, strides = value.shape, value.stride()
        text = f"{spell_dtype(value.dtype)}[{', '.join(map(self.size, shape)) or '()'}]"
        if not is_contiguous(list(map(expression, shape)), list(map(expression, strides))):
            text += f"[{', '.join(map(self.size, strides))}]"
        device = self._backed.device(value.device)
        if device != self._device:
            text += f" @ {device}" if device.isidentifier() else f' @ device("{device}")'
        return text

    def size(self, value: Any) -> str:
        """Return a number, symbolic or not: an extent, a stride, the value of a scalar."""
        if isinstance(value, SYMBOLIC):
            return self._expression(expression(value), value, self._key.layer)
        return repr(value)

    def _expression(self, traced: sympy.Basic, value: Any, layer: Layer | None) -> str:
        """Spell the traced expression of a symbolic ``value`` with canonical symbols."""
        if (traced, layer) in self._spelled:
            return self._spelled[traced, layer]
        expression = traced
        if self._backed.sizes == "examples":
            examples = {}
            for symbol in traced.free_symbols:
                if not is_unbacked(symbol):
                    examples[symbol] = sympy.sympify(hint(symbol, value))
            expression = traced.xreplace(examples)

        # sympy sorts terms by the names of symbols, so they are renamed before it prints.
        renamed = {}
        for symbol in sorted(expression.free_symbols, key=lambda one: (len(one.name), one.name)):
            # These assumptions decide how an expression is printed.
            renamed[symbol] = sympy.Symbol(
                self._symbol(symbol, value, layer), integer=symbol.is_integer, real=symbol.is_real
            )

        if expression.is_Float and traced is not expression:
            spelled = repr(float(expression))
        else:
            spelled = str(expression.xreplace(renamed))

        self._spelled[traced, layer] = spelled
        return spelled

    def _symbol(self, symbol: sympy.Symbol, value: Any, here: Layer | None) -> str:
        """Return the name of a symbol, relative to the layer ``here``."""
        if not is_unbacked(symbol):
            return self._backed.name(symbol, value)
        if symbol not in self._owner:
            kind = _symbol_kind(symbol)
            self._owner[symbol] = (here, f"{kind}{self._counts[here, kind]}")
            self._counts[here, kind] += 1
        layer, name = self._owner[symbol]
        if layer is None:
            return name
        return f"{spell_from(f'{layer.container}.{layer.number}', here)}.{name}"


def spell_object(value: Any) -> str:
    """Return ``const('Colour.RED', '0123456789ab')``.

    A value without description has no digest; ``refuse_hidden`` keeps it out of goldens.
    """
    try:
        return f"const({name_of(value)!r}, {digest_of(value)!r})"
    except CannotShow:
        return f"const({name_of(value)!r})"


def spell_description(value: Any) -> str:
    """Return the description of a module or of hooks; ``const(...)`` if there is none."""
    try:
        return description(value)
    except CannotShow:
        return spell_object(value)


def spell_kernel(kernel: Any) -> str:
    """Return ``const('kernels.add', '0123456789ab')`` for a Triton kernel."""
    if kernel is None:
        return "None"
    try:
        digest = digest_of_text(kernel_description(kernel))
    except CannotShow:
        return f"const({name_of(function_under(kernel))!r})"
    return f"const({name_of(function_under(kernel))!r}, {digest!r})"


def spell_structure(structure: Any) -> str | None:
    """Return the structure of results by their numbers: ``{'loss': 0, 'logits': [1, 2]}``.

    None for a flat tuple, which most graphs return. A structure that was parsed is a text already.
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
    context = repr(_spell_context(structure.context))
    return f"{name_of(structure.type)}({', '.join([context, *items])})"


def _spell_context(context: Any) -> str:
    """Spell the pytree context of a container: its keys, or the class of a named tuple."""
    if isinstance(context, type) and hasattr(context, "_fields"):
        return f"{name_of(context)}({', '.join(context._fields)})"
    try:
        return description(context)
    except CannotShow:
        return name_of(context)


def spell_key(key: Any) -> str:
    """Return the key of a dictionary."""
    if type(key) in PLAIN:
        return repr(key)
    return spell_literal(key) or spell_object(key)


def _code_of_target(node: fx.Node) -> str:
    """Return ``["0123456789ab"]`` for a function that its name does not identify.

    ``[...]`` for a function without description, "" for torch's and Python's own.
    """
    if node.op != "call_function" or is_known_by_name(node.target):
        return ""
    try:
        return f'["{digest_of(node.target)}"]'
    except CannotShow:
        return "[...]"


def is_contiguous(shape: list[Any], strides: list[Any]) -> bool:
    """Return whether strides are row-major, apart from dimensions of extent 1.

    Shape and strides hold numbers or sympy expressions, so that no comparison adds a guard.
    """
    if 0 in shape:
        return True
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step = extent * step
    return True


def _sequence(items: Sequence[Any], spell: Callable[[Any], str]) -> str:
    """Return the literal of a list or tuple, each item by ``spell``."""
    inner = ", ".join(map(spell, items))
    if isinstance(items, list):
        return f"[{inner}]"
    if len(items) == 1:
        return f"({inner},)"
    return f"({inner})"
