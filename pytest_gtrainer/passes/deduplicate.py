"""One all-gather a parameter and direction, in graphs whose tracer gathered at every read (A11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from pytest_gtrainer.graph.collectives import Member, fsdp_all_gathers
from pytest_gtrainer.passes.graph_pass import graph_pass


@graph_pass
def deduplicate_fsdp_unshard_chains_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Let every later reader of a gathered parameter use the first all-gather, in place.

    Only all-gathers of the same parameter, direction, group and dtype are duplicates: a gather
    recomputed in the backward stays. Values stay bit for bit; the gradient contributions still
    have a reduction each, which only a tracer can join (``trace_step(reuse_gathers=True)``).
    Linear in nodes; a graph without duplicates is left as it is.
    """
    first: dict[tuple[Any, ...], Member] = {}
    duplicates = []
    for member in fsdp_all_gathers(gm):
        key = (member.position, member.direction, member.signature)
        if first.setdefault(key, member) is not member:
            duplicates.append((member, first[key]))
    for member, kept in duplicates:
        member.wait.replace_all_uses_with(kept.wait)
        _erase(gm.graph, member)
    return bool(duplicates)


def _erase(graph: fx.Graph, member: Member) -> None:
    """Drop the duplicate and what fed it alone."""
    for node in (member.wait, member.launch, *reversed(member.chain)):
        if not node.users:
            graph.erase_node(node)
