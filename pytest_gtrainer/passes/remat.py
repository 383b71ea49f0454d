"""Recompute tagged values in the backward, instead of keeping them from the forward.

*Idea.* A backward node that reads a tagged forward value reads a copy of it. The copy is made right
before the first backward reader, from graph inputs and forward values without the tag.
*Invariant.* A region that cannot be repeated, as it draws random numbers, reads or makes what is
overwritten, or has messages, is refused before anything changes. *Cost.* Linear in nodes and edges.
"""

import copy
import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from pytest_gtrainer.facts import check_switches
from pytest_gtrainer.graph.collectives import PlanError, fsdp_all_gathers, is_message
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    FORWARD,
    direction,
    is_random,
    is_view,
    mutates,
    storage_of,
    walk,
    writes,
)
from pytest_gtrainer.passes.graph_pass import graph_pass

RECOMPUTE = "recompute"


@graph_pass
def tag_with_memory_policy_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    reshard_after_forward: bool = True,
    keep_unsharded: Collection[str] = (),
) -> bool:
    """Tag gathered parameters for recomputation, so that the backward gathers them again, in place.

    It tags the forward's all-gathers of parameters, the nodes between shard and all-gather, the
    waits, and views of the results. An existing tag stays. Run ``selective_activation_remat_pass``
    after it.

    Args:
        reshard_after_forward: False tags nothing.
        keep_unsharded: FQNs of modules or parameters that stay gathered. FSDP2 keeps what its root
            manages itself, and a trainer its last bucket: name the modules of these buckets.

    Raises:
        ValueError: ``keep_unsharded`` names what has no all-gathers.
    """
    check_switches(reshard_after_forward=reshard_after_forward)
    if not reshard_after_forward:
        return False
    keep_unsharded = [keep_unsharded] if isinstance(keep_unsharded, str) else keep_unsharded
    members = [member for member in fsdp_all_gathers(gm) if member.direction == FORWARD]
    unused = dict.fromkeys(keep_unsharded)
    to_tag: set[fx.Node] = set()
    for member in members:
        prefixes = [fqn for fqn in keep_unsharded if f"{member.parameter}.".startswith(f"{fqn}.")]
        for fqn in prefixes:
            unused.pop(fqn, None)
        if not prefixes:
            to_tag.update(member.chain, (member.launch, member.wait))
            to_tag |= walk(member.wait.users, lambda node: node.users, _is_forward_view)
    if unused:
        raise ValueError(
            f"keep_unsharded names {', '.join(map(repr, unused))}, of which no parameter is "
            "gathered"
        )
    for node in to_tag:
        node.meta.setdefault(RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
    return False  # tags are no change of the graph that needs a lint


def _is_forward_view(node: fx.Node) -> bool:
    is_part = is_view(node.target) or node.target is operator.getitem
    return is_part and direction(node) == FORWARD


_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@graph_pass
def selective_activation_remat_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> bool:
    """Let the backward recompute values tagged MUST_RECOMPUTE or PREFER_RECOMPUTE, in place.

    Recomputed nodes are named ``*_recomputed``, are the backward's, and have metadata of their own.
    Forward values that then have no reader stay for dead-code removal.

    Raises:
        PlanError: a region to recompute draws random numbers, writes, reads what is written to, is
            written to itself, or sends to or receives from another rank.
    """
    readers = [node for node in gm.graph.nodes if direction(node) == BACKWARD]
    done: set[fx.Node] = set()
    regions = []

    def is_needed(node: fx.Node) -> bool:
        return _is_tagged(node) and node not in done

    for reader in readers:
        # The first reader needs a copy of all of these in front of it; later ones share it.
        region = walk(reader.all_input_nodes, lambda node: node.all_input_nodes, is_needed)
        done.update(region)
        regions.append((reader, sorted(region)))
    _check_repeatable(gm.graph, done)
    copies: dict[fx.Node, fx.Node] = {}
    for reader, nodes in regions:
        for node in nodes:
            args = fx.node.map_arg(node.args, lambda source: copies.get(source, source))
            kwargs = fx.node.map_arg(node.kwargs, lambda source: copies.get(source, source))
            name = f"{node.name}_recomputed"
            with gm.graph.inserting_before(reader):
                again = gm.graph.create_node(node.op, node.target, args, kwargs, name)
            again.meta = {key: value for key, value in node.meta.items() if key != RECOMPUTE}
            if "custom" in again.meta:
                # A later pass that annotates one of the two must not change the other.
                again.meta["custom"] = copy.deepcopy(again.meta["custom"])
            again.meta["autograd_backward"] = True
            copies[node] = again
    for reader in readers:
        for source in reader.all_input_nodes:
            if source in copies:
                reader.replace_input_with(source, copies[source])
    return bool(copies)


def _is_tagged(node: fx.Node) -> bool:
    """Return whether a forward value is to be recomputed."""
    if node.target is operator.getitem and RECOMPUTE not in node.meta:
        return _is_tagged(node.all_input_nodes[0])  # an element has the tag of its tuple
    is_forward = node.op != "placeholder" and direction(node) != BACKWARD
    return is_forward and node.meta.get(RECOMPUTE) in _AGAIN


def _check_repeatable(graph: fx.Graph, region: set[fx.Node]) -> None:
    written = writes(graph)
    for node in sorted(region):
        wrong = None
        if is_random(node):
            wrong = "it draws random numbers, and would draw others"
        elif mutates(node):
            wrong = "it writes to an operand, and would do so twice"
        elif is_message(node):
            wrong = "it is a message, and the other rank would not repeat its end"
        elif storage_of(node) in written:
            wrong = "the graph writes to it, and a copy would be without that"
        for source in node.all_input_nodes:
            if wrong is None and storage_of(source) in written:
                wrong = f"it reads {source}, which the graph writes to"
        if wrong is not None:
            raise PlanError(f"{node} cannot be recomputed: {wrong}; save it")
