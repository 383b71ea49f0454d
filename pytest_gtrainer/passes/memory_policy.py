"""What the backward shall find in memory: tags that a later pass acts upon.

A tag is ``meta["recompute"]``, a ``torch.utils.checkpoint.CheckpointPolicy``, as activation
checkpointing writes it; ``selective_activation_remat_pass`` reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from pytest_gtrainer._torch.passes import is_view
from pytest_gtrainer.graph.collectives import Member, fsdp_all_gathers
from pytest_gtrainer.graph.conventions import FORWARD, direction
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
    """Tag gathered parameters as to be recomputed, so that the backward gathers them again, in place.

    Tagged are the forward's all-gathers of parameters, what lies between shard and all-gather, the waits,
    and views of the results, which would otherwise keep the whole parameter in memory. A tag that is
    there stays. Nothing else changes; run ``selective_activation_remat_pass`` behind it.

    Args:
        reshard_after_forward: False tags nothing.
        keep_unsharded: FQNs of modules whose parameters stay gathered, as FSDP2's root and a trainer's
            last bucket do.

    Raises:
        ValueError: ``keep_unsharded`` names what has no all-gathers.
    """
    if not reshard_after_forward:
        return False
    keep_unsharded = [keep_unsharded] if isinstance(keep_unsharded, str) else keep_unsharded
    members = [member for member in fsdp_all_gathers(gm) if member.direction == FORWARD]
    kept = {fqn: [member for member in members if _is_below(member, fqn)] for fqn in keep_unsharded}
    empty = [fqn for fqn, found in kept.items() if not found]
    if empty:
        raise ValueError(f"keep_unsharded names {', '.join(map(repr, empty))}, of which no parameter is gathered")
    stay = {member.launch for found in kept.values() for member in found}
    for member in members:
        if member.launch not in stay:
            for node in (*member.chain, member.launch, member.wait, *_views_of(member.wait)):
                node.meta.setdefault(RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
    return False


def _is_below(member: Member, fqn: str) -> bool:
    return member.parameter == fqn or member.parameter.startswith(f"{fqn}.")


def _views_of(node: fx.Node) -> Iterable[fx.Node]:
    """The forward's views of a value, views of these, and parts of them."""
    for user in node.users:
        if direction(user) == FORWARD and (is_view(user.target) or user.target is operator.getitem):
            yield user
            yield from _views_of(user)
