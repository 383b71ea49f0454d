"""Drop what a trace leaves behind and no one needs: detaches and views that change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default, aten.expand.default}


def canonicalize_graph_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> fx.GraphModule:
    """Remove ``detach`` and identity views, in place; values and aliasing stay as they are.

    An output keeps a node of its own where it would otherwise be a graph input.
    """
    for node in [node for node in gm.graph.nodes if is_identity(node)]:
        if not _would_return_input(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def is_identity(node: fx.Node) -> bool:
    """Whether the node's value is its input, in shape, strides and storage."""
    if node.target is aten.detach.default:
        return True
    if node.target not in _VIEWS:
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype and _same(before.shape, after.shape) and _same(before.stride(), after.stride())


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether extents are known to be equal; a data-dependent one is not compared but recognised."""
    return len(ours) == len(theirs) and all(
        statically_known_true(a == b) for a, b in zip(ours, theirs, strict=True)
    )


def _would_return_input(node: fx.Node) -> bool:
    source = node.all_input_nodes[0]
    return source.op == "placeholder" and any(user.op == "output" for user in node.users)
