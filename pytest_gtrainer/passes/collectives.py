"""What is done to single collectives: by us before they are bucketed, by torch for asynchronous tensor parallelism."""

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch.passes import ALL_REDUCE, extra_group, fused_by_async_tp, is_extra_group
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.graph.collectives import (
    FsdpCollective,
    PlanError,
    fsdp_all_gathers,
    fsdp_reduce_scatters,
    group_of,
    kind_of,
    launches,
    only_wait,
)
from pytest_gtrainer.graph.nodes import direction, is_wait, node_fqn, storage_of, walked, writes
from pytest_gtrainer.passes.graph_pass import graph_pass


@graph_pass
def deduplicate_fsdp_unshard_chains_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> bool:
    """Let every later reader of a gathered parameter use the first all-gather, in place; no bit changes.

    Duplicates have the same parameter, direction, group and dtype, and nothing writes to either, nor to the shard in
    between; so a gather that the backward recomputes stays. Each gradient contribution keeps its reduction: only a
    tracer can join these (``trace_step(reuse_gathers=True)``). Linear in nodes.
    """
    first: dict[tuple[Any, ...], FsdpCollective] = {}
    duplicates, written = [], writes(gm.graph)
    for member in fsdp_all_gathers(gm):
        key = (member.position, member.direction, member.signature)
        kept = first.setdefault(key, member)
        shard = {
            storage_of(above)
            for node in (kept.launch, *kept.chain)
            for above in node.all_input_nodes
        }
        between = any(
            kept.launch < writer < member.launch
            for node in shard
            for writer in written.get(node, ())
        )
        kept_changes, changes = (
            any(one.launch < writer for writer in written.get(storage_of(one.wait), ()))
            for one in (kept, member)
        )
        if between or kept_changes:
            first[key] = member  # a second gather gives another value
        elif kept is not member and not changes:
            duplicates.append((member, kept))
    for member, kept in duplicates:
        member.wait.replace_all_uses_with(kept.wait)
        for node in (member.wait, member.launch, *reversed(member.chain)):
            if not node.users:  # it fed the duplicate alone
                gm.graph.erase_node(node)
    return bool(duplicates)


aten = torch.ops.aten
PADDING = {
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
def reduce_scatter_before_all_reduce_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> bool:
    """Swap ``all_reduce`` then ``reduce_scatter`` of a gradient, as FSDP2 has them, in place.

    The padding of uneven shards between the two stays: its zeros average to zeros. The number of nodes does not change.
    Run it before bucketing, which then packs both.

    Raises:
        PlanError: an all-reduced gradient is read by something else than its reduce-scatter, or the graph lacks values.
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
    """The wait of the all-reduce above a reduce-scatter, with a pad between them at most; None if there is none."""
    between = walked(
        member.launch.all_input_nodes, lambda n: n.all_input_nodes, lambda n: n.target in PADDING
    )
    above = {
        source for node in (*between, member.launch) for source in node.all_input_nodes
    } - between
    if (
        len(above) != 1
        or not is_wait(wait := above.pop())
        or wait.all_input_nodes[0].target is not ALL_REDUCE
    ):
        return None
    launch = wait.all_input_nodes[0]
    others = [
        user
        for node in (*between, wait)
        for user in node.users
        if user not in between | {member.launch}
    ]
    if others or only_wait(launch) is None:
        wrong = f"the all-reduced gradient of {member.parameter} is read by {others[0] if others else launch} too"
        raise PlanError(f"{wrong}, so its reduce-scatter cannot come first")
    return wait


@graph_pass
def reassign_collective_pgs_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> bool:
    """Move FSDP's all-gathers to an extra process group with the same ranks, in place.

    Each group with such an all-gather gets one extra group, at the first call in a world; it ends with the world.
    Reduce-scatters and other all-gathers stay. The number of nodes does not change. Run it before bucketing, and on
    every rank of the groups, because making a group is collective.

    Raises:
        PlanError: the graph is bucketed already.
    """
    members = [
        member
        for member in fsdp_all_gathers(gm)
        if not is_extra_group(str(group_of(member.launch)))
    ]
    if bucketed := [member.parameter for member in members if "fsdp_bucket" in member.launch.meta]:
        raise PlanError(
            f"the all-gather of {', '.join(bucketed)} is in a bucket: reassign process groups before bucketing"
        )
    # made in one order on all ranks, by ranks and then as the graph has them, or groups that overlap would wait
    # for each other
    sources = sorted(
        dict.fromkeys(str(group_of(member.launch)) for member in members), key=group_ranks
    )
    extras = {name: extra_group(name) for name in sources}
    for member in members:
        launch = member.launch
        launch.args = (*launch.args[:-1], extras[str(group_of(launch))])
    return bool(members)


@dataclass(frozen=True, slots=True)
class AsyncTpDecision:
    """One all-gather or reduce-scatter: ``products`` are the modules whose matrix products torch fuses with it.

    As text ``fwd all_gather of layers.0.attention + wq, wk, wv``, ``bwd reduce_scatter of norm, not fused``.
    """

    direction: str
    kind: str
    fqn: str
    products: tuple[str, ...]

    def __str__(self) -> str:
        names = [name.removeprefix(f"{self.fqn}.") for name in self.products]
        return f"{self.direction} {self.kind} of {self.fqn}" + (
            f" + {', '.join(names)}" if names else ", not fused"
        )


def async_tp_decisions(gm: fx.GraphModule, mesh: DeviceMesh) -> list[AsyncTpDecision]:
    """What torch's ``micro_pipeline_tp`` would fuse: each all-gather and reduce-scatter of ``mesh``, in graph order.

    An all-gather is fused with the products that have it as left operand, a reduce-scatter with the product that it
    reduces. The pass runs on a copy with Inductor's views, as if the group had symmetric memory.

    Args:
        gm: of ``trace_step``, ``trace_stage``, or one that ``torch.compile`` made: flat, with values in its metadata.
        mesh: the 1-D mesh of tensor parallelism, ``mesh["tp"]``.

    Raises:
        ValueError: the mesh has more dimensions, or the graph no such collective.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"{mesh} has {mesh.ndim} dimensions: give the one of tensor parallelism, mesh['tp']"
        )
    group = mesh.get_group().group_name
    of_mesh = (node for node in gm.graph.nodes if launches(node.target) and group_of(node) == group)
    if not (
        found := [node for node in of_mesh if kind_of(node) in ("all_gather", "reduce_scatter")]
    ):
        raise ValueError(
            f"the graph has no all-gather and no reduce-scatter over {mesh}: nothing could be fused"
        )
    copied = copy.deepcopy(gm)
    for node in copied.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    fused = fused_by_async_tp(copied.graph, group)
    by_name = {node.name: node_fqn(node) for node in gm.graph.nodes}
    return [
        AsyncTpDecision(
            direction(node),
            kind_of(node),
            node_fqn(node),
            tuple(by_name[name] for name in fused.get(node.name, ())),
        )
        for node in found
    ]
