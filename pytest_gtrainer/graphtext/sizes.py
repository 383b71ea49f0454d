"""Sizes and types of a text: from ``bf16[s0, 64][1, s0] @ cuda`` to a fake tensor."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pytest_gtrainer._torch.graph_text import backed_symbol, fake_tensor, functions, symbolic, unbacked_symbol
from pytest_gtrainer._torch.values import FakeTensorMode
from pytest_gtrainer.graphtext.literals import DTYPE_OF
from pytest_gtrainer.graphtext.sections import Layer, split_layer
from pytest_gtrainer.graphtext.syntax import LinePlace, chain, integer, path_at, refuse, shown

At = Callable[[LinePlace], Any]
NUMBERS = {"int": int, "float": float, "bool": bool}
_FUNCTIONS: dict[str, Any] = {
    **{name: getattr(functions, name) for name in functions.__all__ if name[0].isupper()},
    "Max": functions.Max, "Min": functions.Min, "Eq": sympy.Eq, "Ne": sympy.Ne, "Abs": sympy.Abs,
    "ceiling": sympy.ceiling, "floor": sympy.floor, "And": sympy.And, "Or": sympy.Or, "Not": sympy.Not,
}  # fmt: skip
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: functions.FloorDiv, ast.Mod: functions.Mod, ast.Pow: operator.pow,
    ast.BitAnd: sympy.And, ast.BitOr: sympy.Or,
}  # fmt: skip
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge,
}  # fmt: skip
_INT = frozenset([int])
_LARGEST = 2**62
_GROWING = (operator.pow, functions.FloatPow, functions.PowByNatural, functions.LShift, functions.RShift)
_HIGHEST = 64
"""The highest power: numbers are evaluated at once, and one such line could take forever."""


_SYMBOL = re.compile(r"\b(s|u|zf|zuf)\d+\b")


def may_be_symbolic(text: str) -> bool:
    """Whether a text may name a symbol; the first shape environment of a process takes seconds to import.

    >>> may_be_symbolic("f32[4, u0]"), may_be_symbolic("sum_1: f32[4]")
    (True, False)
    """
    return _SYMBOL.search(text) is not None


class Sizes:
    """Symbols of one parsed text, and what is made of them.

    A backed symbol is defined at the head; a data-dependent one is new where it is first named.
    """

    def __init__(self, *, symbolic: bool) -> None:
        self._env = ShapeEnv() if symbolic else None
        self.mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self.device = torch.device("cpu")
        self._backed: dict[str, Any] = {}
        self._unbacked: dict[tuple[Layer | None, str], Any] = {}

    def body(self) -> Sizes:
        """For a body: the same backed symbols, data-dependent ones of its own."""
        other = Sizes(symbolic=False)
        other._env, other.mode, other._backed = self._env, self.mode, self._backed
        return other

    @property
    def env(self) -> ShapeEnv:
        """Where the symbols live; only asked for where there are some."""
        assert self._env is not None
        return self._env

    def define(self, name: str, example: int | float) -> None:
        self._backed[name] = backed_symbol(self.env, len(self._backed), example)

    # -- numbers

    def number_at(self, node: ast.expr, kind: type = int) -> At:
        """A size: a number, or a symbolic one."""
        if (number := integer(node)) is not None:
            if abs(number) > _LARGEST:
                raise refuse(node, f"{number} is no size of a tensor")
            fixed = kind(number)
            return lambda place: fixed
        if isinstance(node, ast.Constant) and kind is type(node.value):
            constant = node.value
            return lambda place: constant
        if kind is float and isinstance(node, ast.Name) and node.id in ("inf", "nan"):
            return lambda place: float(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant | ast.Name) and kind is float:
            positive = self.number_at(node.operand, kind)
            return lambda place: -positive(place)
        expression = self._expression_at(node)

        def evaluated(place: LinePlace) -> Any:
            value = expression(place)
            try:
                return symbolic(self.env, value, kind) if value.free_symbols else kind(value)
            except (TypeError, ValueError, OverflowError):
                raise refuse(node, f"`{shown(node)}` is no number of the kind `{kind.__name__}`") from None

        return evaluated

    def operand_at(self, node: ast.expr) -> At:
        """A symbolic operand, of the kind that its expression has."""
        if integer(node) is not None:
            return self.number_at(node)
        expression = self._expression_at(node)

        def evaluated(place: LinePlace) -> Any:
            kind = _kind_of(expression(place))
            return self.number_at(node, kind)(place)

        return evaluated

    def _expression_at(self, node: ast.expr) -> At:
        """A size as a sympy expression."""
        if (number := integer(node)) is not None:
            whole = sympy.Integer(number)
            return lambda place: whole
        if isinstance(node, ast.Constant) and type(node.value) is float:
            real = sympy.Float(node.value)
            return lambda place: real
        if isinstance(node, ast.Name | ast.Attribute):
            return self._symbol_at(node)
        made = self._composed_at(node)
        if made is None:
            raise refuse(node, f"expected a size like `4`, `s0` or `2*u0 + 1`, found `{shown(node)}`")
        return made

    def _composed_at(self, node: ast.expr) -> At | None:
        parts: Sequence[ast.expr]
        function: Callable[..., Any]
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            function, parts = _BINARY[type(node.op)], [node.left, node.right]
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            function, parts = _COMPARE[type(node.ops[0])], [node.left, node.comparators[0]]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
            function, parts = operator.neg if isinstance(node.op, ast.USub) else sympy.Not, [node.operand]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            function, parts = _FUNCTIONS[node.func.id], node.args
        else:
            return None
        operands = [self._expression_at(part) for part in parts]
        grows = function in _GROWING

        def composed(place: LinePlace) -> Any:
            values = [operand(place) for operand in operands]
            if grows and not self._is_moderate(*values):
                raise refuse(node, f"expected a power of a symbol, at most {_HIGHEST}, found `{shown(node)}`")
            try:
                return function(*values)
            except (TypeError, ValueError, ZeroDivisionError, AssertionError) as error:
                raise refuse(node, f"`{shown(node)}` is no size: {error or type(error).__name__}") from None

        return composed

    def _is_moderate(self, *values: Any) -> bool:
        """Whether a power is quick to evaluate, with the examples of its symbols too."""
        if len(values) != 2 or not any(value.free_symbols for value in values):
            return False
        known = self.env.backed_var_to_val
        base, exponent = (abs(value.xreplace(known)) for value in values)
        if exponent.is_number and not exponent <= _HIGHEST:
            return False
        return not base.is_number or bool(base <= _LARGEST)

    def _symbol_at(self, node: ast.expr) -> At:
        *path, last = chain(node)
        name = str(last.value)
        if not path and name in self._backed:
            return lambda place: self._backed[name]
        if not name.startswith(("u", "zuf")) or not name.lstrip("uzf").isdecimal():
            raise refuse(node, f"`{name}` is no symbol: define it at the head, `{name} = size(16)`")
        if not path:
            return lambda place: self._unbacked_symbol(None, name)  # a layer's own is `L.u0`
        owner = path_at(path)
        return lambda place: self._unbacked_symbol(split_layer(owner(place.layer))[0], name)

    def _unbacked_symbol(self, layer: Layer | None, name: str) -> Any:
        if (layer, name) not in self._unbacked:
            self._unbacked[layer, name] = unbacked_symbol(self.env, name.startswith("z"))
        return self._unbacked[layer, name]

    # -- types

    def type_at(self, node: ast.expr) -> At:
        """What a type stands for: a fake tensor, a number, a container of them, None for ``_``.

        Raises:
            TextError: it is no type.
        """
        if isinstance(node, ast.Name) and node.id == "_":
            return lambda place: None
        if isinstance(node, ast.Tuple | ast.List):
            items = [self.type_at(item) for item in node.elts]
            kind = tuple if isinstance(node, ast.Tuple) else list
            return lambda place: kind([item(place) for item in items])
        device = self.device
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            name = node.right.id if isinstance(node.right, ast.Name) else shown(node.right)
            device, node = device_named(name, node.right), node.left
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in NUMBERS:
            number = integer(node.slice) if node.value.id == "int" else None
            return self.number_at(node.slice, NUMBERS[node.value.id]) if number is None else lambda place: number
        return self._tensor_at(node, device)

    def _tensor_at(self, node: ast.expr, device: torch.device) -> At:
        whole, spelled_strides = node, None
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript):
            spelled_strides = _elements(node.slice)
            node = node.value
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            raise refuse(whole, f"expected a type like `f32[2, 4]`, `int[u0]` or `_`, found `{shown(whole)}`")
        dtype = DTYPE_OF.get(node.value.id)
        if dtype is None:
            raise refuse(node, f"`{node.value.id}` is no dtype: expected `f32`, `bf16`, `i64`, ...")
        sizes = self._sizes_at(_elements(node.slice), spelled_strides, whole)

        def make(place: LinePlace) -> torch.Tensor:
            shape, strides = sizes(place)
            try:
                return self._tensor(shape, strides, dtype, device)
            except (RuntimeError, TypeError, ValueError, OverflowError, AttributeError, AssertionError) as error:
                reason = str(error).partition("\n")[0]
                raise refuse(whole, f"there is no tensor `{shown(whole)}`: {reason}") from None

        return make

    def _sizes_at(
        self, shape: Sequence[ast.expr], strides: Sequence[ast.expr] | None, whole: ast.expr
    ) -> Callable[[LinePlace], tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Shape and strides; those of numbers only are made once, as a line may stand for a hundred layers."""
        extents = [self.number_at(extent) for extent in shape]
        steps = None if strides is None else [self.number_at(stride) for stride in strides]
        if steps is not None and len(steps) != len(extents):
            raise refuse(whole, f"{len(extents)} extents and {len(steps)} strides")

        def evaluated(place: LinePlace) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            numbers = tuple([extent(place) for extent in extents])
            return numbers, self._contiguous(numbers) if steps is None else tuple([step(place) for step in steps])

        if any(integer(number) is None for number in (*shape, *(strides or ()))):
            return evaluated
        fixed = evaluated(LinePlace("fwd", None))
        return lambda place: fixed

    def _tensor(
        self, shape: tuple[Any, ...], strides: tuple[Any, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if _INT.issuperset(map(type, shape + strides)):
            return fake_tensor(self.mode, shape, strides, dtype, device)
        with self.mode:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    def _contiguous(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        strides: list[Any] = []
        step: Any = 1
        for extent in reversed(shape):
            strides.append(step)
            step = max(extent, 1) * step if type(extent) is int else extent * step
        return tuple(strides[::-1])


def _kind_of(expression: Any) -> type:
    """What a symbolic number is: a comparison, a whole number, or any other."""
    if expression.is_Relational or expression.is_Boolean:
        return bool
    return int if expression.is_integer or expression.is_rational else float


def _elements(node: ast.expr) -> Sequence[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def device_named(name: str, node: ast.expr) -> torch.device:
    """The device that a text names at ``node``."""
    try:
        return torch.device(name)
    except RuntimeError:
        raise refuse(node, f"`{name}` is no device: expected `cpu`, `cuda`, ...") from None
