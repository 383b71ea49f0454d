"""Operators by name: from torch's registries only, never by evaluating a text.

A name that no registry knows is refused. Since a parsed graph can be run, so are operators that
touch files or run code which the graph does not show.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pytest_gtrainer._torch.graph_text import higher_order_operators, operator_names, operator_overload
from pytest_gtrainer.graphtext.errors import nearest
from pytest_gtrainer.graphtext.operators import word

NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", "_c10d_functional_autograd", "bucketing", "fsdp"})
"""Namespaces whose operators compute and communicate, and do nothing else."""

FORBIDDEN = frozenset({"aten.from_file"})
"""Operators of these namespaces that touch files."""

HIGHER_ORDER = frozenset({
    "cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention", "flex_attention_backward",
    "invoke_subgraph", "wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint",
    "auto_functionalized", "auto_functionalized_v2", "with_effects", "run_and_save_rng_state",
    "run_with_rng_state", "graphsafe_run_with_rng_state", "out_dtype",
})  # fmt: skip
"""Higher-order operators that run nothing but the bodies and operators which they are given."""

_OPERATOR = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "getitem", "eq", "ne", "lt",
    "le", "gt", "ge", "and_", "or_", "xor", "not_", "invert", "lshift", "rshift", "matmul", "is_", "is_not",
    "iadd", "isub", "imul", "itruediv",
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATOR},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "sqrt", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in (
        "sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sum", "_check",
    )},
    "builtins.max": max, "builtins.min": min, "builtins.round": round,
}  # fmt: skip
"""Plain functions that a text may call."""


class UnknownOperator(LookupError):
    """A name that is no operator, or one that a text may not call; the message says which."""


def operator_named(spelled: str, allow: Iterable[str] = ()) -> Callable[..., Any]:
    """The operator that a text spells ``spelled``.

    Args:
        spelled: ``aten.add.Tensor``, ``operator.add``, ``hop.cond``; a part that is a keyword of
            Python carries ``__kw``.
        allow: further namespaces of registered operators.

    Raises:
        UnknownOperator: torch knows none of that name, or it is not one that a text may call.
    """
    name = ".".join(part.removesuffix("__kw") for part in spelled.split("."))
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    space, _, rest = name.partition(".")
    if space == "hop":
        return _higher_order(rest)
    if not rest or space not in NAMESPACES.union(allow):
        raise UnknownOperator(_no_namespace(name, space, rest))
    packet, _, overload = rest.partition(".")
    if f"{space}.{packet}" in FORBIDDEN:
        raise UnknownOperator(f"{space}.{packet} touches files: no text may call it")
    found = operator_overload(space, packet, overload)
    if found is None:
        raise UnknownOperator(f"torch has no operator `{name}`{_alternatives(space, packet)}")
    return found


_METHODS = frozenset({
    "bfloat16", "bool", "byte", "char", "cpu", "cuda", "double", "element_size", "float", "half", "int", "long",
    "ndimension", "nelement", "short",
})  # fmt: skip
"""Methods of a tensor that only call an operator of another name."""


def is_method(name: str) -> bool:
    """Whether a text may call the method ``name`` of a tensor: those that are operators."""
    known = operator_names()
    return name in _METHODS or any(found == f"aten::{name}" or found.startswith(f"aten::{name}.") for found in known)


def _higher_order(name: str) -> Callable[..., Any]:
    known = {word(key): found for key, found in higher_order_operators().items()}
    if name not in known:
        raise UnknownOperator(f"torch has no higher-order operator `{name}`{nearest(name, known)}")
    if name not in HIGHER_ORDER:
        raise UnknownOperator(f"hop.{name} may run code that the graph does not show: no text may call it")
    return known[name]


def _no_namespace(name: str, space: str, rest: str) -> str:
    if not rest:
        return f"`{name}` is no operator: expected one like `aten.add.Tensor`, `operator.add` or `hop.cond`"
    if space in ("operator", "math", "torch", "builtins"):
        return f"`{name}` is not one of the functions that a text may call{nearest(name, FUNCTIONS)}"
    near = nearest(space, NAMESPACES)
    return f"the namespace of `{name}` is not allowed{near}: if its operators are safe to run, give allow=[{space!r}]"


def _alternatives(space: str, packet: str) -> str:
    """The overloads of a known operator, or the operator that looks most like an unknown one."""
    names = [name.partition("::")[2] for name in operator_names() if name.startswith(f"{space}::")]
    overloads = sorted(name for name in names if name.partition(".")[0] == packet)
    if overloads:
        return f": it has {', '.join(f'{space}.{name}' for name in overloads)}"
    return nearest(f"{space}.{packet}", {f"{space}.{name.partition('.')[0]}" for name in names})
