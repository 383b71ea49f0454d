"""All-gathers of parameters get a process group of their own, so that they overlap reduce-scatters.

Collectives of one group run one after the other; a prefetched all-gather would wait for the
reduce-scatter that was issued before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from pytest_gtrainer._torch.passes import extra_group, group_ranks, is_extra_group
from pytest_gtrainer.graph.bucket_plan import PlanError
from pytest_gtrainer.graph.collectives import Member, fsdp_all_gathers, group_of
from pytest_gtrainer.passes.graph_pass import graph_pass


@graph_pass
def reassign_collective_pgs_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Move FSDP's all-gathers to an extra process group with the same ranks, in place (F1).

    Each group that carries such an all-gather has one extra group, made at the first call in a world
    and gone with it (F4). Reduce-scatters stay, and so do all-gathers that are not FSDP's though
    they share the group (F2). The number of nodes does not change. Run it before bucketing, so that
    the buckets are in the new group (F3), and on every rank of the groups: making one is collective.

    Raises:
        PlanError: the graph is bucketed already.
    """
    members = [member for member in fsdp_all_gathers(gm) if not is_extra_group(group_of(member.launch))]
    _check_not_bucketed(members)
    # made in one order on all ranks, by ranks and then as the graph has them, or groups that overlap would wait
    # for each other
    sources = sorted(dict.fromkeys(group_of(member.launch) for member in members), key=group_ranks)
    extras = {name: extra_group(name) for name in sources}
    for member in members:
        launch = member.launch
        launch.args = (*launch.args[:-1], extras[group_of(launch)])
    return bool(members)


def _check_not_bucketed(members: list[Member]) -> None:
    bucketed = [member.parameter for member in members if "fsdp_bucket" in member.launch.meta]
    if bucketed:
        raise PlanError(
            f"the all-gather of {', '.join(bucketed)} is in a bucket: reassign process groups before bucketing"
        )
