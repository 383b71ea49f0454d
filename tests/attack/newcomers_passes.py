"""Two passes as a newcomer writes them, without a helper of ours; mistakes are planted in them."""

import operator

import torch
from torch import fx

aten = torch.ops.aten


def merge_pass(gm, inputs=None):
    """Compute equal calls once."""
    seen = {}
    for node in list(gm.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or not can_merge(gm.graph, node):
            continue
        key = node.target, str(node.args), str(node.kwargs)
        if key in seen:
            node.replace_all_uses_with(seen[key])
            gm.graph.erase_node(node)
        seen.setdefault(key, node)
    gm.recompile()
    return gm


def can_merge(graph, node):
    """Return whether a later equal call gives the same value and the same memory may show it."""
    if node.target.namespace != "aten" or node.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    written = written_memory(graph)
    return all(memory_of(each) not in written for each in (node, *node.all_input_nodes))


def fuse_products_pass(gm, inputs=None):
    """Make one product of all that have the same left operand: their right ones are joined."""
    groups = {}
    written = written_memory(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        left, right = node.args
        if memory_of(left) in written or memory_of(right) in written:
            continue
        nodes = groups.setdefault(left, [])
        if not nodes or right < nodes[0]:
            nodes.append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            fuse(gm.graph, nodes)
    gm.recompile()
    return gm


def fuse(graph, nodes):
    left = nodes[0].args[0]  # which may be of an earlier fusion by now
    rights = [node.args[1] for node in nodes]
    widths = [right.meta["val"].shape[1] for right in rights]
    with graph.inserting_before(nodes[0]):
        joined = graph.call_function(aten.cat.default, (rights, 1))
        product = graph.call_function(aten.mm.default, (left, joined))
        parts = graph.call_function(aten.split_with_sizes.default, (product, widths, 1))
        items = []
        for place in range(len(nodes)):
            part = graph.call_function(operator.getitem, (parts, place))
            kwargs = {"memory_format": torch.contiguous_format}
            items.append(graph.call_function(aten.clone.default, (part,), kwargs))
            items[-1].meta["val"] = nodes[place].meta["val"]  # another fusion may read it
    for node, item in zip(nodes, items, strict=True):
        node.replace_all_uses_with(item)
        graph.erase_node(node)


def memory_of(node):
    """Return the node that made the memory which a value shows."""
    while True:
        target = node.target
        is_view = target is aten.reshape.default or getattr(target, "is_view", False)
        is_written = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
        if not (is_view or is_written or getattr(target, "__name__", "") == "getitem"):
            return node
        if not isinstance(node.args[0], fx.Node):
            return node
        node = node.args[0]


def written_memory(graph):
    found = set()
    for node in graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            found.add(memory_of(node.args[0]))
    return found
