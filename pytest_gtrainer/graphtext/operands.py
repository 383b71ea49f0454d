"""Operands of a text: references, literals, constants. Compiled once, evaluated where they stand."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import append_node
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import CONSTANTS, bytes_of
from pytest_gtrainer.graphtext.operators import UnknownOperator, operator_named
from pytest_gtrainer.graphtext.sections import Scope
from pytest_gtrainer.graphtext.sizes import At, Sizes, device_named
from pytest_gtrainer.graphtext.syntax import (
    InputKey,
    LinePlace,
    Reference,
    input_key_at,
    integer,
    reference,
    refuse,
    scope_at,
    shown,
)

_PLAIN = (int, float, complex, str, bool, type(None))
_ITEM_META = ("custom", "autograd_backward", "fsdp_bucket", "nn_module_stack")


class Operands:
    """The values that a graph has so far, and how a text names them."""

    def __init__(self, graph: fx.Graph, sizes: Sizes, given: Mapping[str, Any], allow: tuple[str, ...]) -> None:
        self._graph, self._sizes, self._given, self._allow = graph, sizes, given, allow
        self.names: dict[str, Any] = {}  # definitions and bodies
        self.attributes: dict[str, Any] = {}
        self._inputs: dict[InputKey, fx.Node] = {}
        self._values: dict[Scope, dict[str, fx.Node]] = {}
        self._items: dict[tuple[fx.Node, int], fx.Node] = {}
        self._getters: dict[str, fx.Node] = {}

    # -- values

    def add_input(self, key: InputKey, node: fx.Node, at: ast.expr) -> None:
        if key in self._inputs:
            raise refuse(at, f"there is an input `{shown(at)}` already")
        self._inputs[key] = node

    def add(self, scope: Scope, name: str, node: fx.Node, at: ast.expr) -> None:
        values = self._values.setdefault(scope, {})
        if name in values:
            raise refuse(at, f"`{name}` is defined twice in this module: values are named once, `{name}_1`")
        values[name] = node

    def operand_at(self, node: ast.expr) -> At:
        """An operand as a function of where it stands.

        Raises:
            TextError: it is none.
        """
        if isinstance(node, ast.Constant) and type(node.value) in _PLAIN:
            return lambda place: node.value
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Name):
            return self._name_at(node)
        if isinstance(node, ast.Tuple | ast.List):
            items = [self.operand_at(item) for item in node.elts]
            kind = tuple if isinstance(node, ast.Tuple) else list
            return lambda place: kind([item(place) for item in items])
        if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) or integer(k) is not None for k in node.keys):
            keys = [ast.literal_eval(key) for key in node.keys if key is not None]
            values = [self.operand_at(value) for value in node.values]
            return lambda place: {key: value(place) for key, value in zip(keys, values, strict=True)}
        if isinstance(node, ast.Call):
            return self._call_at(node)
        return self._number_at(node)

    def _number_at(self, node: ast.expr) -> At:
        """``-1``, ``-inf``, ``(1+2j)``."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float):
                negative = -node.operand.value  # type: ignore[operator]
                return lambda place: negative
            if isinstance(node.operand, ast.Name) and node.operand.id in ("inf", "nan"):
                return lambda place: -float(node.operand.id)  # type: ignore[attr-defined]
        if (number := _complex(node)) is not None:
            return lambda place: number
        raise refuse(node, f"expected an operand, found `{shown(node)}`")

    # -- names

    def _name_at(self, node: ast.expr) -> At:
        known = reference(node)
        if known.is_input:
            return self._input_at(known, node)
        find = self._value_at(known, node) if known.head else self._bare_at(known.name, node)
        if not known.items:
            return find
        return lambda place: self._item(find(place), known.items, node)

    def _input_at(self, known: Reference, node: ast.expr) -> At:
        key_at, inputs = input_key_at(known.head), self._inputs

        def find(place: LinePlace) -> fx.Node:
            key = key_at(place.layer)
            if key not in inputs:
                names = [f"{space}.{fqn}" for space, fqn, _ in inputs]
                raise refuse(node, f"there is no input `{shown(node)}`{nearest(f'{key[0]}.{key[1]}', names)}")
            return inputs[key]

        return find

    def _bare_at(self, name: str, node: ast.expr) -> At:
        if name in self.names:
            value = self.names[name]
            if isinstance(value, fx.GraphModule):
                return lambda place: self._getter(name, value)
            return lambda place: value

        def find(place: LinePlace) -> Any:
            found = self._values.get(place.scope, {}).get(name)
            if found is not None:
                return found
            if name in CONSTANTS:
                return CONSTANTS[name]
            raise refuse(node, self._unknown(name, place.scope))

        return find

    def _value_at(self, known: Reference, node: ast.expr) -> At:
        name, scope, values = known.name, scope_at(known.head), self._values
        target: list[Any] = []  # an operator as an argument looks like a value

        def find(place: LinePlace) -> Any:
            where = scope(place)
            found = values.get(where, {}).get(name)
            if found is not None:
                return found
            if not target:
                try:
                    target.append(operator_named(ast.unparse(node), self._allow))
                except UnknownOperator:
                    raise refuse(node, self._unknown(name, where)) from None
            return target[0]

        return find

    def _unknown(self, name: str, scope: Scope) -> str:
        where = ", ".join(scope.owners) or "_"
        if scope in self._values:
            return f"no `{name}` before this line in {scope.space} of `{where}`{nearest(name, self._values[scope])}"
        known = [", ".join(known.owners) for known in self._values if known.space == scope.space]
        return f"no `{name}`: nothing before this line is in {scope.space} of `{where}`{nearest(where, known)}"

    def _item(self, node: Any, items: tuple[int, ...], at: ast.expr) -> fx.Node:
        for item in items:
            if not isinstance(node, fx.Node):
                raise refuse(at, f"`{shown(at)}`: only a value of several outputs has items")
            taken = self._items.get((node, item))
            if taken is None:
                value = _one_of(node.meta.get("val"), item, at)
                taken = append_node(self._graph, "getitem", "call_function", operator.getitem, (node, item), {})
                taken.meta.update({key: node.meta[key] for key in _ITEM_META if key in node.meta})
                if value is not None:
                    taken.meta["val"] = value
                self._items[node, item] = taken
            node = taken
        found: fx.Node = node
        return found

    # -- constants

    def _call_at(self, node: ast.Call) -> At:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "const" and 1 <= len(node.args) <= 2 and not node.keywords:
            return self._constant_at(node)
        if name in ("slice", "range") and 1 <= len(node.args) <= 3 and not node.keywords:
            kind: Callable[..., Any] = slice if name == "slice" else range
            ends = [self.operand_at(end) for end in node.args]

            def made(place: LinePlace) -> Any:
                try:
                    return kind(*[end(place) for end in ends])
                except (TypeError, ValueError) as error:
                    raise refuse(node, f"`{shown(node)}`: {error}") from None

            return made
        if name == "sym" and len(node.args) == 1:
            return self._sizes.operand_at(node.args[0])
        if name == "device" and len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
            device = device_named(str(node.args[0].value), node)
            return lambda place: device
        raise refuse(node, f"expected an operand, found `{shown(node)}`: an operator stands in a line of its own")

    def _constant_at(self, node: ast.Call) -> At:
        """``const(f32[2], [1.0, 2.0])``, ``const(f32[64], "sha256:...")``, ``const("Enum", "digest")``."""
        kind, *content = node.args
        key = ast.unparse(node)
        if isinstance(kind, ast.Constant):
            digest = content[0].value if content and isinstance(content[0], ast.Constant) else kind.value
            value = self._by_digest(str(digest), node)
            return lambda place: value
        type_at = self._sizes.type_at(kind)
        return lambda place: self._getter(key, None, lambda: self._tensor(type_at(place), content, node))

    def _getter(self, key: str, value: Any, make: Callable[[], Any] | None = None) -> fx.Node:
        """The ``get_attr`` of a body or constant, one for all its uses."""
        if key not in self._getters:
            value = make() if make else value
            name = key if key.isidentifier() else f"_constant{len(self.attributes)}"
            self.attributes[name] = value
            node = self._getters[key] = append_node(self._graph, name, "get_attr", name, (), {})
            if isinstance(value, torch.Tensor):
                node.meta["val"] = self._sizes.mode.from_tensor(value, static_shapes=True)
        return self._getters[key]

    def _by_digest(self, digest: str, node: ast.Call) -> Any:
        if digest not in self._given:
            raise refuse(node, f"`{shown(node)}` is told by its digest only: {_GIVE}")
        return self._given[digest]

    def _tensor(self, like: Any, content: list[ast.expr], node: ast.Call) -> torch.Tensor:
        told = content[0].value if len(content) == 1 and isinstance(content[0], ast.Constant) else ...
        if isinstance(told, str) and (like is None or isinstance(like, torch.Tensor)):
            return _as_told(self._by_digest(told, node), like, node)
        if not isinstance(like, torch.Tensor) or len(content) != 1:
            raise refuse(node, f"expected `const(f32[2], [1.0, 2.0])`, found `{shown(node)}`")
        if told is None:
            return like
        values = self.operand_at(content[0])(LinePlace("fwd", None))
        return _filled(like, values, node)


def _one_of(value: Any, item: int, at: ast.expr) -> Any:
    """One of several outputs, or a row of a tensor, as a graph of Python takes it; None if nothing is known."""
    if isinstance(value, tuple | list):
        if not -len(value) <= item < len(value):
            raise refuse(at, f"`{shown(at)}`: there are {len(value)} outputs")
        return value[item]
    try:
        return value.select(0, item) if isinstance(value, torch.Tensor) else None
    except (IndexError, RuntimeError) as error:
        raise refuse(at, f"`{shown(at)}`: {error}") from None


_GIVE = "give constants=graphtext.constants(gm) of the graph that was rendered"


def _filled(like: torch.Tensor, values: Any, node: ast.Call) -> torch.Tensor:
    try:
        tensor = torch.tensor(values, dtype=like.dtype).reshape(like.shape)
        made = _laid_out(tensor, like)
        if repr(made.tolist()) != repr(tensor.tolist()):
            raise ValueError("elements of one place in memory are told to differ")
        return made
    except (TypeError, ValueError, RuntimeError, OverflowError, AssertionError) as error:
        message = str(error).partition("\n")[0]
        raise refuse(node, f"these values do not make the constant's type: {message}") from None


def _laid_out(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The values with strides and device of ``like``; what is expanded is stored once."""
    shape, strides = like.shape, like.stride()
    stored = [1 if stride == 0 and extent else extent for extent, stride in zip(shape, strides, strict=True)]
    for dim, extent in enumerate(stored):
        values = values.narrow(dim, 0, extent)
    return torch.empty_strided(stored, strides, dtype=values.dtype).copy_(values).to(like.device).expand(shape)


def _as_told(given: Any, like: torch.Tensor | None, node: ast.Call) -> torch.Tensor:
    """A constant by its digest, which is of its bytes: equal bytes of other types have one digest."""
    if like is None or not isinstance(given, torch.Tensor) or _layout(given) == _layout(like):
        found: torch.Tensor = given
        return found
    flat = bytes_of(given)
    if flat.numel() != like.numel() * like.element_size():
        raise refuse(node, f"the constant given is {given.dtype} {list(given.shape)}, not `{shown(node.args[0])}`")
    return _laid_out(flat.view(like.dtype).reshape(like.shape), like)


def _layout(value: torch.Tensor) -> Any:
    return value.dtype, value.shape, value.device.type, value.layout is torch.strided and value.stride()


def _complex(node: ast.expr) -> complex | None:
    """A complex number as ``repr`` spells it, signs of zeros included."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        real, imaginary = _part(node.left, (int, float), ""), _part(node.right, (complex,), "j")
        if real is None or imaginary is None:
            return None
        return complex(real, imaginary if isinstance(node.op, ast.Add) else -imaginary)
    imaginary = _part(node, (complex,), "j")
    return None if imaginary is None else complex(0.0, imaginary)


def _part(node: ast.expr, kinds: tuple[type, ...], unit: str) -> float | None:
    """The real or the imaginary part of a number."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        part = _part(node.operand, kinds, unit)
        return None if part is None else -part
    if isinstance(node, ast.Name) and node.id in (f"inf{unit}", f"nan{unit}"):
        return float(node.id.removesuffix("j"))
    if isinstance(node, ast.Constant) and type(node.value) in kinds:
        return float(node.value.imag if unit else node.value)  # type: ignore[union-attr, arg-type]
    return None
