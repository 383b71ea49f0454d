"""Operands of a text: references, literals, constants, as the values that they stand for."""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import append_node
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import CONSTANTS, PLAIN, bytes_of
from pytest_gtrainer.graphtext.operators import UnknownOperator, operator_named
from pytest_gtrainer.graphtext.sections import Scope
from pytest_gtrainer.graphtext.sizes import Sizes, device_named
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
        self._references: dict[ast.expr, tuple[Reference, Callable[[Any], Any] | None]] = {}

    def add_input(self, key: InputKey, node: fx.Node, at: ast.expr) -> None:
        if key in self._inputs:
            raise refuse(at, f"there is an input `{shown(at)}` already")
        self._inputs[key] = node

    def add(self, scope: Scope, name: str, node: fx.Node, at: ast.expr) -> None:
        values = self._values.setdefault(scope, {})
        if name in values:
            raise refuse(at, f"`{name}` is defined twice in this module: values are named once, `{name}_1`")
        values[name] = node

    def operand(self, node: ast.expr, place: LinePlace) -> Any:
        """What an operand stands for.

        Raises:
            TextError: it is none.
        """
        if isinstance(node, ast.Constant) and type(node.value) in PLAIN:
            return node.value
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Name):
            return self._named(node, place)
        if isinstance(node, ast.Tuple | ast.List):
            items = [self.operand(item, place) for item in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) or integer(k) is not None for k in node.keys):
            keys = [ast.literal_eval(key) for key in node.keys if key is not None]
            return dict(zip(keys, [self.operand(value, place) for value in node.values], strict=True))
        if isinstance(node, ast.Call):
            return self._called(node, place)
        spelled = ast.unparse(node).replace(" ", "")
        for kind in (int, float, complex):  # `-1`, `-inf`, `-0-1j`: as `repr` spells them, signs of zeros included
            with contextlib.suppress(ValueError):
                return kind(spelled)
        raise refuse(node, f"expected an operand, found `{shown(node)}`")

    # -- names

    def _named(self, node: ast.expr, place: LinePlace) -> Any:
        """What a name stands for: an input, a value or an output of it, a definition, a constant, an operator."""
        known, find = self._references.get(node) or self._read(node)
        if find is not None and known.is_input:
            key = find(place.layer)
            if key not in self._inputs:
                names = [f"{space}.{fqn}" for space, fqn, _ in self._inputs]
                raise refuse(node, f"there is no input `{shown(node)}`{nearest(f'{key[0]}.{key[1]}', names)}")
            return self._inputs[key]
        if find is None and known.name in self.names:
            found = self.names[known.name]
            if isinstance(found, fx.GraphModule):
                found = self._getter(known.name, lambda: found)
        else:
            scope = place.scope if find is None else find(place)
            found = self._values.get(scope, {}).get(known.name)
            if found is None:
                found = self._constant_named(node, known.name, scope, is_bare=find is None)
        for item in known.items:
            found = self._item(found, item, node)
        return found

    def _read(self, node: ast.expr) -> tuple[Reference, Callable[[Any], Any] | None]:
        """A reference, and what finds its key or scope; read once, as a line may stand for a hundred layers."""
        known = reference(node)
        find = input_key_at(known.head) if known.is_input else scope_at(known.head) if known.head else None
        self._references[node] = known, find
        return known, find

    def _constant_named(self, node: ast.expr, name: str, scope: Scope, *, is_bare: bool) -> Any:
        """What a name stands for that no value has: a word of torch, or an operator as an argument."""
        if is_bare and name in CONSTANTS:
            return CONSTANTS[name]
        if not is_bare:
            with contextlib.suppress(UnknownOperator):
                return operator_named(ast.unparse(node), self._allow)
        where = ", ".join(scope.owners) or "_"
        if scope in self._values:
            hint = nearest(name, self._values[scope])
            raise refuse(node, f"no `{name}` before this line in {scope.space} of `{where}`{hint}")
        hint = nearest(where, [", ".join(known.owners) for known in self._values if known.space == scope.space])
        raise refuse(node, f"no `{name}`: nothing before this line is in {scope.space} of `{where}`{hint}")

    def _item(self, source: Any, item: int, at: ast.expr) -> fx.Node:
        """One of several outputs, or a row of a tensor, as a graph of Python takes it."""
        if not isinstance(source, fx.Node):
            raise refuse(at, f"`{shown(at)}`: only a value of several outputs has items")
        taken = self._items.get((source, item))
        if taken is not None:
            return taken
        value, known = source.meta.get("val"), None
        if isinstance(value, tuple | list):
            if not -len(value) <= item < len(value):
                raise refuse(at, f"`{shown(at)}`: there are {len(value)} outputs")
            known = value[item]
        elif isinstance(value, torch.Tensor):
            try:
                known = value.select(0, item)
            except (IndexError, RuntimeError) as error:
                raise refuse(at, f"`{shown(at)}`: {error}") from None
        taken = append_node(self._graph, "getitem", "call_function", operator.getitem, (source, item), {})
        taken.meta.update({key: source.meta[key] for key in _ITEM_META if key in source.meta})
        if known is not None:
            taken.meta["val"] = known
        self._items[source, item] = taken
        return taken

    # -- constants

    def _called(self, node: ast.Call, place: LinePlace) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "const" and 1 <= len(node.args) <= 2 and not node.keywords:
            kind, *content = node.args
            if not isinstance(kind, ast.Constant):  # `const(f32[2], [1.0, 2.0])`, `const(f32[64], "sha256:...")`
                key = ast.unparse(node)
                return self._getter(key, lambda: self._tensor(self._sizes.value(kind, place), content, node))
            digest = content[0] if content and isinstance(content[0], ast.Constant) else kind
            return self._by_digest(str(digest.value), node)  # `const("Enum", "digest")`
        if name in ("slice", "range") and 1 <= len(node.args) <= 3 and not node.keywords:
            ends = [self.operand(end, place) for end in node.args]
            try:
                return slice(*ends) if name == "slice" else range(*ends)
            except (TypeError, ValueError) as error:
                raise refuse(node, f"`{shown(node)}`: {error}") from None
        if name == "sym" and len(node.args) == 1:
            return self._sizes.operand(node.args[0], place)
        if name == "device" and len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
            return device_named(str(node.args[0].value), node)
        raise refuse(node, f"expected an operand, found `{shown(node)}`: an operator stands in a line of its own")

    def _getter(self, key: str, make: Callable[[], Any]) -> fx.Node:
        """The ``get_attr`` of a body or constant, one for all its uses."""
        if key not in self._getters:
            value = make()
            name = key if key.isidentifier() else f"_constant{len(self.attributes)}"
            self.attributes[name] = value
            node = self._getters[key] = append_node(self._graph, name, "get_attr", name, (), {})
            if isinstance(value, torch.Tensor):
                node.meta["val"] = self._sizes.mode.from_tensor(value, static_shapes=True)
        return self._getters[key]

    def _by_digest(self, digest: str, node: ast.Call) -> Any:
        if digest not in self._given:
            give = "give constants=graphtext.constants(gm) of the graph that was rendered"
            raise refuse(node, f"`{shown(node)}` is told by its digest only: {give}")
        return self._given[digest]

    def _tensor(self, like: Any, content: list[ast.expr], node: ast.Call) -> torch.Tensor:
        told = content[0].value if len(content) == 1 and isinstance(content[0], ast.Constant) else ...
        if isinstance(told, str) and (like is None or isinstance(like, torch.Tensor)):
            return _as_told(self._by_digest(told, node), like, node)
        if not isinstance(like, torch.Tensor) or len(content) != 1:
            raise refuse(node, f"expected `const(f32[2], [1.0, 2.0])`, found `{shown(node)}`")
        if told is None:
            return like
        values = self.operand(content[0], LinePlace("fwd", None))
        try:
            tensor = torch.tensor(values, dtype=like.dtype).reshape(like.shape)
            made = _laid_out(tensor, like)
            if repr(made.tolist()) != repr(tensor.tolist()):
                raise ValueError("elements of one place in memory are told to differ")
        except (TypeError, ValueError, RuntimeError, OverflowError, AssertionError) as error:
            message = str(error).partition("\n")[0]
            raise refuse(node, f"these values do not make the constant's type: {message}") from None
        return made


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
