"""Bucket the FSDP collectives of a joint forward and backward graph, and overlap them with compute.

*Idea.* An all-gather's launch depends on graph inputs only, so it may stand anywhere before its
wait. A wait of a reduce-scatter feeds the output only, so it may stand anywhere after its launch.
Each block of nodes is built in its final place; compute nodes never move. A payload is packed as
eager FSDP2 packs it. *Invariant.* Everything is checked before the first node is built, so a pass
that refuses leaves the graph as it was. *Cost.* Linear in nodes; one recompile. *Source.*
torchtitan's graph_trainer pass of the same name (pull requests 2934, 3590). Payload order and
coverage of the plan are stricter here.
"""

import difflib
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.passes import (
    WAIT,
    add_control_dependencies,
    is_bucketed_by_torch,
    is_control_dependency,
    values_of_split,
)
from pytest_gtrainer._torch.values import value_like
from pytest_gtrainer.facts import check_switches
from pytest_gtrainer.graph.bucket_plan import (
    LOSS,
    Bucket,
    BucketPlan,
    PayloadOrder,
    Plan,
    layer_of,
    sort_key,
)
from pytest_gtrainer.graph.collectives import (
    FsdpCollective,
    PlanError,
    fsdp_all_gathers,
    fsdp_reduce_scatters,
    group_of,
    group_size_of,
    settings_of,
)
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    FORWARD,
    is_random,
    node_fqn,
    storage_of,
    writes,
)
from pytest_gtrainer.graph.nodes import direction as direction_of
from pytest_gtrainer.passes.graph_pass import graph_pass

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Merge:
    """The members of a bucket that become one collective: of one direction, process group,
    reduction and dtype.

    Attributes:
        members: in payload order. A single member keeps its own collective, which is only moved.
        first_launch: where an all-gather is launched, unless an earlier wait prefetches it.
        last_launch: where a reduce-scatter is launched.
        first_wait: where an all-gather is waited for.
    """

    bucket: Bucket
    direction: str
    members: tuple[FsdpCollective, ...]
    first_launch: fx.Node
    last_launch: fx.Node
    first_wait: fx.Node

    @property
    def inputs(self) -> list[fx.Node]:
        """The operands of the members' collectives: shards of parameters, or gradients."""
        return [member.launch.all_input_nodes[0] for member in self.members]


class BucketBuilder:
    """Create the nodes of a bucket in front of ``anchor``, with the metadata that later passes and
    checks read.
    """

    def __init__(self, merge: Merge, anchor: fx.Node) -> None:
        self.anchor = anchor
        fqns = list(merge.bucket.fqns)
        self.meta: dict[str, Any] = {
            "fsdp_bucket": {"plan_fqns": fqns, "direction": merge.direction}
        }
        if merge.direction == BACKWARD:
            self.meta["autograd_backward"] = True

    def call(
        self, target: Any, args: tuple[Any, ...], val: Any, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        with self.anchor.graph.inserting_before(self.anchor):
            node = self.anchor.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta, val=val)
        return node

    def reshape(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """Reshape a tensor of any strides; the result is contiguous."""
        val = node.meta["val"]
        if list(val.shape) == shape and val.is_contiguous():
            return node
        return self.call(aten.reshape.default, (node, shape), value_like(val, shape))

    def view(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """View a contiguous tensor."""
        val = node.meta["val"]
        if list(val.shape) == shape:
            return node
        return self.call(aten.view.default, (node, shape), value_like(val, shape))

    def cat(self, nodes: list[fx.Node], dim: int) -> fx.Node:
        val = nodes[0].meta["val"]
        shape = list(val.shape)
        shape[dim] = sum(node.meta["val"].shape[dim] for node in nodes)
        # A trace leaves out arguments that are the default; new nodes read as traced ones do.
        args = (nodes, dim) if dim else (nodes,)
        return self.call(aten.cat.default, args, value_like(val, shape))

    def split(self, node: fx.Node, sizes: list[int], dim: int) -> list[fx.Node]:
        parts = values_of_split(node.meta["val"], sizes, dim)
        args = (node, sizes, dim) if dim else (node, sizes)
        split = self.call(aten.split_with_sizes.default, args, parts)
        return [
            self.call(operator.getitem, (split, index), part) for index, part in enumerate(parts)
        ]

    def contiguous(self, node: fx.Node) -> fx.Node:
        """Copy a tensor, also where a strided view would do.

        FSDP2 copies parameters out of the gathered payload. A strided operand may select another
        kernel, which changes the bits of a later sum.
        """
        val = node.meta["val"]
        kwargs = {"memory_format": torch.contiguous_format}
        return self.call(aten.clone.default, (node,), value_like(val, val.shape), kwargs)

    def launch(self, like: fx.Node, payload: fx.Node, numel: int) -> fx.Node:
        """Launch the collective of ``like`` on a flat payload; the result has ``numel``
        elements.
        """
        val = value_like(payload.meta["val"], [numel])
        return self.call(like.target, (payload, *settings_of(like)), val)

    def wait(self, launch: fx.Node) -> fx.Node:
        return self.call(WAIT, (launch,), launch.meta["val"])


@graph_pass
def joint_transformer_block_bucketing_reordering_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    bucket_plan: BucketPlan,
    payload_order: PayloadOrder = "managed",
    reorder: bool = True,
    insert_overlap_deps: bool = False,
    require_buckets: bool = False,
) -> bool:
    """Bucket FSDP's collectives by ``bucket_plan`` and overlap them with compute, in place.

    Requires a joint graph whose nodes have the metadata of ``tracing.step``. Ensures that the graph
    lints, and computes the same values if reductions do not depend on the offset. Run on its own
    output, it changes nothing.

    Args:
        bucket_plan: module FQNs, see ``get_default_transformer_block_buckets``.
        payload_order: "managed" packs as eager FSDP2; "registration", "execution" or a list of
            parameter FQNs pack in another order, to show that the order matters.
        reorder: prefetch all-gathers and defer waits of reduce-scatters.
        insert_overlap_deps: add control dependencies that keep this order in Inductor's scheduler.
        require_buckets: refuse a graph without collectives of FSDP; by default it stays, and the
            summary counts it.

    Raises:
        PlanError: the plan does not fit the graph; the graph is untouched.
    """
    check_switches(
        reorder=reorder,
        insert_overlap_deps=insert_overlap_deps,
        require_buckets=require_buckets,
    )
    return _bucket(gm, bucket_plan, payload_order, reorder, insert_overlap_deps, require_buckets)


@graph_pass
def transformer_block_bucketing_reordering_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    bucket_plan: BucketPlan,
    direction: str,
    payload_order: PayloadOrder = "managed",
    reorder: bool = True,
    insert_overlap_deps: bool = False,
    require_buckets: bool = False,
) -> bool:
    """Bucket a forward graph, or a backward graph, as the joint pass does, in place.

    Args:
        direction: "fwd" or "bwd", whose graph it is; nodes need no mark of the backward.
        bucket_plan, payload_order, reorder, insert_overlap_deps, require_buckets: as for the joint
            graph.

    Raises:
        PlanError: as for the joint graph, or the graph is a joint one.
    """
    check_switches(
        reorder=reorder,
        insert_overlap_deps=insert_overlap_deps,
        require_buckets=require_buckets,
    )
    if direction not in (FORWARD, BACKWARD):
        raise ValueError(f"direction={direction!r}: expected {FORWARD!r} or {BACKWARD!r}")
    if direction == FORWARD and any(direction_of(node) == BACKWARD for node in gm.graph.nodes):
        raise PlanError(
            "the graph has nodes of the backward: for a joint graph use "
            "joint_transformer_block_bucketing_reordering_pass"
        )
    if direction == BACKWARD:
        _refuse_joint_graph(gm.graph)
    return _bucket(
        gm, bucket_plan, payload_order, reorder, insert_overlap_deps, require_buckets, direction
    )


def _refuse_joint_graph(graph: fx.Graph) -> None:
    """Refuse a graph of the backward that has results of the forward.

    A graph of the backward alone has marks on all its results, or none at all. Nodes of the forward
    that it recomputes may have no mark, and are no results. An input may keep the mark of the node
    that it was before the graph was cut.
    """
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    if all(direction_of(node) == FORWARD for node in calls):
        return
    for result in graph.output_node().all_input_nodes:
        if result.op not in ("placeholder", "get_attr") and direction_of(result) == FORWARD:
            raise PlanError(
                f"the graph has nodes of the backward and a result of the forward ({result}): for "
                "a joint graph use joint_transformer_block_bucketing_reordering_pass"
            )


def _bucket(
    gm: fx.GraphModule,
    bucket_plan: BucketPlan,
    payload_order: PayloadOrder,
    reorder: bool,
    insert_overlap_deps: bool,
    require_buckets: bool,
    direction: str | None = None,
) -> bool:
    """Check everything, then build. ``direction`` is that of all nodes; None if each node has its
    own mark.
    """
    plan = Plan(bucket_plan)
    # An earlier run with insert_overlap_deps has wrapped its waits in control_deps. The search for
    # collectives does not see through them, and would find a graph without buckets.
    if any("fsdp_bucket" in node.meta and is_control_dependency(node) for node in gm.graph.nodes):
        return False
    gathers, scatters = fsdp_all_gathers(gm), fsdp_reduce_scatters(gm)
    if _is_already_bucketed(gm, [*gathers, *scatters], require_buckets):
        return False
    _check_plan(plan, gm, gathers, scatters, direction)
    if direction is None:
        _check_order(payload_order, gm, [*gathers, *scatters])
    _check_values([*gathers, *scatters])

    gathering = _merge_members(gm, plan, gathers, payload_order, direction)
    scattering = _merge_members(gm, plan, scatters, payload_order, direction)
    if reorder:
        gathering = _hoist_first_backward_all_gather(gm, plan, gathering, direction)
    # The last all-gather of the forward prefetches nothing of the backward.
    by_direction: dict[str, list[Merge]] = {FORWARD: [], BACKWARD: []}
    for merge in gathering:
        by_direction[merge.direction].append(merge)
    _check_writes(gm.graph, list(by_direction.values()), scattering, reorder)
    _check_draws(gm.graph, list(by_direction.values()), scattering, reorder)

    must_follow: dict[fx.Node, fx.Node] = {}
    for merges in by_direction.values():
        must_follow |= _build_all_gathers(merges, reorder)
    must_follow |= _build_reduce_scatters(gm.graph, scattering, reorder)
    for merge in (*gathering, *scattering):
        if len(merge.members) == 1:
            continue  # its own collective was moved
        for member in merge.members:
            for node in reversed((member.launch, member.wait, *(member.all_reduce or ()))):
                gm.graph.erase_node(node)
    if insert_overlap_deps:
        # Inductor's scheduler reorders nodes that no dependency keeps apart.
        add_control_dependencies(gm.graph, must_follow)
    return True


def _is_already_bucketed(
    gm: fx.GraphModule, members: Sequence[FsdpCollective], require_buckets: bool
) -> bool:
    """Return whether every collective of FSDP is in a bucket already, or there is none.

    Raises:
        PlanError: some have one and others do not, or another pass has made the buckets.
    """
    if not members and not any("fsdp_bucket" in node.meta for node in gm.graph.nodes):
        idle = "no collective of FSDP in the graph: was data_parallel applied?"
        facts.emit("idle", what=f"bucketing: {idle}")
        if require_buckets:
            raise PlanError(
                "the graph has no collective of FSDP to bucket: was data_parallel(model, mesh) "
                "applied?"
            )
    marked = sum("fsdp_bucket" in member.launch.meta for member in members)
    if marked == len(members):
        return True
    if marked:
        raise PlanError("the graph is bucketed in part: run the pass once, on the graph as traced")
    for node in gm.graph.nodes:
        if is_bucketed_by_torch(node):
            raise PlanError(
                f"the graph is bucketed already, by another pass ({node}): run this one on the "
                "graph as traced, or leave it out"
            )
    return False


def _check_plan(
    plan: Plan,
    gm: fx.GraphModule,
    gathers: list[FsdpCollective],
    scatters: list[FsdpCollective],
    direction: str | None,
) -> None:
    """Check that the plan names modules that exist, and covers each collective.

    A parameter has at most one collective of a kind in each direction.
    """
    known = {node_fqn(node) for node in gm.graph.nodes}
    known.update(member.parameter for member in gathers)
    plan.check_names(known)
    plan.check_ties(gm.graph.output_node().meta.get("gt_tied", {}))
    for kind, members in (("all-gather", gathers), ("reduce-scatter", scatters)):
        parameters, modules, entries = list[str](), set[str](), set[str]()
        for member in members:
            fqn = member.bucket_fqn
            if plan.bucket_of(fqn) is None:
                parameters.append(member.parameter)
                modules.add(fqn or "the root")
                entries.add(f'"{layer_of(fqn) or fqn}"')
        if parameters:
            raise PlanError(
                f"the bucket plan covers no {kind} of {', '.join(parameters)} (read in "
                f"{', '.join(sorted(modules))}): add {', '.join(sorted(entries))} to the plan"
            )
        seen: dict[tuple[int, str], FsdpCollective] = {}
        for member in members:
            first = seen.setdefault((member.position, direction or member.direction), member)
            if first is not member:
                raise PlanError(_explain_second_collective(plan, kind, first, member))


def _check_values(members: list[FsdpCollective]) -> None:
    """Check that the nodes that a block is built from have values."""
    for member in members:
        for node in (*member.launch.all_input_nodes, member.launch, member.wait):
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise PlanError(
                    f'the collective of {member.parameter} lacks meta["val"]: trace on fake tensors'
                )


def _explain_second_collective(
    plan: Plan, kind: str, first: FsdpCollective, second: FsdpCollective
) -> str:
    """Return why a parameter may have two collectives: a second read, a gather that is not FSDP's,
    or a tie.
    """
    wrong = f"{first.parameter} has more than one {kind} in the {first.direction} direction: "
    if kind == "reduce-scatter":
        return (
            f"{wrong}trace with reuse_gathers=True, so that its contributions are added before "
            "they are reduced"
        )
    advice = "trace with reuse_gathers=True, or run deduplicate_fsdp_unshard_chains_pass first"
    source = first.launch.graph.find_nodes(op="placeholder")[first.position]
    not_fsdp = (
        f"if {source} is no parameter (a gathered activation, sequence or tensor parallelism), "
        f"say so: {source}.meta['gt_input'] = {{'kind': 'input', 'fqn': {source.name!r}}}"
    )
    if group_of(first.launch) != group_of(second.launch):
        one, other = (
            f"{member.launch} in {member.bucket_fqn or 'the root'} over {group_of(member.launch)}"
            for member in (first, second)
        )
        return f"{wrong}{one} and {other}, in two groups, of which FSDP's is one; {not_fsdp}"
    ours, theirs = plan.bucket_of(first.bucket_fqn), plan.bucket_of(second.bucket_fqn)
    if ours is not None and theirs is not None and ours is not theirs:
        return (
            f"{wrong}{advice}; if it is shared/tied, place its modules in the same bucket, they "
            f"are in {ours.label} and {theirs.label}"
        )
    if "gt_input" in source.meta:  # the tracer has classified it: it is a parameter
        return wrong + advice
    return f"{wrong}{advice}; {not_fsdp}"


def _check_order(
    order: PayloadOrder, gm: fx.GraphModule, members: Sequence[FsdpCollective]
) -> None:
    """Refuse a list of parameters with one that the graph does not have.

    Raises:
        PlanError: it has; the message names it.
    """
    if isinstance(order, str):
        return
    known = {member.parameter for member in members}
    for node in gm.graph.find_nodes(op="placeholder"):
        known.add((node.meta.get("gt_input") or {}).get("fqn", node.name))
    unknown = [fqn for fqn in order if fqn not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        suggestion = f"; did you mean {close[0]!r}?" if close else ""
        raise PlanError(f"payload_order: the graph has no parameter {unknown[0]!r}{suggestion}")


def _merge_members(
    gm: fx.GraphModule,
    plan: Plan,
    members: list[FsdpCollective],
    payload_order: PayloadOrder,
    direction: str | None,
) -> list[Merge]:
    """Group members of one kind by bucket, direction and signature, in order of their first
    launch.
    """
    place = {node: index for index, node in enumerate(gm.graph.nodes)}
    registered = sorted(members, key=lambda member: member.position)
    key = sort_key(
        payload_order,
        [member.parameter for member in registered],
        lambda member: place[member.launch],
        gm.graph.output_node().meta.get("gt_managed_order"),
    )
    groups: dict[tuple[Any, ...], list[FsdpCollective]] = {}
    for member in members:
        bucket = plan.bucket_of(member.bucket_fqn)
        same = (bucket, direction or member.direction, member.signature)
        groups.setdefault(same, []).append(member)
    merges = []
    for (bucket, of_direction, _), group in groups.items():
        merge = Merge(
            bucket,
            of_direction,
            members=tuple(sorted(group, key=lambda member: key(bucket, member))),
            first_launch=group[0].launch,
            last_launch=group[-1].launch,
            first_wait=min(member.wait for member in group),
        )
        merges.append(merge)
    return merges


def _hoist_first_backward_all_gather(
    gm: fx.GraphModule, plan: Plan, merges: list[Merge], direction: str | None
) -> list[Merge]:
    """Move the launch of the first backward all-gather up to the first compute of the backward.

    That is the first node that a bucket of the plan covers: as a rule the head's, after the loss's.
    Eager FSDP2 unshards the last group in its first pre-backward hook, so compute of the head hides
    this all-gather. Without the move it would be launched directly before its wait, with nothing to
    hide it.
    """
    first = None
    for merge in merges:
        if merge.direction == BACKWARD and (first is None or merge.first_wait < first.first_wait):
            first = merge
    if first is None:
        return merges

    # Nodes that lead to a collective mark no place: with uneven shards only some ranks have a pad
    # among them, and all ranks must launch in the same order.
    moving: set[fx.Node] = set()
    for merge in merges:
        for member in merge.members:
            moving.update(member.chain, (member.launch, member.wait))

    for node in gm.graph.nodes:
        if node is first.first_launch:
            break
        if node.op != "call_function" or node in moving:
            continue
        if BACKWARD not in (direction, direction_of(node)):
            continue
        fqn = node_fqn(node)
        bucket = plan.bucket_of(fqn)
        # An entry for the root covers the loss too, but the hook runs after the loss's backward; a
        # chunked loss is in the bucket of the head by name.
        if bucket is not None and (fqn != LOSS or LOSS in bucket.fqns):
            hoisted = replace(first, first_launch=node)
            return [hoisted if merge is first else merge for merge in merges]
    return merges


def _launch_places(merges: list[Merge], prefetch: bool) -> dict[int, fx.Node]:
    """Return the node that each all-gather is launched in front of, by index, in the order of
    building.

    With ``prefetch``, all-gather i + 1 is launched right before the wait of i, if it has no earlier
    place.
    """
    places: dict[int, fx.Node] = {}
    # Merges are in the order of their launches; their waits may come in another order.
    for index in sorted(range(len(merges)), key=lambda index: merges[index].first_wait):
        places.setdefault(index, merges[index].first_launch)
        if prefetch and index + 1 < len(merges):
            places.setdefault(index + 1, merges[index].first_wait)
    return places


def _check_writes(
    graph: fx.Graph, gathers: Sequence[list[Merge]], scatters: list[Merge], prefetch: bool
) -> None:
    """Refuse to move a collective across a write to what it sends: it would send other values."""
    written = writes(graph)

    def check(merge: Merge, member: FsdpCollective, moving: list[fx.Node], place: fx.Node) -> None:
        first, last = sorted((place, member.launch))
        for node in moving:
            for read in node.all_input_nodes:
                for writer in written.get(storage_of(read), ()):
                    # An all-gather is built before its place, so a write there is crossed. The
                    # place of a reduce-scatter is a launch, which writes nothing.
                    if first <= writer < last:
                        raise PlanError(
                            f"{writer} writes to {member.parameter}, or its gradient, between "
                            f"{first} and {last}: in bucket {merge.bucket.label!r} its collective "
                            "would cross the write and send other values. Move the write before "
                            "the first or after the last collective of the bucket, or out of the "
                            "graph"
                        )

    for merges in gathers:
        for index, place in _launch_places(merges, prefetch).items():
            for member in merges[index].members:
                check(merges[index], member, [member.launch, *member.chain], place)
    for merge in scatters:
        for member in merge.members:
            check(merge, member, [member.launch], merge.last_launch)


def _check_draws(
    graph: fx.Graph, gathers: Sequence[list[Merge]], scatters: list[Merge], prefetch: bool
) -> None:
    """Refuse to move a draw of a chain, such as a stochastic rounding, across another draw.

    Each would get the other's numbers.
    """
    draws = [node for node in graph.nodes if is_random(node)]
    _check_drawn_shards(draws, gathers, prefetch)
    for merge in scatters:
        for member in merge.members:
            # They follow the wait, which may be deferred up to the output.
            for node in filter(is_random, member.chain):
                for other in draws:
                    if other is not node and member.launch < other:
                        raise _crossing(
                            node,
                            other,
                            merge,
                            member,
                            "Draw for gradients out of the graph, once it has returned them",
                        )


def _check_drawn_shards(
    draws: list[fx.Node], gathers: Sequence[list[Merge]], prefetch: bool
) -> None:
    """Refuse draws of shards that leave the order of all draws; they may move together.

    Those of an all-gather are moved up to its place if they stand behind it, in the order of
    building.
    """
    places: dict[fx.Node, tuple[fx.Node, bool, int]] = {}
    for node in draws:
        places[node] = (node, True, 0)

    moved: dict[fx.Node, tuple[Merge, FsdpCollective]] = {}
    numbers = itertools.count()
    for merges in gathers:
        for index, place in _launch_places(merges, prefetch).items():
            for member in merges[index].members:
                for node in filter(is_random, member.chain):
                    if place < places[node][0]:
                        places[node] = (place, False, next(numbers))
                        moved[node] = (merges[index], member)

    after = sorted(draws, key=places.__getitem__)
    for other, node in zip(draws, after, strict=True):
        if node is not other:
            way = "Draw before the first collective of the bucket, or out of the graph"
            raise _crossing(node, other, *moved[node], way)


def _crossing(
    node: fx.Node, other: fx.Node, merge: Merge, member: FsdpCollective, way: str
) -> PlanError:
    """Return the error for a draw that the collective of its bucket would take across another."""
    return PlanError(
        f"{node} draws random numbers for {member.parameter}, and the collective of bucket "
        f"{merge.bucket.label!r} would take it across {other}, which draws too: each would get "
        f"the other's numbers. {way}"
    )


def _build_all_gathers(merges: list[Merge], prefetch: bool) -> dict[fx.Node, fx.Node]:
    """Build launches and waits; return, for each wait that prefetches, the launch before it."""
    places = _launch_places(merges, prefetch)
    launches: dict[int, fx.Node] = {}
    for index, place in places.items():
        launches[index] = _launch_all_gather(merges[index], place)
    must_follow: dict[fx.Node, fx.Node] = {}
    for index, launch in launches.items():
        wait = _wait_all_gather(merges[index], launch)
        if prefetch and index + 1 in launches:
            must_follow[wait] = launches[index + 1]
    return must_follow


def _launch_all_gather(merge: Merge, anchor: fx.Node) -> fx.Node:
    """Gather the concatenated shards right before ``anchor``; the casts and pads that lead to it
    move along.
    """
    build, like = BucketBuilder(merge, anchor), merge.members[0].launch
    for member in merge.members:
        for node in member.chain:
            if anchor < node:
                anchor.prepend(node)
    if len(merge.members) == 1:
        like.meta.update(build.meta)
        if like is not anchor:
            anchor.prepend(like)
        return like
    # All ranks send equal payloads, so the gathered one has a row for each rank.
    shards = []
    for shard in merge.inputs:
        shards.append(build.reshape(shard, [shard.meta["val"].numel()]))
    payload = build.cat(shards, 0)
    return build.launch(like, payload, payload.meta["val"].numel() * group_size_of(like))


def _wait_all_gather(merge: Merge, launch: fx.Node) -> fx.Node:
    """Wait at the earliest wait of a member, and copy each parameter out of the gathered
    payload.
    """
    build = BucketBuilder(merge, merge.first_wait)
    if len(merge.members) == 1:
        merge.first_wait.meta.update(build.meta)
        return merge.first_wait
    size = group_size_of(launch)
    wait = build.wait(launch)
    # Row r is what rank r sent, so a parameter is a column of the payload.
    rows = build.view(wait, [size, launch.meta["val"].numel() // size])
    columns = build.split(rows, [shard.meta["val"].numel() for shard in merge.inputs], 1)
    for member, column in zip(merge.members, columns, strict=True):
        copied = build.contiguous(column)
        parameter = build.view(copied, list(member.wait.meta["val"].shape))
        member.wait.replace_all_uses_with(parameter)
    return wait


def _build_reduce_scatters(
    graph: fx.Graph, merges: list[Merge], defer: bool
) -> dict[fx.Node, fx.Node]:
    """Build launches, each after the last launch of its members, and waits.

    With ``defer``, a wait stands after the launch of the next reduce-scatter, the last one before
    the output. Returns the launch that each deferred wait must come after.
    """
    must_follow: dict[fx.Node, fx.Node] = {}
    returned: dict[fx.Node, fx.Node] = {}
    waiting: tuple[Merge, fx.Node] | None = None
    for merge in sorted(merges, key=lambda merge: merge.last_launch):
        # A bucket can be reduced once its last gradient is computed.
        anchor = merge.last_launch.next
        launch = _launch_reduce_scatter(merge, anchor)
        if waiting is not None:
            must_follow[_wait_reduce_scatter(*waiting, anchor, returned)] = launch
        if defer:
            waiting = (merge, launch)
        else:
            _wait_reduce_scatter(merge, launch, anchor, returned)
    output = graph.output_node()
    if waiting is not None:
        _wait_reduce_scatter(*waiting, output, returned)
    # All results at once: one by one, each replacement would copy the whole list of gradients.
    output.args = fx.node.map_arg(output.args, lambda node: returned.get(node, node))
    return must_follow


def _launch_reduce_scatter(merge: Merge, anchor: fx.Node) -> fx.Node:
    """Reduce the packed gradients: row r of the payload holds the members' parts for rank r."""
    build, launch = BucketBuilder(merge, anchor), merge.members[0].launch
    if len(merge.members) == 1:
        launch.meta.update(build.meta)
        return launch
    size, rows = group_size_of(launch), []
    for grad in merge.inputs:
        rows.append(build.reshape(grad, [size, grad.meta["val"].numel() // size]))
    payload = build.cat(rows, 1)
    numel = payload.meta["val"].numel()
    return build.launch(launch, build.reshape(payload, [numel]), numel // size)


def _wait_reduce_scatter(
    merge: Merge, launch: fx.Node, anchor: fx.Node, returned: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Wait before ``anchor``, and move what follows the members there; ``returned`` gets results to
    be replaced.
    """
    build = BucketBuilder(merge, anchor)
    first = merge.members[0]
    if len(merge.members) == 1:
        for node in (first.wait, *(first.all_reduce or ())):
            node.meta.update(build.meta)
        _move_before(anchor, (first.wait, *first.chain))
        return first.wait
    wait = reduced = build.wait(launch)
    if first.all_reduce:  # replicas reduce the shards once more, as FSDP2 does in HSDP
        numel = reduced.meta["val"].numel()
        reduced = build.wait(build.launch(first.all_reduce[0], reduced, numel))
    shards = [member.wait.meta["val"] for member in merge.members]
    parts = build.split(reduced, [shard.numel() for shard in shards], 0)
    for member, shard, part in zip(merge.members, shards, parts, strict=True):
        replaced = (member.wait, *(member.all_reduce or ()))
        chain = member.chain[len(replaced) - 1 :]
        view = build.view(part, list(shard.shape))
        if chain:
            replaced[-1].replace_all_uses_with(view)
            _move_before(anchor, chain)
        else:
            returned[replaced[-1]] = view
    return wait


def _move_before(anchor: fx.Node, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        if node is anchor:  # it stands there already, and the others go after it
            anchor = anchor.next
        else:
            anchor.prepend(node)
