"""A pass over joint graphs of training."""

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

BUG = ""
"""The planted mistake: "writes" are not seen, equal "buffers" become one, or nothing tells the
"directions" apart.
"""


def is_written(node: fx.Node) -> bool:
    """Return whether something writes to the memory of a node's result, directly or through views
    of it.
    """
    for user in node.users:
        if not isinstance(user.target, torch._ops.OpOverload):
            continue
        if user.target._schema.is_mutable:
            return True
        is_view = any(argument.alias_info is not None for argument in user.target._schema.arguments)
        if is_view and is_written(user):
            return True
    return False


def merge_equal(gm: fx.GraphModule) -> fx.GraphModule:
    """Of nodes that compute the same in one direction the first stays, unless something was written
    in between.

    A node whose own memory is written to later stays, too: two equal ``empty_like`` are two
    buffers.
    """
    first: dict[Any, fx.Node] = {}
    writes = 0
    for node in list(gm.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.is_mutable:
            writes += BUG != "writes"
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        if BUG != "buffers" and is_written(node):
            continue
        operands, spec = pytree.tree_flatten((node.args, node.kwargs))
        is_backward = BUG != "directions" and node.meta.get("autograd_backward", False)
        key = (node.target, tuple(operands), str(spec), is_backward, writes)
        known = first.setdefault(key, node)
        if known is not node:
            node.replace_all_uses_with(known)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm
