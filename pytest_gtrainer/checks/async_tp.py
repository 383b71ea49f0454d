"""What asynchronous tensor parallelism would fuse in a graph, as torch's own pass decides, without a GPU."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch.passes import fused_by_async_tp
from pytest_gtrainer.graph.collectives import group_of, kind_of, launches
from pytest_gtrainer.graph.nodes import direction, node_fqn

aten = torch.ops.aten


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
        return f"{self.direction} {self.kind} of {self.fqn}" + (f" + {', '.join(names)}" if names else ", not fused")


def async_tp_decisions(gm: fx.GraphModule, mesh: DeviceMesh) -> list[AsyncTpDecision]:
    """What torch's ``micro_pipeline_tp`` would fuse: each all-gather and reduce-scatter of ``mesh``, in graph order.

    An all-gather is fused with the products that read it on their left, a reduce-scatter with the product that it
    reduces. The graph is left as it was; the pass runs on a copy with views as Inductor has them, and takes the group
    to be one with symmetric memory. How fast the fused operators are, a GPU alone can tell.

    Args:
        gm: of ``trace_step``, ``trace_stage``, or one that ``torch.compile`` made: flat, with values in its metadata.
        mesh: the 1-D mesh of tensor parallelism, ``mesh["tp"]``.

    Raises:
        ValueError: the mesh has more dimensions, or the graph no such collective.
    """
    if mesh.ndim != 1:
        raise ValueError(f"{mesh} has {mesh.ndim} dimensions: give the one of tensor parallelism, mesh['tp']")
    group = mesh.get_group().group_name
    found = [node for node in gm.graph.nodes if launches(node.target) and group_of(node) == group]
    if not (found := [node for node in found if kind_of(node) in ("all_gather", "reduce_scatter")]):
        raise ValueError(f"the graph has no all-gather and no reduce-scatter over {mesh}: nothing could be fused")
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
            direction(node), kind_of(node), node_fqn(node), tuple(by_name[name] for name in fused.get(node.name, ()))
        )
        for node in found
    ]
