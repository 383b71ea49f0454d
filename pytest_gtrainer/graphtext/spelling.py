"""How types, constants, references and arguments are spelled, as seen from a section."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from pytest_gtrainer.graphtext._torch import HigherOrderOperator, OpOverload, expression
from pytest_gtrainer.graphtext.groups import Group
from pytest_gtrainer.graphtext.operators import Operator, operator_text, word
from pytest_gtrainer.graphtext.paths import Layer, spell_from
from pytest_gtrainer.graphtext.scopes import Scope, is_item
from pytest_gtrainer.graphtext.sections import Key
from pytest_gtrainer.graphtext.symbols import Symbols

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint64: "u64", torch.uint32: "u32", torch.uint16: "u16", torch.uint8: "u8", torch.bool: "b8",
    torch.complex128: "c128", torch.complex64: "c64", torch.complex32: "c32",
}  # fmt: skip
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SMALL = 8
"""Constants of at most so many elements show their values, larger ones a digest."""


def spell_dtype(dtype: torch.dtype) -> str:
    """``bf16``; a dtype without a short name has torch's (``float8_e4m3fn``)."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


class Speller:
    """Spells what stands in the lines of one graph.

    Where it is seen from, the section and the scope, is set by ``enter_section`` and
    ``enter_scope``; the other methods depend on it.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        scopes: Mapping[fx.Node, Scope],
        names: Mapping[fx.Node, str],
        groups: Mapping[str, Group],
        device: str,
        bodies: Mapping[str, str],
    ) -> None:
        self._gm, self._scopes, self._names = gm, scopes, names
        self._groups, self._device, self._bodies = groups, device, bodies
        self._symbols = Symbols()
        self._key = Key("fwd", None)
        self._scope: Scope | None = None
        self._prefixes: dict[Scope, str] = {}
        self._tensors: dict[Any, str] = {}

    # -- where we are

    def enter_section(self, key: Key) -> None:
        self._key, self._scope = key, None
        self._prefixes.clear()

    def enter_scope(self, scope: Scope) -> str:
        """The ``with`` heading of a scope; names of its values are spelled bare from now on."""
        self._scope = scope
        path = self._path(scope)
        return path if scope.space == self._key.space else f"{scope.space}.{path}"

    @property
    def _here(self) -> Layer | None:
        return self._key.layer

    def _path(self, scope: Scope) -> str:
        path = ", ".join([spell_from(owner, self._here) for owner in scope.owners])
        return f"bucket({path})" if scope.is_bucket else path

    # -- references

    def reference(self, node: fx.Node) -> str:
        """A value, seen from the current scope: ``mm``, ``L.wo.mm``, ``saved.L.add``, ``topk[1]``."""
        if is_item(node):
            return f"{self.reference(node.args[0])}[{node.args[1]}]"
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        scope = self._scopes[node]
        if scope == self._scope:
            return self._names[node]
        return self.prefix(scope) + self._names[node]

    def prefix(self, scope: Scope) -> str:
        """What stands before the name of a value of another scope."""
        known = self._prefixes.get(scope)
        if known is None:
            known = self._prefixes[scope] = self._prefix(scope)
        return known

    def _prefix(self, scope: Scope) -> str:
        if scope.space in ("P", "B", "I"):
            return f"{scope.space}." if scope.is_nowhere else f"{scope.space}.{self._path(scope)}."
        if scope.space == self._key.space:
            return f"{self._path(scope)}."
        from_backward = scope.space == "fwd" and self._key.space == "bwd"
        return f"{'saved' if from_backward else scope.space}.{self._path(scope)}."

    def _attribute(self, target: str) -> str:
        if target in self._bodies:
            return self._bodies[target]
        value: Any = self._gm
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            return f"const({self.type_of(value)}, {_content(value)})"
        return self._literal(value)

    # -- arguments

    def call(self, node: fx.Node, operator: Operator) -> str:
        """The right-hand side of a line: operator and arguments, keywords sorted."""
        groups = operator.group_arguments
        arguments = [
            self._group(value) if groups and place in groups else self.argument(value)
            for place, value in enumerate(node.args)
        ]
        for name in sorted(node.kwargs):
            value = node.kwargs[name]
            arguments.append(f"{word(name)}={self._group(value) if name in groups else self.argument(value)}")
        return f"{operator.text}({', '.join(arguments)})"

    def _group(self, value: Any) -> str:
        group = self._groups.get(value) if isinstance(value, str) else None
        return group.symbol if group else self.argument(value)

    def argument(self, value: Any) -> str:
        """An operand, or a literal, or a container of them."""
        if isinstance(value, fx.Node):
            return self.reference(value)
        if isinstance(value, list):
            return f"[{', '.join([self.argument(item) for item in value])}]"
        if isinstance(value, tuple):
            return _tuple([self.argument(item) for item in value])
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.argument(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(self.argument(end) for end in (value.start, value.stop, value.step))})"
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | float | str | complex):
            return repr(value)
        if isinstance(value, torch.dtype):
            return spell_dtype(value)
        if isinstance(value, torch.layout | torch.memory_format):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return f'device("{value.type}")'
        if isinstance(value, _SYMBOLIC):
            return f"sym({self.size(value)})"
        if isinstance(value, OpOverload | HigherOrderOperator):
            return operator_text(value)
        return _other_constant(value)

    # -- types

    def type_of(self, value: Any) -> str:
        """``bf16[64, 64]``, with strides unless contiguous and with the device unless the default."""
        if isinstance(value, torch.Tensor):
            return self._tensor_type(value)
        if isinstance(value, list | tuple):
            return _tuple([self.type_of(item) for item in value])
        for kind, name in zip(_SYMBOLIC, ("int", "float", "bool"), strict=True):
            if isinstance(value, kind):
                return f"{name}[{self.size(value)}]"
        return type(value).__name__ if isinstance(value, bool | int | float) else "_"

    def size(self, value: Any) -> str:
        """One extent or stride, symbolic or not."""
        return str(value) if type(value) is int else self._symbols.spell(expression(value), self._here)

    def _tensor_type(self, value: torch.Tensor) -> str:
        shape, strides = tuple(value.shape), tuple(value.stride())
        if not all(type(extent) is int for extent in shape + strides):
            return self._spell_tensor(value, shape, strides)
        key = (value.dtype, shape, strides, value.device.type)
        known = self._tensors.get(key)
        if known is None:
            known = self._tensors[key] = self._spell_tensor(value, shape, strides)
        return known

    def _spell_tensor(self, value: torch.Tensor, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> str:
        text = f"{spell_dtype(value.dtype)}[{', '.join(map(self.size, shape)) or '()'}]"
        if not is_contiguous([expression(e) for e in shape], [expression(s) for s in strides]):
            text += f"[{', '.join(map(self.size, strides))}]"
        return text if value.device.type == self._device else f"{text} @ {value.device.type}"


def _content(value: torch.Tensor) -> str:
    """What a constant holds: by content, not by name, as the tracer's numbering of constants drifts."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return "None"
    if value.numel() <= _SMALL and value.dtype in DTYPES:
        return repr(value.tolist())
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return repr("sha256:" + hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16])


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


def _other_constant(value: Any) -> str:
    """A constant of a type without a spelling, by the digest of its ``repr``, unless that is an address.

    >>> _other_constant(range(3)) == _other_constant(range(4))
    False
    """
    shown, name = repr(value), type(value).__name__
    if " at 0x" in shown:
        return f"const({name!r})"
    return f"const({name!r}, {hashlib.sha256(shown.encode()).hexdigest()[:12]!r})"
