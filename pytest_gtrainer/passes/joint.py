"""Bucketing and reordering of FSDP collectives in a joint forward and backward graph, packed as eager FSDP2 packs them.

*Idea.* An all-gather's launch depends on graph inputs only, so it may stand anywhere before its wait. A wait of a
reduce-scatter feeds the output only, so it may stand anywhere behind its launch. Each block is built in its final
place, and no other node moves (E4). *Invariant.* All is checked before the first node is built, so a pass that refuses
leaves the graph as it was (D11). *Cost.* Linear in nodes; one recompile. *Source.* torchtitan's graph_trainer pass of
the same name (pull requests 2934, 3590); payload order (D2, D3) and coverage (B6) are stricter.
"""

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
)
from pytest_gtrainer.graph.nodes import BACKWARD, FORWARD, node_fqn, storage_of, writes
from pytest_gtrainer.graph.nodes import direction as direction_of
from pytest_gtrainer.passes.graph_pass import graph_pass

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Merge:
    """Members that travel together, in payload order."""

    bucket: Bucket
    direction: str
    members: tuple[FsdpCollective, ...]
    first_launch: (
        fx.Node
    )  # where its blocks belong by default (D5); of the backward's first a node further ahead (E8)
    last_launch: fx.Node
    first_wait: fx.Node

    @property
    def inputs(self) -> list[fx.Node]:
        """What the members send: shards of parameters, or gradients."""
        return [member.launch.all_input_nodes[0] for member in self.members]


class BucketBuilder:
    """Creates a bucket's nodes in front of an anchor, with ``val``, ``fsdp_bucket`` and the backward's mark (D8)."""

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
        """A view where strides allow, else a contiguous copy."""
        val = node.meta["val"]
        is_so = list(val.shape) == shape and val.is_contiguous()
        return (
            node
            if is_so
            else self.call(aten.reshape.default, (node, shape), value_like(val, shape))
        )

    def cat(self, nodes: list[fx.Node], dim: int) -> fx.Node:
        shape = list(nodes[0].meta["val"].shape)
        shape[dim] = sum(node.meta["val"].shape[dim] for node in nodes)
        return self.call(
            aten.cat.default,
            (nodes, dim) if dim else (nodes,),
            value_like(nodes[0].meta["val"], shape),
        )

    def launch(self, like: fx.Node, payload: fx.Node, numel: int) -> fx.Node:
        """The collective ``like``, on a flat payload, giving ``numel`` elements."""
        return self.call(
            like.target, (payload, *like.args[1:]), value_like(payload.meta["val"], [numel])
        )

    def wait(self, launch: fx.Node) -> fx.Node:
        return self.call(WAIT, (launch,), launch.meta["val"])

    def split(self, node: fx.Node, sizes: list[int], dim: int) -> list[fx.Node]:
        parts = values_of_split(node.meta["val"], sizes, dim)
        split = self.call(
            aten.split_with_sizes.default, (node, sizes, dim) if dim else (node, sizes), parts
        )
        return [
            self.call(operator.getitem, (split, index), part) for index, part in enumerate(parts)
        ]

    def contiguous(self, node: fx.Node) -> fx.Node:
        """A copy, also where a strided view would do: a strided operand changes the bits of a later sum (D13)."""
        value = value_like(node.meta["val"], node.meta["val"].shape)
        return self.call(
            aten.clone.default, (node,), value, {"memory_format": torch.contiguous_format}
        )

    def view(self, node: fx.Node, shape: list[int]) -> fx.Node:
        val = node.meta["val"]
        return (
            node
            if list(val.shape) == shape
            else self.call(aten.view.default, (node, shape), value_like(val, shape))
        )


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

    Requires a joint graph whose nodes have the metadata of ``tracing.step``. Ensures that the graph lints, and computes
    the same values if reductions do not depend on the offset. Run on its own output, it changes nothing.

    Args:
        bucket_plan: module FQNs, see ``get_default_transformer_block_buckets``.
        payload_order: "managed" packs as eager FSDP2; "registration", "execution" or a list of parameter FQNs pack in
            another order, to show that the order matters.
        reorder: prefetch all-gathers and defer waits of reduce-scatters.
        insert_overlap_deps: add control dependencies that keep this order in Inductor's scheduler.
        require_buckets: refuse a graph without collectives of FSDP; by default it stays, and the summary counts it.

    Raises:
        PlanError: the plan does not fit the graph; the graph is untouched.
    """
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
    """The same for a forward graph, or a backward graph, of its own, in place.

    Args:
        direction: "fwd" or "bwd", whose graph it is; nodes need no mark of the backward.
        bucket_plan, payload_order, reorder, insert_overlap_deps, require_buckets: as for the joint graph.

    Raises:
        PlanError: as for the joint graph, or the graph is a joint one.
    """
    if direction not in (FORWARD, BACKWARD):
        raise ValueError(f"direction={direction!r}: expected {FORWARD!r} or {BACKWARD!r}")
    if direction == FORWARD and any(direction_of(node) == BACKWARD for node in gm.graph.nodes):
        wrong = "the graph has nodes of the backward"
        raise PlanError(
            f"{wrong}: for a joint graph use joint_transformer_block_bucketing_reordering_pass"
        )
    return _bucket(
        gm, bucket_plan, payload_order, reorder, insert_overlap_deps, require_buckets, direction
    )


def _bucket(
    gm: fx.GraphModule,
    bucket_plan: BucketPlan,
    order: PayloadOrder,
    reorder: bool,
    dependencies: bool,
    require_buckets: bool,
    direction: str | None = None,
) -> bool:
    """Plan and check all, then build. ``direction`` is that of all nodes; None where each says its own."""
    plan = Plan(bucket_plan)
    if any("fsdp_bucket" in node.meta and is_control_dependency(node) for node in gm.graph.nodes):
        return False  # E7: the waits of this pass, wrapped
    gathers, scatters = fsdp_all_gathers(gm), fsdp_reduce_scatters(gm)
    members = [*gathers, *scatters]
    if _is_done(gm, members, require_buckets):
        return False
    _check_plan(plan, gm, gathers, scatters)
    for member in members:  # what building needs is there, so that nothing fails half way (D11)
        nodes = (member.launch.args[0], member.launch, member.wait)
        if not all(
            isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
            for node in nodes
        ):
            raise PlanError(
                f'the collective of {member.parameter} lacks meta["val"]: trace on fake tensors'
            )
    gathering = _merges(gm, plan, gathers, order, direction)
    scattering = _merges(gm, plan, scatters, order, direction)
    if reorder:
        gathering = _with_the_backwards_first_ahead(gm, plan, gathering, direction)
    forward, backward = (
        [merge for merge in gathering if merge.direction == way] for way in (FORWARD, BACKWARD)
    )
    _check_writes(gm.graph, (forward, backward), scattering, reorder)
    behind = _build_all_gathers(forward, reorder) | _build_all_gathers(backward, reorder)
    behind |= _build_reduce_scatters(gm.graph, scattering, reorder)
    for member in (
        m for merge in (*gathering, *scattering) if len(merge.members) > 1 for m in merge.members
    ):
        for node in reversed((member.launch, member.wait, *(member.all_reduce or ()))):
            gm.graph.erase_node(node)
    if dependencies:
        add_control_dependencies(gm.graph, behind)
    return True


def _is_done(gm: fx.GraphModule, members: Sequence[FsdpCollective], require_buckets: bool) -> bool:
    """Whether there is nothing left to bucket: no collective of FSDP at all (E6), or none without its bucket (E7)."""
    if not members and not any("fsdp_bucket" in node.meta for node in gm.graph.nodes):
        facts.emit(
            "idle", what="bucketing: no collective of FSDP in the graph: was data_parallel applied?"
        )
        if require_buckets:
            raise PlanError(
                "the graph has no collective of FSDP to bucket: was data_parallel(model, mesh) applied?"
            )
    marked = ["fsdp_bucket" in member.launch.meta for member in members]
    if all(marked):
        return True
    if any(marked):
        raise PlanError("the graph is bucketed in part: run the pass once, on the graph as traced")
    if foreign := [node for node in gm.graph.nodes if is_bucketed_by_torch(node)]:
        wrong = f"the graph is bucketed already, by another pass ({foreign[0]})"
        raise PlanError(f"{wrong}: run this one on the graph as traced, or leave it out")
    return False


def _check_plan(
    plan: Plan, gm: fx.GraphModule, gathers: list[FsdpCollective], scatters: list[FsdpCollective]
) -> None:
    """Names exist (B5), and every sharded parameter is in exactly one bucket per direction (B6)."""
    plan.check_names(
        {node_fqn(node) for node in gm.graph.nodes} | {member.parameter for member in gathers}
    )
    plan.check_ties(gm.graph.output_node().meta.get("gt_tied", {}))
    twice = "trace with reuse_gathers=True, or run deduplicate_fsdp_unshard_chains_pass first"
    added = (
        "trace with reuse_gathers=True, so that its contributions are added before they are reduced"
    )
    for kind, members, advice in (
        ("all-gather", gathers, twice),
        ("reduce-scatter", scatters, added),
    ):
        if lost := [m for m in members if plan.bucket_of(m.bucket_fqn) is None]:
            where = sorted({m.bucket_fqn or "the root" for m in lost})
            modules = sorted({f'"{layer_of(m.bucket_fqn) or m.bucket_fqn}"' for m in lost})
            raise PlanError(
                f"the bucket plan covers no {kind} of {', '.join(m.parameter for m in lost)} (read in "
                f"{', '.join(where)}): add {', '.join(modules)} to the plan"
            )
        seen: dict[tuple[int, str], FsdpCollective] = {}
        for member in members:
            first = seen.setdefault((member.position, member.direction), member)
            if first is not member:
                raise PlanError(_twice(plan, kind, first, member, advice))


def _twice(
    plan: Plan, kind: str, first: FsdpCollective, second: FsdpCollective, advice: str
) -> str:
    """Why a parameter has two collectives, as far as the graph tells: a second read, another kind of gather, a tie."""
    told = f"{first.parameter} has more than one {kind} in the {first.direction} direction: "
    if kind == "reduce-scatter":
        return told + advice
    source = next(
        node for node in (*first.chain, first.launch)[0].all_input_nodes if node.op == "placeholder"
    )
    foreign = (
        f"if {source} is no parameter (a gathered activation, sequence or tensor parallelism), say so: "
        f"{source}.meta['gt_input'] = {{'kind': 'input', 'fqn': {source.name!r}}}"
    )
    where = [
        f"{m.launch} in {m.bucket_fqn or 'the root'} over {group_of(m.launch)}"
        for m in (first, second)
    ]
    if group_of(first.launch) != group_of(second.launch):
        return f"{told}{' and '.join(where)}, in two groups, of which FSDP's is one; {foreign}"
    buckets = [plan.bucket_of(member.bucket_fqn) for member in (first, second)]
    if buckets[0] is not buckets[1]:
        labels = " and ".join(bucket.label for bucket in buckets if bucket)
        return f"{told}{advice}; if it is shared/tied, place its modules in the same bucket, they are in {labels}"
    return told + advice if "gt_input" in source.meta else f"{told}{advice}; {foreign}"


def _merges(
    gm: fx.GraphModule,
    plan: Plan,
    members: list[FsdpCollective],
    order: PayloadOrder,
    direction: str | None,
) -> list[Merge]:
    """Group members of one kind by bucket, direction and signature (D1), in order of their first launch."""
    place = {node: index for index, node in enumerate(gm.graph.nodes)}
    parameters = [
        member.parameter for member in sorted(members, key=lambda member: member.position)
    ]
    managed = gm.graph.output_node().meta.get("gt_managed_order")
    key = sort_key(order, parameters, lambda member: place[member.launch], managed)
    groups: dict[tuple[Any, ...], list[FsdpCollective]] = {}
    for member in members:
        bucket = plan.bucket_of(member.bucket_fqn)
        groups.setdefault((bucket, direction or member.direction, member.signature), []).append(
            member
        )
    merges = []
    for (bucket, way, _), group in groups.items():
        ordered = tuple(sorted(group, key=lambda member: key(bucket, member)))
        merges.append(
            Merge(
                bucket, way, ordered, group[0].launch, group[-1].launch, min(m.wait for m in group)
            )
        )
    return merges


def _with_the_backwards_first_ahead(
    gm: fx.GraphModule, plan: Plan, merges: list[Merge], direction: str | None
) -> list[Merge]:
    """Launch the backward's first all-gather right behind the loss's own backward, as FSDP2's hook does (E8)."""
    first = min(
        (merge for merge in merges if merge.direction == BACKWARD),
        key=lambda m: m.first_wait,
        default=None,
    )
    if first is None:
        return merges
    # some ranks pad and others do not: what leads to an all-gather marks no place (D14)
    moving = {
        node for merge in merges for m in merge.members for node in (*m.chain, m.launch, m.wait)
    }
    for node in gm.graph.nodes:
        if node is first.first_launch:
            break
        fqn, is_backward = node_fqn(node), BACKWARD in (direction, direction_of(node))
        bucket = (
            plan.bucket_of(fqn)
            if is_backward and node.op == "call_function" and node not in moving
            else None
        )
        if bucket is not None and (
            fqn != LOSS or LOSS in bucket.fqns
        ):  # the root's bucket is not the loss's
            return [
                replace(merge, first_launch=node) if merge is first else merge for merge in merges
            ]
    return merges


def _launch_places(merges: list[Merge], prefetch: bool) -> dict[int, fx.Node]:
    """The node that each launch goes in front of; with ``prefetch``, launch i + 1 right before wait i (E1)."""
    places: dict[int, fx.Node] = {}
    for index in sorted(
        range(len(merges)), key=lambda index: merges[index].first_wait
    ):  # launches may stand otherwise
        places.setdefault(index, merges[index].first_launch)
        if prefetch and index + 1 < len(merges):
            places.setdefault(index + 1, merges[index].first_wait)
    return places


def _check_writes(
    graph: fx.Graph, gathers: Sequence[list[Merge]], scatters: list[Merge], prefetch: bool
) -> None:
    """No collective may cross a write to what it sends: it would send other values."""
    written = writes(graph)
    moves = [
        (m, (m.launch, *m.chain), merges[index], place)
        for merges in gathers
        for index, place in _launch_places(merges, prefetch).items()
        for m in merges[index].members
    ]
    moves += [
        (m, (m.launch,), merge, merge.last_launch) for merge in scatters for m in merge.members
    ]
    for member, moving, merge, place in moves:
        memory = dict.fromkeys(storage_of(read) for node in moving for read in node.all_input_nodes)
        first, last = sorted((place, member.launch))
        for writer in (writer for storage in memory for writer in written.get(storage, ())):
            if first <= writer < last:  # the collective is built in front of its place
                raise PlanError(
                    f"{writer} writes to {member.parameter}, or its gradient, between {first} and {last}: in bucket "
                    f"{merge.bucket.label!r} its collective would cross the write and send other values. Move the "
                    "write before the first or behind the last collective of the bucket, or out of the graph"
                )


def _build_all_gathers(merges: list[Merge], prefetch: bool) -> dict[fx.Node, fx.Node]:
    """Build launch and wait blocks. Returns which wait stands behind which launch of another."""
    places = _launch_places(merges, prefetch)
    launches = {index: _launch_all_gather(merges[index], place) for index, place in places.items()}
    waits = {index: _wait_all_gather(merges[index], launch) for index, launch in launches.items()}
    return {
        wait: launches[index + 1]
        for index, wait in waits.items()
        if prefetch and index + 1 in launches
    }


def _launch_all_gather(merge: Merge, anchor: fx.Node) -> fx.Node:
    """Flat concatenation of the members' shards, gathered, right before ``anchor``; their chains move along (D14)."""
    build, like = BucketBuilder(merge, anchor), merge.members[0].launch
    for node in (node for member in merge.members for node in member.chain if anchor < node):
        anchor.prepend(node)
    if len(merge.members) == 1:
        like.meta.update(build.meta)
        if like is not anchor:
            anchor.prepend(like)
        return like
    payload = build.cat(
        [build.reshape(shard, [shard.meta["val"].numel()]) for shard in merge.inputs], 0
    )
    return build.launch(like, payload, payload.meta["val"].numel() * group_size_of(like))


def _wait_all_gather(merge: Merge, launch: fx.Node) -> fx.Node:
    """Copy each parameter out of the gathered payload, contiguous, at the earliest member wait (D13)."""
    build = BucketBuilder(merge, merge.first_wait)
    if len(merge.members) == 1:
        merge.first_wait.meta.update(build.meta)
        return merge.first_wait
    size = group_size_of(launch)
    wait = build.wait(launch)
    rows = build.view(wait, [size, launch.meta["val"].numel() // size])
    columns = build.split(rows, [shard.meta["val"].numel() for shard in merge.inputs], 1)
    for member, column in zip(merge.members, columns, strict=True):
        member.wait.replace_all_uses_with(
            build.view(build.contiguous(column), list(member.wait.meta["val"].shape))
        )
    return wait


def _build_reduce_scatters(
    graph: fx.Graph, merges: list[Merge], defer: bool
) -> dict[fx.Node, fx.Node]:
    """Build launch blocks, row r for rank r (D4); returns, with ``defer``, waits and launches they follow (E2)."""
    behind: dict[fx.Node, fx.Node] = {}
    returned: dict[fx.Node, fx.Node] = {}
    waiting: tuple[Merge, fx.Node] | None = None
    for merge in sorted(merges, key=lambda merge: merge.last_launch):
        anchor = merge.last_launch.next
        build, launch = BucketBuilder(merge, anchor), merge.members[0].launch
        if len(merge.members) == 1:
            launch.meta.update(build.meta)
        else:
            size = group_size_of(launch)
            rows = [
                build.reshape(grad, [size, grad.meta["val"].numel() // size])
                for grad in merge.inputs
            ]
            payload = build.cat(rows, 1)
            numel = payload.meta["val"].numel()
            launch = build.launch(launch, build.reshape(payload, [numel]), numel // size)
        if waiting is not None:
            behind[_wait_reduce_scatter(*waiting, anchor, returned)] = launch
        waiting = (merge, launch)
        if not defer:
            _wait_reduce_scatter(*waiting, anchor, returned)
            waiting = None
    output = graph.output_node()
    if waiting is not None:
        _wait_reduce_scatter(*waiting, output, returned)
    # all results at once: one by one each would copy the whole list of gradients
    output.args = fx.node.map_arg(output.args, lambda node: returned.get(node, node))
    return behind


def _wait_reduce_scatter(
    merge: Merge, launch: fx.Node, anchor: fx.Node, returned: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Views of the reduced payload and the members' chains before ``anchor``; ``returned`` gets the new outputs."""
    build = BucketBuilder(merge, anchor)
    first = merge.members[0]
    if len(merge.members) == 1:
        for node in (first.wait, *(first.all_reduce or ())):
            node.meta.update(build.meta)
        _move_before(anchor, (first.wait, *first.chain))
        return first.wait
    shards = [member.wait.meta["val"] for member in merge.members]
    wait = reduced = build.wait(launch)
    if first.all_reduce:
        reduced = build.wait(
            build.launch(first.all_reduce[0], reduced, reduced.meta["val"].numel())
        )
    parts = build.split(reduced, [shard.numel() for shard in shards], 0)
    for member, shard, part in zip(merge.members, shards, parts, strict=True):
        own = member.all_reduce or ()
        result, chain = own[-1] if own else member.wait, member.chain[len(own) :]
        view = build.view(part, list(shard.shape))
        if chain:
            result.replace_all_uses_with(view)
            _move_before(anchor, chain)
        else:
            returned[result] = view
    return wait


def _move_before(anchor: fx.Node, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        if node is anchor:  # it stands there already, and the others go behind it
            anchor = anchor.next
        else:
            anchor.prepend(node)
