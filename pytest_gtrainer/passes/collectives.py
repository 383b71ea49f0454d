"""Change single collectives before they are bucketed, and list what torch would fuse."""

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
from pytest_gtrainer.graph.nodes import (
    direction,
    is_random,
    is_wait,
    node_fqn,
    storage_of,
    walk,
    writes,
)
from pytest_gtrainer.passes.graph_pass import graph_pass


@graph_pass
def deduplicate_fsdp_unshard_chains_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> bool:
    """Let every later reader of a gathered parameter use the first all-gather, in place.

    No bit changes. Duplicates have the same parameter, direction, group and dtype, the same
    operators between shard and gather, and nothing writes to what one of these makes, nor to what
    it reads before its counterpart has; so a gather that the backward recomputes stays.
    Each gradient contribution keeps its reduction: only a tracer can join these
    (``trace_step(reuse_gathers=True)``). Linear in nodes.
    """
    first: dict[tuple[Any, ...], FsdpCollective] = {}
    duplicates, written = [], _Written(gm.graph)
    for member in fsdp_all_gathers(gm):
        key = (member.position, member.direction, member.signature, _spell_chain(member))
        kept = first.setdefault(key, member)
        if written(kept.wait, after=kept.launch) or _has_other_value(member, kept, written):
            first[key] = member
        elif kept is not member and not written(member.wait, after=member.launch):
            duplicates.append((member, kept))
    for member, kept in duplicates:
        if member.wait < kept.wait:
            # Both are launched before either wait, and the duplicate is waited for first.
            member.wait.prepend(kept.wait)
        member.wait.replace_all_uses_with(kept.wait)
        for node in (member.wait, member.launch, *reversed(member.chain)):
            if not node.users:  # a cast may feed both all-gathers
                gm.graph.erase_node(node)
    return bool(duplicates)


class _Written:
    """Says whether a graph writes to the memory of a value between two of its nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self._writers = writes(graph)

    def __call__(self, value: fx.Node, after: fx.Node, before: fx.Node | None = None) -> bool:
        writers = self._writers.get(storage_of(value), ())
        return any(after < writer and (before is None or writer < before) for writer in writers)


def _has_other_value(member: FsdpCollective, kept: FsdpCollective, written: _Written) -> bool:
    """Return whether a gather may have another value than an earlier one of the same operators.

    A chain may begin long before its gather, so each of its operators counts by itself.
    """
    ours, theirs = (*kept.chain, kept.launch), (*member.chain, member.launch)
    for node, other in zip(ours, theirs, strict=True):
        if is_random(node):
            return True
        begin, end = min(node, other), max(node, other)
        shards = set(node.all_input_nodes).difference(ours)
        if any(written(shard, after=begin, before=end) for shard in shards):
            return True
    for nodes in (ours, theirs):
        for node in nodes:
            for source in set(node.all_input_nodes).intersection(nodes):
                if written(source, after=source, before=node):
                    return True
    return False


def _spell_chain(member: FsdpCollective) -> str:
    """Return what is computed between a shard and its gather; a model may gather a relu of it."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in member.chain:
        given = fx.node.map_arg((node.args, node.kwargs), lambda each: names.get(each, "shard"))
        names[node] = f"value {len(names)}"
        lines.append(f"{node.target} {given}")
    return "\n".join(lines)


aten = torch.ops.aten
_SUMS = ("sum", "avg", "premul_sum")
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
    """Swap ``all_reduce`` then ``reduce_scatter`` of a gradient, in place.

    DTensor reduces among replicas first; FSDP2 reduces shards first, which moves less. The padding
    of uneven shards between the two stays: its zeros average to zeros. The number of nodes does not
    change. Run it before bucketing, which then packs both. Sums are added in another order; each
    collective rounds its sum to its dtype, so gradients of bf16 are rounded at other places.

    Left as they are: two groups that share another rank, as replicas then hold other shards;
    reductions that do not commute; gradients that are written to after the all-reduce.

    Raises:
        PlanError: an all-reduced gradient is read by something else than its reduce-scatter, or the
            graph lacks values.
        ValueError: this process has no group of a name that the graph has.
    """
    found = []
    for member in fsdp_reduce_scatters(gm):
        wait = _swap_of(member)
        if wait is not None:
            found.append((member, member.value, wait))
    swaps, written = [], writes(gm.graph)
    for member, value, wait in found:
        launch = wait.all_input_nodes[0]
        # The reduce-scatter will read the gradient itself, where it read the sum.
        writers = written.get(storage_of(launch.all_input_nodes[0]), ())
        is_written = any(launch < writer < member.launch for writer in writers)
        if not is_written and _commute(launch, member.launch):
            swaps.append((member, value, wait))
    # Everything is found, or refused, before the first swap.
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


def _commute(all_reduce: fx.Node, reduce_scatter: fx.Node) -> bool:
    """Return whether two collectives compute the same in the other order."""
    reductions = {str(all_reduce.args[1]), str(reduce_scatter.args[1])}
    are_sums = all(reduction.startswith(_SUMS) for reduction in reductions)
    if len(reductions) > 1 and not are_sums:
        return False
    replicas = group_ranks(str(group_of(all_reduce)))
    shards = group_ranks(str(group_of(reduce_scatter)))
    # A rank in both holds another shard, which the all-reduce would add to this one's.
    return len(set(replicas) & set(shards)) == 1


def _swap_of(member: FsdpCollective) -> fx.Node | None:
    """Return the wait of the all-reduce above a reduce-scatter; None if there is none.

    Between the two there may be a pad.
    """
    between = walk(
        member.launch.all_input_nodes, lambda n: n.all_input_nodes, lambda n: n.target in PADDING
    )
    inside = between | {member.launch}
    above: set[fx.Node] = set()
    for node in inside:
        above.update(node.all_input_nodes)
    above -= between
    if len(above) != 1:
        return None
    wait = above.pop()
    if not is_wait(wait) or wait.all_input_nodes[0].target is not ALL_REDUCE:
        return None
    launch = wait.all_input_nodes[0]
    readers = [user for node in (*between, wait) for user in node.users if user not in inside]
    if only_wait(launch) is None:
        readers.append(launch)
    if readers:
        raise PlanError(
            f"the all-reduced gradient of {member.parameter} is read by {readers[0]} too, so its "
            "reduce-scatter cannot come first"
        )
    return wait


@graph_pass
def reassign_collective_pgs_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> bool:
    """Move FSDP's all-gathers to an extra process group with the same ranks, in place.

    Each group with such an all-gather gets one extra group, at the first call in a world; it ends
    with the world. Reduce-scatters and other all-gathers stay. The number of nodes does not change.
    Run it before bucketing, and on every rank of the groups, because making a group is collective.

    Raises:
        PlanError: the graph is bucketed already.
    """
    members: list[tuple[FsdpCollective, str]] = []
    for member in fsdp_all_gathers(gm):
        group = str(group_of(member.launch))
        if not is_extra_group(group):
            members.append((member, group))
    bucketed = [m.parameter for m, _ in members if "fsdp_bucket" in m.launch.meta]
    if bucketed:
        raise PlanError(
            f"the all-gather of {', '.join(bucketed)} is in a bucket: reassign process groups "
            "before bucketing"
        )
    # All ranks make groups in one order, by ranks and then as the graph has them. Otherwise ranks
    # of groups that overlap would wait for each other.
    extras: dict[str, str] = {}
    for group in sorted(dict.fromkeys(group for _, group in members), key=group_ranks):
        extras[group] = extra_group(group)
    for member, group in members:
        member.launch.args = (*member.launch.args[:-1], extras[group])
    return bool(members)


@dataclass(frozen=True, slots=True)
class AsyncTpDecision:
    """One all-gather or reduce-scatter, and the modules whose matrix products torch fuses with it.

    As text ``fwd all_gather of layers.0.attention + wq, wk, wv``, ``bwd reduce_scatter of norm, not
    fused``.
    """

    direction: str
    kind: str
    fqn: str
    products: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.direction} {self.kind} of {self.fqn}"
        if not self.products:
            return f"{text}, not fused"
        names = [name.removeprefix(f"{self.fqn}.") for name in self.products]
        return f"{text} + {', '.join(names)}"


def async_tp_decisions(gm: fx.GraphModule, mesh: DeviceMesh) -> list[AsyncTpDecision]:
    """List what torch's ``micro_pipeline_tp`` would fuse with the collectives of ``mesh``.

    An all-gather is fused with the products that have it as left operand, a reduce-scatter with the
    product that it reduces. The pass runs on a copy with Inductor's views, as if the group had
    symmetric memory.

    Args:
        gm: of ``trace_step``, ``trace_stage``, or one that ``torch.compile`` made: flat, with
            values in its metadata.
        mesh: the 1-D mesh of tensor parallelism, ``mesh["tp"]``.

    Returns:
        A decision for each all-gather and reduce-scatter of ``mesh``, in graph order.

    Raises:
        ValueError: the mesh has more dimensions, or the graph no such collective.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"{mesh} has {mesh.ndim} dimensions: give the one of tensor parallelism, mesh['tp']"
        )
    group = mesh.get_group().group_name
    found = []
    for node in gm.graph.nodes:
        is_of_mesh = launches(node.target) and group_of(node) == group
        if is_of_mesh and kind_of(node) in ("all_gather", "reduce_scatter"):
            found.append(node)
    if not found:
        raise ValueError(
            f"the graph has no all-gather and no reduce-scatter over {mesh}: nothing could be fused"
        )
    copied = copy.deepcopy(gm)
    for node in copied.graph.nodes:
        # Inductor's graphs have these forms, and its patterns match no others.
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    fused = fused_by_async_tp(copied.graph, group)
    by_name = {node.name: node_fqn(node) for node in gm.graph.nodes}
    decisions = []
    for node in found:
        products = tuple(by_name[name] for name in fused.get(node.name, ()))
        decision = AsyncTpDecision(direction(node), kind_of(node), node_fqn(node), products)
        decisions.append(decision)
    return decisions
