"""Give the tensors of a graph other extents, or its world fewer ranks."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from pytest_gtrainer._torch.values import FakeTensorMode, pytree
from pytest_gtrainer.graphtext import header

Change = Callable[[int], int]
"""Takes an extent and returns another one."""


def sizes_in(gm: fx.GraphModule) -> list[int]:
    """Return the extents of all values of a graph, the largest first."""
    found: set[int] = set()
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor):
                found.update(size for size in value.shape if isinstance(size, int) and size > 1)
    return sorted(found, reverse=True)


def resize(gm: fx.GraphModule, change: Change) -> fx.GraphModule:
    """Change the extents of inputs, and equal numbers in arguments, in place.

    Types of all values are computed anew.

    Raises:
        Exception: whatever an operator raises for extents that do not fit.
    """
    mode = FakeTensorMode()
    inputs = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            inputs.append(_resized(node.meta.get("val"), change, mode))
        elif node.op != "output":
            node.args = map_aggregate(node.args, lambda value: _number(value, change))
            node.kwargs = map_aggregate(node.kwargs, lambda value: _number(value, change))
    gm.recompile()
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = value
    return gm


def _number(value: Any, change: Change) -> Any:
    # A bool is an int for Python.
    return change(value) if type(value) is int else value


def _resized(value: Any, change: Change, mode: FakeTensorMode) -> Any:
    """Return a fake tensor of the changed shape, whose dimensions lie in memory as before."""
    if not isinstance(value, Tensor):
        return value
    # A transposed input stays transposed, as passes read strides.
    order = sorted(range(value.ndim), key=lambda dim: -value.stride(dim))
    shape = [change(size) for size in value.shape]
    with mode:
        made = torch.empty([shape[dim] for dim in order], dtype=value.dtype, device=value.device)
        places = [order.index(dim) for dim in range(value.ndim)]
        return made.permute(places)


def with_ranks(text: str, ranks: int, fewer: int) -> str:
    """Return a text in whose header and groups the world has fewer ranks.

    Groups are changed where they are all ranks; others stay, and cannot be made.
    """
    fields = header.read(text)
    kept = {}
    if "world" in fields:
        kept["world"] = fields["world"].replace(str(ranks), str(fewer))
    if "mesh" in fields:
        kept["mesh"] = re.sub(rf"={ranks}\b", f"={fewer}", fields["mesh"])
    body = header.body(text).replace(f"group(range(0, {ranks}))", f"group(range(0, {fewer}))")
    return "\n".join([*header.write(kept), body])
