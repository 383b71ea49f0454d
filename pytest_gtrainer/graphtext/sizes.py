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
_Layout = tuple[torch.dtype, tuple[Any, ...], tuple[Any, ...]]
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
        self._fixed: dict[ast.expr, _Layout] = {}

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

    def number(self, node: ast.expr, place: LinePlace, kind: type = int) -> Any:
        """A size: a number, or a symbolic one."""
        if (number := integer(node)) is not None:
            if abs(number) > _LARGEST:
                raise refuse(node, f"{number} is no size of a tensor")
            return kind(number)
        if isinstance(node, ast.Constant) and kind is type(node.value):
            return node.value
        if kind is float and isinstance(node, ast.Name) and node.id in ("inf", "nan"):
            return float(node.id)
        if kind is float and isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant | ast.Name):
            return -self.number(node.operand, place, kind)
        value = self._expression(node, place)
        try:
            return symbolic(self.env, value, kind) if value.free_symbols else kind(value)
        except (TypeError, ValueError, OverflowError):
            raise refuse(node, f"`{shown(node)}` is no number of the kind `{kind.__name__}`") from None

    def operand(self, node: ast.expr, place: LinePlace) -> Any:
        """A symbolic operand, of the kind that its expression has: a comparison, a whole number, or any other."""
        if integer(node) is not None:
            return self.number(node, place)
        expression = self._expression(node, place)
        if expression.is_Relational or expression.is_Boolean:
            return self.number(node, place, bool)
        return self.number(node, place, int if expression.is_integer or expression.is_rational else float)

    def _expression(self, node: ast.expr, place: LinePlace) -> Any:
        """A size as a sympy expression."""
        parts: Sequence[ast.expr]
        function: Callable[..., Any]
        if (number := integer(node)) is not None:
            return sympy.Integer(number)
        if isinstance(node, ast.Constant) and type(node.value) is float:
            return sympy.Float(node.value)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._symbol(node, place)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            function, parts = _BINARY[type(node.op)], [node.left, node.right]
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            function, parts = _COMPARE[type(node.ops[0])], [node.left, node.comparators[0]]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
            function, parts = operator.neg if isinstance(node.op, ast.USub) else sympy.Not, [node.operand]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            function, parts = _FUNCTIONS[node.func.id], node.args
        else:
            raise refuse(node, f"expected a size like `4`, `s0` or `2*u0 + 1`, found `{shown(node)}`")
        values = [self._expression(part, place) for part in parts]
        if function in _GROWING and not self._is_moderate(values):
            raise refuse(node, f"expected a power of a symbol, at most {_HIGHEST}, found `{shown(node)}`")
        try:
            return function(*values)
        except (TypeError, ValueError, ZeroDivisionError, AssertionError) as error:
            raise refuse(node, f"`{shown(node)}` is no size: {error or type(error).__name__}") from None

    def _is_moderate(self, values: Sequence[Any]) -> bool:
        """Whether a power is quick to evaluate, with the examples of its symbols too."""
        if len(values) != 2 or not any(value.free_symbols for value in values):
            return False
        known = self.env.backed_var_to_val
        base, exponent = (abs(value.xreplace(known)) for value in values)
        if exponent.is_number and not exponent <= _HIGHEST:
            return False
        return not base.is_number or bool(base <= _LARGEST)

    def _symbol(self, node: ast.expr, place: LinePlace) -> Any:
        *path, last = chain(node)
        name = str(last.value)
        if not path and name in self._backed:
            return self._backed[name]
        if not name.startswith(("u", "zuf")) or not name.lstrip("uzf").isdecimal():
            raise refuse(node, f"`{name}` is no symbol: define it at the head, `{name} = size(16)`")
        owner = split_layer(path_at(path)(place.layer))[0] if path else None  # a layer's own is `L.u0`
        if (owner, name) not in self._unbacked:
            self._unbacked[owner, name] = unbacked_symbol(self.env, name.startswith("z"))
        return self._unbacked[owner, name]

    # -- types

    def value(self, node: ast.expr, place: LinePlace) -> Any:
        """What a type stands for: a fake tensor, a number, a container of them, None for ``_``.

        Raises:
            TextError: it is no type.
        """
        if isinstance(node, ast.Name) and node.id == "_":
            return None
        if isinstance(node, ast.Tuple | ast.List):
            items = [self.value(item, place) for item in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        device = self.device
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            name = node.right.id if isinstance(node.right, ast.Name) else shown(node.right)
            device, node = device_named(name, node.right), node.left
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in NUMBERS:
            number = integer(node.slice) if node.value.id == "int" else None
            return self.number(node.slice, place, NUMBERS[node.value.id]) if number is None else number
        dtype, shape, strides = self._fixed.get(node) or self._layout(node, place)
        try:
            if node in self._fixed:
                return fake_tensor(self.mode, shape, strides, dtype, device)
            with self.mode:
                return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        except (RuntimeError, TypeError, ValueError, OverflowError, AttributeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise refuse(node, f"there is no tensor `{shown(node)}`: {reason}") from None

    def _layout(self, node: ast.expr, place: LinePlace) -> _Layout:
        """Dtype, shape and strides; those of numbers only are read once, as a line may stand for a hundred layers."""
        whole, steps = node, None
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript):
            steps, node = _elements(node.slice), node.value
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            raise refuse(whole, f"expected a type like `f32[2, 4]`, `int[u0]` or `_`, found `{shown(whole)}`")
        dtype = DTYPE_OF.get(node.value.id)
        if dtype is None:
            raise refuse(node, f"`{node.value.id}` is no dtype: expected `f32`, `bf16`, `i64`, ...")
        shape = tuple([self.number(extent, place) for extent in _elements(node.slice)])
        if steps is None:
            strides = _contiguous(shape)
        elif len(steps) == len(shape):
            strides = tuple([self.number(step, place) for step in steps])
        else:
            raise refuse(whole, f"{len(shape)} extents and {len(steps)} strides")
        found = dtype, shape, strides
        if _INT.issuperset(map(type, shape + strides)):
            self._fixed[whole] = found
        return found


def _contiguous(shape: Sequence[Any]) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for extent in reversed(shape):
        strides.append(step)
        step = max(extent, 1) * step if type(extent) is int else extent * step
    return tuple(strides[::-1])


def _elements(node: ast.expr) -> Sequence[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def device_named(name: str, node: ast.expr) -> torch.device:
    """The device that a text names at ``node``."""
    try:
        return torch.device(name)
    except RuntimeError:
        raise refuse(node, f"`{name}` is no device: expected `cpu`, `cuda`, ...") from None
