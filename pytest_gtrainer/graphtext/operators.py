"""How operators are spelled: ``aten.add.Tensor``, ``operator.add``, ``hop.flex_attention``."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from pytest_gtrainer._torch.graph_text import overload
from pytest_gtrainer._torch.operators import HigherOrderOperator, OpOverload
from pytest_gtrainer.graphtext.paths import spell

COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "bucketing", "symm_mem"})


@dataclass(frozen=True, slots=True)
class Operator:
    """A node's target.

    Attributes:
        text: its full spelling.
        short: what its values are named after.
        group_arguments: positions and names of arguments that are process group names.
        is_collective: whether it communicates, or packs and unpacks what is communicated.
    """

    text: str
    short: str
    group_arguments: frozenset[int | str] = frozenset()
    is_collective: bool = False


def operator_of(node: fx.Node) -> Operator:
    """The operator of a node that computes something."""
    if node.op == "call_function":
        return function_of(node.target)
    path = str(node.target)
    text = f"module.{spell(path)}" if node.op == "call_module" else f"method.{path}"
    return Operator(text, word(path.rpartition(".")[2]))


def operator_text(target: Callable[..., Any]) -> str:
    """The full spelling of an operator that is the argument of another."""
    return function_of(target).text


_KNOWN: dict[int, tuple[Callable[..., Any], Operator]] = {}
"""By identity: to hash an operator of the dispatcher runs Python, which is most of what a look-up costs."""
_MOST_KNOWN = 4096


def function_of(target: Callable[..., Any]) -> Operator:
    """The operator that a ``call_function`` calls."""
    known = _KNOWN.get(id(target))
    if known is None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[id(target)] = (target, _described(target))
    return known[1]


def _described(target: Callable[..., Any]) -> Operator:
    if isinstance(target, OpOverload):
        return _overload(target)
    if isinstance(target, HigherOrderOperator):
        return Operator(f"hop.{word(target.name())}", target.name())
    home = target.__module__ if hasattr(target, "__module__") else ""
    name = getattr(target, "__name__", type(target).__name__)
    # `operator.add` is really `_operator.add`
    path = [*(home or "").removeprefix("_").split("."), name]
    return Operator(".".join(word(part) for part in path if part), word(name))


def _overload(target: OpOverload) -> Operator:
    schema = overload(target)
    parts = [schema.namespace, schema.name, schema.overload]
    groups: set[int | str] = set()
    for place, name in enumerate(schema.arguments):
        if name == "group_name":
            groups |= {place, name}
    return Operator(
        ".".join(word(part) for part in parts if part),
        schema.name,
        frozenset(groups),
        is_collective=schema.namespace in COLLECTIVE_NAMESPACES,
    )


@functools.lru_cache(maxsize=1 << 12)
def word(text: str) -> str:
    """A name that Python accepts: keywords get an escape, other characters become ``_``.

    >>> word("from"), word("add"), word("<lambda>"), word("0")
    ('from__kw', 'add', '_lambda_', '_0')
    """
    if keyword.iskeyword(text):
        return f"{text}__kw"
    if text.isidentifier():
        return text
    likeness = "".join(c if c.isalnum() else "_" for c in text)
    return likeness if likeness.isidentifier() else f"_{likeness}"
