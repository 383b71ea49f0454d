"""Sums of gradients, and symbols of data-dependent sizes.

- nodes that autograd's engine makes when it adds two gradients carry ``meta["is_gradient_acc"]``,
  and the ``seq_nr`` of whatever ran before; in graphs without that mark, an addition in the
  backward is the engine's if an operand of the backward has a smaller ``seq_nr``, because the
  backward counts down;
- ``meta["unbacked_bindings"]`` tells which symbols of data-dependent sizes a node makes; symbols
  are made by ``ShapeEnv.create_unbacked_symint``, their ranges are in ``ShapeEnv.var_to_range``;
- what a trace relied on is in ``ShapeEnv.guards`` (of symbols with hints) and
  ``deferred_runtime_asserts`` (of those without), ``ShapeEnv.simplify`` applies the equations
  between symbols that it found.
"""

import os
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import symbolic
from pytest_gtrainer._torch.values import SYMBOLIC, pytree, value_like

ATTRIBUTES = {
    "torch.fx.experimental.symbolic_shapes:ShapeEnv": (
        "create_unbacked_symint",
        "ignore_fresh_unbacked_symbols",
        "var_to_range",
        "guards",
        "deferred_runtime_asserts",
        "simplify",
    ),
}

_ACCUMULATE = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}


def is_engine_addition(node: fx.Node) -> bool:
    """Return whether autograd's engine added two gradients of one tensor: older plus newer."""
    if node.target not in _ACCUMULATE or not node.meta.get("autograd_backward"):
        return False
    if (
        len(node.args) != 2
        or node.kwargs
        or not all(isinstance(operand, fx.Node) for operand in node.args)
    ):
        return False
    if node.meta.get("is_gradient_acc"):
        return True
    own = node.meta.get("seq_nr")
    backward = [
        source.meta.get("seq_nr")
        for source in node.all_input_nodes
        if source.meta.get("autograd_backward")
    ]
    return own is not None and any(number is not None and number < own for number in backward)


Symbol = sympy.Symbol
Expression = sympy.Expr
Renaming = dict[sympy.Symbol, sympy.Expr]


def renew_symbols(meta: dict[str, Any], renaming: Renaming) -> None:
    """Give a copied node that makes data-dependent sizes its own symbols; ``renaming`` keeps them
    for its readers.
    """
    if bindings := meta.get("unbacked_bindings"):
        shape_env = shape_env_of(meta["val"])
        for symbol in bindings:
            if symbol not in renaming:
                with shape_env.ignore_fresh_unbacked_symbols():
                    renaming[symbol] = shape_env.create_unbacked_symint().node.expr
                shape_env.var_to_range[renaming[symbol]] = shape_env.var_to_range[symbol]
        meta["unbacked_bindings"] = {renaming[symbol]: path for symbol, path in bindings.items()}
    if renaming and "val" in meta:
        meta["val"] = pytree.tree_map(lambda leaf: _renamed(leaf, renaming), meta["val"])


def _numbers_in(value: Any) -> list[Any]:
    """The symbolic numbers in a value or in arguments; of a tensor its extents and strides."""
    leaves = [
        number
        for leaf in pytree.tree_leaves(value)
        for number in ((*leaf.shape, *leaf.stride()) if torch.is_tensor(leaf) else (leaf,))
    ]
    return [number for number in leaves if isinstance(number, SYMBOLIC)]


def shape_env_of(value: Any) -> Any:
    """The shape environment of the symbols in a value or in arguments; None without symbols."""
    return next((number.node.shape_env for number in _numbers_in(value)), None)


def renamed_number(value: Any, renaming: Renaming) -> Any:
    """A symbolic number in other symbols; anything else as it is."""
    if not isinstance(value, SYMBOLIC) or renaming.keys().isdisjoint(value.node.expr.free_symbols):
        return value
    return symbolic(value.node.shape_env, value.node.expr.xreplace(renaming), value.node.pytype)


def _renamed(value: Any, renaming: Renaming) -> Any:
    if torch.is_tensor(value) and _numbers_in(value):
        extents = (
            [renamed_number(e, renaming) for e in told] for told in (value.shape, value.stride())
        )
        return value_like(value, *extents)
    return renamed_number(value, renaming)


def expression_of(value: Any) -> Any:
    """The sympy expression of a SymInt, SymFloat or SymBool, with the equations that its trace
    found.
    """
    return value.node.shape_env.simplify(value.node.expr)


def symbols_of(value: Any) -> list[sympy.Symbol]:
    """The symbols in a value or in arguments, as they are written there."""
    return [symbol for number in _numbers_in(value) for symbol in number.node.expr.free_symbols]


def replaced(value: Any, numbers: dict[sympy.Symbol, int]) -> Any:
    """A SymInt, SymFloat or SymBool with numbers for symbols: a plain one if no other symbol is
    left.
    """
    found = expression_of(value).xreplace(
        {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
    )
    if found.is_number or found in (sympy.true, sympy.false):
        return value.node.pytype(found)
    return symbolic(value.node.shape_env, found, value.node.pytype)


def failed_guards(gm: fx.GraphModule, numbers: dict[sympy.Symbol, int]) -> list[str]:
    """Return what the trace relied on and the numbers make false, and where somebody stated it."""
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    found = next((env for value in values if (env := shape_env_of(value)) is not None), None)
    if found is None:
        return []
    table = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
    failed = []
    for fact in (fact for facts in found.deferred_runtime_asserts.values() for fact in facts):
        if fact.expr.xreplace(table) == sympy.false:
            files = [frame for frame in fact.stack.summary() if os.path.isfile(frame.filename)]
            theirs = [
                frame
                for frame in files
                if not frame.filename.startswith(os.path.dirname(torch.__file__))
            ]
            stated = f", stated at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
            failed.append(f"{fact.expr}{stated}")
    return failed + [
        str(guard.expr) for guard in found.guards if guard.expr.xreplace(table) == sympy.false
    ]
