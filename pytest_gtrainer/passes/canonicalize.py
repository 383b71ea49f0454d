"""Remove operators that change nothing, and dead code."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pytest_gtrainer.graph.nodes import has_effect, storage_of, walk, written_operands
from pytest_gtrainer.passes.graph_pass import graph_pass

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
# Since torch 2.14 detach reaches the dispatcher as alias; a user's alias looks the same.
_DETACHES = (aten.detach.default, aten.alias.default)
_RULES_OF = {
    aten.detach.default: {"detach"},
    aten.alias.default: {"detach", "view"},
    **{view: {"view"} for view in (*_RESHAPES, aten.reshape.default, aten.expand.default)},
    aten.slice.Tensor: {"slice"},
    aten.constant_pad_nd.default: {"pad"},
}
RULES = ("detach", "view", "slice", "pad", "transpose", "reshape")
DEFAULT_RULES = ("detach", "view", "slice", "pad", "transpose")


@graph_pass
def canonicalize_graph_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    rules: Collection[str] = DEFAULT_RULES,
) -> bool:
    """Remove detaches, identity views and slices, empty pads, and pairs of transposes, in place.

    Values, strides and visible aliasing do not change. An output keeps its own node if it would
    otherwise be a graph input. One walk; run on its own output, it changes nothing.

    Args:
        rules: which of ``RULES`` to apply, by default all but the last.

            - "detach", "view", "slice": remove operators that return their operand. Both "detach"
              and "view" remove ``alias``, as a detach is called since torch 2.14;
            - "pad": remove a pad by no element, which only copies, unless something writes to the
              copy or to its source, or the copy is returned. Since torch 2.15 DTensor traces such
              pads;
            - "transpose": replace a transpose of a transpose by its input, as in the backward of a
              linear layer;
            - "reshape": write ``reshape`` for ``view`` and ``_unsafe_view``. Use it before a pass
              that changes strides: then a ``view`` would raise, and a ``reshape`` copies.

    Raises:
        ValueError: a rule that does not exist.
    """
    rules = [rules] if isinstance(rules, str) else rules
    unknown = sorted(set(rules) - set(RULES))
    if unknown:
        raise ValueError(
            f"there is no rule {', '.join(map(repr, unknown))}; there are {', '.join(RULES)}"
        )
    changed = False
    for node in list(gm.graph.nodes):
        if "transpose" in rules and _cancels(node):
            changed |= _replace_by(node, node.all_input_nodes[0].all_input_nodes[0])
        elif not _RULES_OF.get(node.target, set()).isdisjoint(rules) and _is_identity(node):
            changed |= _replace_by(node, node.all_input_nodes[0])
        elif "reshape" in rules and node.target in _RESHAPES:
            node.target, changed = aten.reshape.default, True
    return changed


def _is_identity(node: fx.Node) -> bool:
    """Return whether a value is its input, in shape and strides, and may share its memory."""
    if node.target in _DETACHES:
        return True
    source = node.all_input_nodes[0]
    if node.target is aten.constant_pad_nd.default:
        pads: Any = node.args[1]
        if any(type(pad) is not int or pad != 0 for pad in pads):
            return False
        # A pad copies. Without it a write to one of the two would change both.
        copies = _values_sharing(node)
        for value in copies | _values_sharing(source):
            for user in value.users:
                is_returned = value in copies and user.op == "output"
                if is_returned or value in written_operands(user):
                    return False
    return _same_layout(source, node)


def _values_sharing(node: fx.Node) -> set[fx.Node]:
    """Return the values in the storage of a value, itself among them."""
    storage = storage_of(node)
    return walk([storage], lambda value: value.users, lambda value: storage_of(value) is storage)


def _cancels(node: fx.Node) -> bool:
    """Return whether a node undoes the transpose above it.

    Transposes move no memory, so a result of the layout of the original is the original.
    """
    if node.target not in _TRANSPOSES:
        return False
    inner = node.all_input_nodes[0]
    return inner.target in _TRANSPOSES and _same_layout(inner.all_input_nodes[0], node)


def _replace_by(node: fx.Node, source: fx.Node) -> bool:
    """Let a node's users read ``source``; erase the node, and what lay in between if unused."""
    # An output keeps a node of its own, besides the graph's inputs.
    if source.op == "placeholder" and any(user.op == "output" for user in node.users):
        return False
    between = node.all_input_nodes[0]
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    if between is not source and not between.users:
        node.graph.erase_node(between)
    return True


def _same_layout(before: fx.Node, after: fx.Node) -> bool:
    """Return whether two values of one dtype, a view or copy and its source, have equal layouts."""
    ours, theirs = before.meta.get("val"), after.meta.get("val")
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    if ours.ndim != theirs.ndim:
        return False
    pairs = zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=True)
    # A comparison of extents that depend on data must not add a guard.
    return all(statically_known_true(one == other) for one, other in pairs)


@graph_pass
def eliminate_dead_code_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> bool:
    """Remove nodes without users, in place, except inputs, mutations, collectives and random draws.

    The other ranks issue their collectives, and later random numbers depend on earlier ones. One
    walk from the output.
    """
    count = len(gm.graph.nodes)
    # Last first, so that an operand loses its dead readers before it is looked at.
    for node in reversed(gm.graph.nodes):
        if not node.users and not has_effect(node):
            gm.graph.erase_node(node)
    return len(gm.graph.nodes) < count
