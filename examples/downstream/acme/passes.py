"""A graph pass of our own: averages as sums and a division, for a backend that has no averages."""

from __future__ import annotations

import torch
from torch import fx

_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


def sum_and_divide_pass(
    gm: fx.GraphModule, example_inputs: object = None, *, divide_first: bool = False
) -> fx.GraphModule:
    """Replace each reduce-scatter that averages by one that sums, and a division by the number of
    ranks.

    Args:
        divide_first: the bug. Dividing what goes in is the same on paper and, where the number of
            ranks is a power of two, in bits; on three ranks every summand is rounded once more.
    """
    for launch in gm.graph.find_nodes(op="call_function", target=_SCATTER):
        payload, op, ranks, group = launch.args
        if op != "avg":
            continue
        if divide_first:
            with gm.graph.inserting_before(launch):
                divided = _division(gm, payload, ranks, launch)
            launch.args = (divided, "sum", ranks, group)
        else:
            launch.args = (payload, "sum", ranks, group)
            (wait,) = launch.users
            with gm.graph.inserting_after(wait):
                divided = _division(gm, wait, ranks, launch)
            wait.replace_all_uses_with(
                divided, delete_user_cb=lambda user, divided=divided: user is not divided
            )
    gm.recompile()
    return gm


def _division(gm: fx.GraphModule, value: fx.Node, ranks: int, like: fx.Node) -> fx.Node:
    divided = gm.graph.call_function(torch.ops.aten.div.Tensor, (value, ranks))
    divided.meta = {**like.meta, "val": value.meta["val"]}
    return divided
