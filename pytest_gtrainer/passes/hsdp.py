"""Hybrid sharding: reduce-scatter inside a shard group first, then all-reduce between the replicas.

DTensor reduces a gradient over a (replicate, shard) mesh dimension by dimension: it all-reduces the
whole gradient between replicas and then scatters it. FSDP2 scatters first and all-reduces what is
left, a shard. The sums are the same terms in another association, so the bits differ; and DTensor
sends as many times more as a shard group has ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import ALL_REDUCE
from pytest_gtrainer.graph.bucket_plan import PlanError
from pytest_gtrainer.graph.collectives import Member, fsdp_reduce_scatters, is_wait, only_wait
from pytest_gtrainer.passes.graph_pass import graph_pass

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


@dataclass(frozen=True, slots=True)
class _Swap:
    """A gradient's all-reduce and its wait, to go behind the reduce-scatter of ``member``, with their value there."""

    member: Member
    launch: fx.Node
    wait: fx.Node
    value: torch.Tensor


@graph_pass
def reduce_scatter_before_all_reduce_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Swap ``all_reduce`` then ``reduce_scatter`` of a gradient, as FSDP2 has them, in place (D16).

    What lies between the two, the padding of uneven shards, stays where it is: its zeros average to
    zeros. The number of nodes does not change; a gradient that is not all-reduced is left alone. Run
    it before bucketing, which then packs both.

    Raises:
        PlanError: an all-reduced gradient is read by something else than its reduce-scatter, or the graph
            lacks values.
    """
    swaps = [swap for member in fsdp_reduce_scatters(gm) if (swap := _swap_of(member)) is not None]
    for swap in swaps:
        _apply(swap)
    return bool(swaps)


def _swap_of(member: Member) -> _Swap | None:
    """The all-reduce above a reduce-scatter; None if there is none."""
    between, waits = _up_to_waits(member.launch)
    launch = waits[0].args[0] if len(waits) == 1 else None
    if not isinstance(launch, fx.Node) or launch.target is not ALL_REDUCE:
        return None
    known = {*between, member.launch}
    others = [user for node in (*between, waits[0]) for user in node.users if user not in known]
    if others or only_wait(launch) is None:
        raise PlanError(
            f"the all-reduced gradient of {member.parameter} is read by {others[0] if others else launch} too, so its "
            "reduce-scatter cannot come first"
        )
    return _Swap(member, launch, waits[0], member.value)


def _up_to_waits(launch: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes above ``launch`` up to results of collectives, and these; no results where something else flows in.

    Between the two collectives lies a pad at most: a handful of nodes. Elsewhere the walk would climb the
    whole backward, so it ends at the first node that is none of those that DTensor pads with.
    """
    between: dict[fx.Node, None] = {}
    waits: dict[fx.Node, None] = {}
    todo = list(launch.all_input_nodes)
    while todo:
        node = todo.pop()
        if is_wait(node):
            waits[node] = None
        elif node.target in _PADDING:
            between[node] = None
            todo += [source for source in node.all_input_nodes if source not in between]
        else:
            return list(between), []
    return list(between), list(waits)


def _apply(swap: _Swap) -> None:
    """Take the two nodes of the all-reduce out above the reduce-scatter and put them in below its wait."""
    below = swap.member.wait
    gradient = swap.launch.args[0]
    swap.wait.replace_all_uses_with(gradient)
    below.replace_all_uses_with(swap.wait)
    swap.launch.replace_input_with(gradient, below)
    below.append(swap.launch)
    swap.launch.append(swap.wait)
    for node in (swap.launch, swap.wait):
        node.meta["val"] = swap.value
