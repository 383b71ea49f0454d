"""One spelling for what a trace says in several: detaches, views that change nothing, transposes that cancel."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pytest_gtrainer.passes.graph_pass import graph_pass

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
_RULE_OF = {
    aten.detach.default: "detach",
    aten.slice.Tensor: "slice",
    **dict.fromkeys(
        (*_RESHAPES, aten.reshape.default, aten.alias.default, aten.expand.default),
        "view",
    ),
}
RULES = ("detach", "view", "slice", "transpose", "reshape")
DEFAULT_RULES = ("detach", "view", "slice", "transpose")


@graph_pass
def canonicalize_graph_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    rules: Collection[str] = DEFAULT_RULES,
) -> bool:
    """Remove ``detach``, identity views and slices, and transposes that cancel, in place.

    Values, strides and aliasing stay as they are. An output keeps a node of its own where it would
    otherwise be a graph input. One walk; run on its own output, it changes nothing.

    Args:
        rules: which of ``RULES`` to apply, by default all but the last.

            - "detach", "view", "slice": what gives its operand goes;
            - "transpose": a transpose of a transpose gives way to what went in. The backward of a
              linear layer transposes the forward's transposed weight, and so ceases to need it;
            - "reshape": ``view`` and ``_unsafe_view`` are spelled ``reshape``. To be asked for before a
              pass that gives a value other strides than it was traced with: a ``view`` of it would
              raise, a ``reshape`` copies. Where no strides change, a view says more.

    Raises:
        ValueError: a rule that does not exist.
    """
    rules = [rules] if isinstance(rules, str) else rules
    unknown = sorted(set(rules) - set(RULES))
    if unknown:
        raise ValueError(f"there is no rule {', '.join(map(repr, unknown))}; there are {', '.join(RULES)}")
    changed = False
    for node in list(gm.graph.nodes):
        if "transpose" in rules and _cancels(node):
            changed |= _give_way(node, node.all_input_nodes[0].all_input_nodes[0])
        elif _RULE_OF.get(node.target) in rules and _is_identity(node):
            changed |= _give_way(node, node.all_input_nodes[0])
        elif "reshape" in rules and node.target in _RESHAPES:
            node.target, changed = aten.reshape.default, True
    return changed


def _is_identity(node: fx.Node) -> bool:
    """Whether the view's value is its input, in shape, strides and storage."""
    return node.target is aten.detach.default or _same_layout(node.all_input_nodes[0], node)


def _cancels(node: fx.Node) -> bool:
    """Whether the node undoes the transpose above it.

    Transposes move no memory: what has the shape and strides of what went in is what went in.
    """
    inner = node.all_input_nodes[0] if node.target in _TRANSPOSES else node
    return inner is not node and inner.target in _TRANSPOSES and _same_layout(inner.all_input_nodes[0], node)


def _give_way(node: fx.Node, source: fx.Node) -> bool:
    """Let the node's users read ``source``; drop the node, and what then has no reader between the two."""
    if source.op == "placeholder" and any(user.op == "output" for user in node.users):
        return False
    between = node.all_input_nodes[0]
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    if between is not source and not between.users:
        node.graph.erase_node(between)
    return True


def _same_layout(before: fx.Node, after: fx.Node) -> bool:
    """Whether two values, one a view of the other, have equal dtype, shape and strides."""
    ours, theirs = before.meta.get("val"), after.meta.get("val")
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    return ours.dtype == theirs.dtype and _same(ours.shape, theirs.shape) and _same(ours.stride(), theirs.stride())


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether extents are known to be equal; a data-dependent one is not compared but recognised."""
    return len(ours) == len(theirs) and all(
        statically_known_true(a == b) for a, b in zip(ours, theirs, strict=True)
    )
