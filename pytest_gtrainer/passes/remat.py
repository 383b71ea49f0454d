"""Recompute in the backward what is tagged so, instead of keeping it from the forward.

*Idea.* A backward node that reads a tagged forward value reads a copy of it, made right before the first backward
reader from graph inputs and forward values without the tag. *Invariant.* A region that cannot be repeated, as it draws
random numbers or reads what has been overwritten, is refused first (D11). *Cost.* Linear in nodes and edges.
"""

import copy
import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from pytest_gtrainer.graph.collectives import PlanError, fsdp_all_gathers
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    FORWARD,
    direction,
    is_random,
    is_view,
    mutates,
    storage_of,
    walked,
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

    It tags the forward's all-gathers of parameters, the nodes between shard and all-gather, the waits, and views of the
    results. An existing tag stays. Run ``selective_activation_remat_pass`` after it.

    Args:
        reshard_after_forward: False tags nothing.
        keep_unsharded: FQNs of modules whose parameters stay gathered, as FSDP2's root and a trainer's last bucket do.

    Raises:
        ValueError: ``keep_unsharded`` names what has no all-gathers.
    """
    if not reshard_after_forward:
        return False
    keep_unsharded = [keep_unsharded] if isinstance(keep_unsharded, str) else keep_unsharded
    members = [member for member in fsdp_all_gathers(gm) if member.direction == FORWARD]
    kept = {
        fqn: [m for m in members if f"{m.parameter}.".startswith(f"{fqn}.")]
        for fqn in keep_unsharded
    }
    empty = [fqn for fqn, found in kept.items() if not found]
    if empty:
        raise ValueError(
            f"keep_unsharded names {', '.join(map(repr, empty))}, of which no parameter is gathered"
        )
    stay = {member.launch for found in kept.values() for member in found}
    for member in members:
        if member.launch not in stay:
            views = walked(
                member.wait.users,
                lambda node: node.users,
                lambda node: (
                    direction(node) == FORWARD
                    and (is_view(node.target) or node.target is operator.getitem)
                ),
            )
            for node in (*member.chain, member.launch, member.wait, *views):
                node.meta.setdefault(RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
    return False


_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@graph_pass
def selective_activation_remat_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> bool:
    """Let the backward recompute forward values tagged MUST_RECOMPUTE or PREFER_RECOMPUTE, in place.

    Recomputed nodes are named ``*_recomputed``, are the backward's, and have metadata of their own.
    Forward values that then have no reader stay for dead-code removal.

    Raises:
        PlanError: a region to recompute draws random numbers, writes, or reads what is written to.
    """
    readers = [node for node in gm.graph.nodes if direction(node) == BACKWARD]
    done: set[fx.Node] = set()
    regions = []  # for each backward node that is the first to need them: forward nodes to recompute, in graph order
    for reader in readers:
        sources = reader.all_input_nodes
        region = walked(
            sources,
            lambda node: node.all_input_nodes,
            lambda node: _is_tagged(node) and node not in done,
        )
        done.update(region)
        regions.append((reader, sorted(region)))
    _check(gm.graph, done)
    copies: dict[fx.Node, fx.Node] = {}
    for reader, nodes in regions:
        for node in nodes:
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda source: copies.get(source, source)
            )
            with gm.graph.inserting_before(reader):
                again = gm.graph.create_node(
                    node.op, node.target, args, kwargs, name=f"{node.name}_recomputed"
                )
            again.meta = {key: value for key, value in node.meta.items() if key != RECOMPUTE}
            if "custom" in again.meta:
                again.meta["custom"] = copy.deepcopy(again.meta["custom"])
            again.meta["autograd_backward"] = True
            copies[node] = again
    for reader in readers:
        for source in [source for source in reader.all_input_nodes if source in copies]:
            reader.replace_input_with(source, copies[source])
    return bool(copies)


def _is_tagged(node: fx.Node) -> bool:
    """Whether a forward value is to be recomputed; a part of several results that has no tag has theirs."""
    if node.target is operator.getitem and RECOMPUTE not in node.meta:
        return _is_tagged(node.all_input_nodes[0])
    return (
        node.op != "placeholder"
        and direction(node) != BACKWARD
        and node.meta.get(RECOMPUTE) in _AGAIN
    )


def _check(graph: fx.Graph, region: set[fx.Node]) -> None:
    written = writes(graph)
    for node in sorted(region):
        if is_random(node):
            raise PlanError(
                f"{node} cannot be recomputed: it draws random numbers, and would draw others; save it"
            )
        if mutates(node):
            raise PlanError(
                f"{node} cannot be recomputed: it writes to an operand, and would do so twice; save it"
            )
        if read := [source for source in node.all_input_nodes if storage_of(source) in written]:
            raise PlanError(
                f"{node} cannot be recomputed: it reads {read[0]}, which the graph writes to; save it"
            )
