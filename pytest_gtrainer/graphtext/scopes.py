"""To which module or bucket, and to which space, each value of a graph belongs.

The tracer says it in ``meta["custom"]["module_fqn"]``, ``meta["autograd_backward"]``,
``meta["fsdp_bucket"]`` and, for placeholders, ``meta["gt_input"]``. Where the module is not
said (a gradient that autograd accumulates belongs to no module), it follows from the operands.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from pytest_gtrainer.graphtext.paths import Layer, common_parent, split_layer

_SPACE_OF_KIND = {"parameter": "P", "buffer": "B", "input": "I"}


class Scope(NamedTuple):
    """Where values are numbered: the owning modules (several only of a bucket) in one space."""

    owners: tuple[str, ...]
    space: str
    is_bucket: bool = False

    @property
    def layer(self) -> Layer | None:
        return split_layer(self.owners[0])[0]

    @property
    def is_nowhere(self) -> bool:
        """Whether no module is known."""
        return self.owners == ("",)


NOWHERE = Scope(("",), "fwd")


def is_item(node: fx.Node) -> bool:
    """Whether a node only takes one output of its operand; it is spelled ``operand[0]``."""
    return node.op == "call_function" and node.target is operator.getitem and type(node.args[1]) is int


def is_computed(node: fx.Node) -> bool:
    """Whether a node has a line of its own in the schedule."""
    return node.op in ("call_function", "call_module", "call_method") and not is_item(node)


def input_of(node: fx.Node, position: int) -> tuple[str, str]:
    """Space and full name of a placeholder; without ``gt_input`` it is numbered."""
    meta = node.meta.get("gt_input")
    if meta is None:
        return "I", f"arg{position}"
    return _SPACE_OF_KIND[meta["kind"]], meta["fqn"]


def scopes_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, Scope]:
    """The scope of every node that has a value, in one walk."""
    scopes: dict[fx.Node, Scope] = {}
    inputs = 0
    for node in nodes:
        if node.op == "placeholder":
            space, fqn = input_of(node, inputs)
            scopes[node] = Scope((fqn.rpartition(".")[0],), space)
            inputs += 1
        elif is_item(node):
            scopes[node] = scopes.get(node.args[0], NOWHERE)
        elif is_computed(node):
            scopes[node] = _scope(node, scopes)
    return scopes


def _scope(node: fx.Node, scopes: dict[fx.Node, Scope]) -> Scope:
    bucket = node.meta.get("fsdp_bucket")
    if bucket:
        return Scope(tuple(bucket["plan_fqns"]), bucket["direction"], is_bucket=True)
    fqn = (node.meta.get("custom") or {}).get("module_fqn")
    if fqn is None:
        fqn = _inferred(node, scopes)
    return Scope((fqn,), "bwd" if node.meta.get("autograd_backward") else "fwd")


def _inferred(node: fx.Node, scopes: dict[fx.Node, Scope]) -> str:
    """The module that all operands share; where they lie in several layers, the latest one's layer."""
    operands = [scopes[operand] for operand in node.all_input_nodes if operand in scopes]
    known = [s for s in operands if not s.is_nowhere and s.space in ("fwd", "bwd")]
    known = known or [s for s in operands if not s.is_nowhere]
    fqns = [fqn for scope in known for fqn in scope.owners]
    if not fqns:
        return ""
    common = common_parent(fqns)
    if split_layer(common)[0] is not None:
        return common
    for scope in reversed(known):
        if scope.layer is not None:
            return f"{scope.layer.container}.{scope.layer.number}"
    return common
