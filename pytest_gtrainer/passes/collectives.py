"""What is done to single collectives, before they are bucketed: one all-gather a parameter, the order of hybrid
sharding, and process groups.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import ALL_REDUCE, extra_group, is_extra_group
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.graph.collectives import (
    FsdpCollective,
    PlanError,
    fsdp_all_gathers,
    fsdp_reduce_scatters,
    group_of,
    only_wait,
)
from pytest_gtrainer.graph.nodes import is_wait, storage_of, writes
from pytest_gtrainer.passes.graph_pass import graph_pass


@graph_pass
def deduplicate_fsdp_unshard_chains_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Let every later reader of a gathered parameter use the first all-gather, in place.

    Only all-gathers of the same parameter, direction, group and dtype are duplicates, with no write to it in
    between: a gather recomputed in the backward stays. Values stay bit for bit; the gradient contributions still
    have a reduction each, which only a tracer can join (``trace_step(reuse_gathers=True)``).
    Linear in nodes; a graph without duplicates is left as it is.
    """
    first: dict[tuple[Any, ...], FsdpCollective] = {}
    duplicates = []
    written = writes(gm.graph)
    for member in fsdp_all_gathers(gm):
        key = (member.position, member.direction, member.signature)
        kept = first.setdefault(key, member)
        sent = (kept.launch, *kept.chain)
        memory = {storage_of(node) for node in (kept.wait, *(above for node in sent for above in node.all_input_nodes))}
        if any(kept.launch < writer < member.launch for node in memory for writer in written.get(node, ())):
            first[key] = member  # the value was written to in between: a second gather gives another one
        elif kept is not member:
            duplicates.append((member, kept))
    for member, kept in duplicates:
        member.wait.replace_all_uses_with(kept.wait)
        for node in (member.wait, member.launch, *reversed(member.chain)):
            if not node.users:  # it fed the duplicate alone
                gm.graph.erase_node(node)
    return bool(duplicates)


aten = torch.ops.aten
_PADDING = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.constant_pad_nd.default,
    aten.cat.default,
    aten.clone.default,
    aten.view.default,
    aten.reshape.default,
    operator.getitem,
}


@graph_pass
def reduce_scatter_before_all_reduce_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Swap ``all_reduce`` then ``reduce_scatter`` of a gradient, as FSDP2 has them, in place.

    What lies between the two, the padding of uneven shards, stays where it is: its zeros average to
    zeros. The number of nodes does not change; a gradient that is not all-reduced is left alone. Run
    it before bucketing, which then packs both.

    Raises:
        PlanError: an all-reduced gradient is read by something else than its reduce-scatter, or the graph
            lacks values.
    """
    found = [(member, _swap_of(member)) for member in fsdp_reduce_scatters(gm)]
    swaps = [(member, member.value, wait) for member, wait in found if wait is not None]
    for member, value, wait in swaps:
        launch, below = wait.all_input_nodes[0], member.wait
        gradient = launch.all_input_nodes[0]
        wait.replace_all_uses_with(gradient)
        below.replace_all_uses_with(wait)
        launch.replace_input_with(gradient, below)
        below.append(launch)
        launch.append(wait)
        launch.meta["val"] = wait.meta["val"] = value
    return bool(swaps)


def _swap_of(member: FsdpCollective) -> fx.Node | None:
    """The wait of the all-reduce above a reduce-scatter; None if there is none.

    Between the two collectives lies a pad at most: a handful of nodes. Elsewhere the walk would climb the
    whole backward, so it ends at the first node that is none of those that DTensor pads with.
    """
    between: set[fx.Node] = set()
    waits: set[fx.Node] = set()
    todo = list(member.launch.all_input_nodes)
    while todo:
        node = todo.pop()
        if is_wait(node):
            waits.add(node)
        elif node.target in _PADDING:
            between.add(node)
            todo += [source for source in node.all_input_nodes if source not in between]
        else:
            return None
    if len(waits) != 1:
        return None
    [wait] = waits
    launch = wait.all_input_nodes[0]
    if launch.target is not ALL_REDUCE:
        return None
    others = [user for node in (*between, wait) for user in node.users if user not in between | {member.launch}]
    if others or only_wait(launch) is None:
        raise PlanError(
            f"the all-reduced gradient of {member.parameter} is read by {others[0] if others else launch} too, so its "
            "reduce-scatter cannot come first"
        )
    return wait


@graph_pass
def reassign_collective_pgs_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Move FSDP's all-gathers to an extra process group with the same ranks, in place.

    Each group that carries such an all-gather has one extra group, made at the first call in a world
    and gone with it. Reduce-scatters stay, and so do all-gathers that are not FSDP's though
    they share the group. The number of nodes does not change. Run it before bucketing, so that
    the buckets are in the new group, and on every rank of the groups: making one is collective.

    Raises:
        PlanError: the graph is bucketed already.
    """
    members = [member for member in fsdp_all_gathers(gm) if not is_extra_group(str(group_of(member.launch)))]
    if bucketed := [member.parameter for member in members if "fsdp_bucket" in member.launch.meta]:
        raise PlanError(
            f"the all-gather of {', '.join(bucketed)} is in a bucket: reassign process groups before bucketing"
        )
    # made in one order on all ranks, by ranks and then as the graph has them, or groups that overlap would wait
    # for each other
    sources = sorted(dict.fromkeys(str(group_of(member.launch)) for member in members), key=group_ranks)
    extras = {name: extra_group(name) for name in sources}
    for member in members:
        launch = member.launch
        launch.args = (*launch.args[:-1], extras[str(group_of(launch))])
    return bool(members)
