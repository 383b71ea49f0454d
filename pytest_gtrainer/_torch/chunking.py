"""Sums of gradients, and symbols of data-dependent sizes.

Chunking copies nodes. A copy of a node that makes a data-dependent size needs symbols of its own,
and a sum that autograd's engine made is no operator of the model.
"""

import itertools
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
    are_nodes = all(isinstance(operand, fx.Node) for operand in node.args)
    if len(node.args) != 2 or node.kwargs or not are_nodes:
        return False
    if node.meta.get("is_gradient_acc"):
        return True
    # Other graphs have no such mark. There the sum has the ``seq_nr`` of whatever ran before it;
    # the backward counts down, so an operand of the backward with a smaller number shows a sum of
    # the engine.
    own = node.meta.get("seq_nr")
    backward = [each for each in node.all_input_nodes if each.meta.get("autograd_backward")]
    numbers = [each.meta["seq_nr"] for each in backward if each.meta.get("seq_nr") is not None]
    return own is not None and any(number < own for number in numbers)


Symbol = sympy.Symbol
Renaming = dict[sympy.Symbol, sympy.Expr]


def renew_symbols(meta: dict[str, Any], renaming: Renaming) -> None:
    """Give a copied node that makes data-dependent sizes its own symbols.

    ``meta`` is the metadata of the copy; ``renaming`` keeps the symbols for the node's readers.
    """
    bindings = meta.get("unbacked_bindings")
    if bindings:
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
    """Return the symbolic numbers in a value or in arguments: of tensors extents and strides."""
    numbers: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        numbers += (*leaf.shape, *leaf.stride()) if torch.is_tensor(leaf) else (leaf,)
    return [number for number in numbers if isinstance(number, SYMBOLIC)]


def shape_env_of(value: Any) -> Any:
    """Return the shape environment of the symbols in a value or in arguments; None without any."""
    return next((number.node.shape_env for number in _numbers_in(value)), None)


def renamed_number(value: Any, renaming: Renaming) -> Any:
    """Return a symbolic number in other symbols; anything else as it is."""
    if not isinstance(value, SYMBOLIC) or renaming.keys().isdisjoint(value.node.expr.free_symbols):
        return value
    return symbolic(value.node.shape_env, value.node.expr.xreplace(renaming), value.node.pytype)


def _renamed(value: Any, renaming: Renaming) -> Any:
    if torch.is_tensor(value) and _numbers_in(value):
        shape = [renamed_number(extent, renaming) for extent in value.shape]
        return value_like(value, shape, [renamed_number(step, renaming) for step in value.stride()])
    return renamed_number(value, renaming)


def expression_of(value: Any) -> Any:
    """Return the sympy expression of a symbolic number, with the equations that its trace found."""
    return value.node.shape_env.simplify(value.node.expr)


def symbols_of(value: Any) -> list[sympy.Symbol]:
    """Return the symbols in a value or in arguments, as they are written there."""
    return [symbol for number in _numbers_in(value) for symbol in number.node.expr.free_symbols]


def replaced(value: Any, numbers: dict[sympy.Symbol, int]) -> Any:
    """Return a symbolic number with numbers for symbols: a plain one if no symbol is left."""
    found = expression_of(value).xreplace(
        {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
    )
    if found.is_number or found in (sympy.true, sympy.false):
        return value.node.pytype(found)
    return symbolic(value.node.shape_env, found, value.node.pytype)


def failed_guards(gm: fx.GraphModule, numbers: dict[sympy.Symbol, int]) -> list[str]:
    """Return the conditions of a trace that the numbers make false, and the lines that state them.

    Conditions on data-dependent sizes are deferred asserts; those on other sizes are guards.
    """
    env = shape_env_of([node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")])
    if env is None:
        return []
    table = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
    inside = os.path.dirname(torch.__file__)
    failed = []
    for condition in itertools.chain.from_iterable(env.deferred_runtime_asserts.values()):
        if condition.expr.xreplace(table) == sympy.false:
            text = str(condition.expr)
            for frame in reversed(condition.stack.summary()):
                if os.path.isfile(frame.filename) and not frame.filename.startswith(inside):
                    text += f", stated at {frame.filename}:{frame.lineno}"
                    break
            failed.append(text)
    guards = [guard.expr for guard in env.guards if guard.expr.xreplace(table) == sympy.false]
    return failed + [str(guard) for guard in guards]
