"""Small builder of graph nodes with fake values and bucket metadata."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import WAIT, value_like, values_of_split

aten = torch.ops.aten


class BucketBuilder:
    """Creates the nodes of one bucket's collective in front of an anchor.

    Every node gets its ``val``, ``meta["fsdp_bucket"]``, and the backward's mark (D8).
    """

    def __init__(self, graph: fx.Graph, plan_fqns: tuple[str, ...], direction: str) -> None:
        self.graph = graph
        self._meta: dict[str, Any] = {"fsdp_bucket": {"plan_fqns": list(plan_fqns), "direction": direction}}
        if direction == "bwd":
            self._meta["autograd_backward"] = True
        self.anchor: fx.Node | None = None

    def before(self, anchor: fx.Node) -> BucketBuilder:
        """Create the next nodes right before ``anchor``."""
        self.anchor = anchor
        return self

    def mark(self, node: fx.Node) -> None:
        """Make an existing node part of the bucket."""
        node.meta.update(self._meta)

    def call(self, target: Any, args: tuple[Any, ...], val: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A node in front of the anchor, whose fake value is ``val``."""
        assert self.anchor is not None
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self._meta, val=val)
        return node

    def reshape(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """A view where strides allow, else a contiguous copy."""
        val = node.meta["val"]
        if list(val.shape) == shape and val.is_contiguous():
            return node
        return self.call(aten.reshape.default, (node, shape), value_like(val, shape))

    def cat(self, nodes: list[fx.Node], dim: int) -> fx.Node:
        """The nodes one behind the other along ``dim``; a single one as it is."""
        if len(nodes) == 1:
            return nodes[0]
        shape = list(nodes[0].meta["val"].shape)
        shape[dim] = sum(node.meta["val"].shape[dim] for node in nodes)
        val = value_like(nodes[0].meta["val"], shape)
        return self.call(aten.cat.default, (nodes, dim) if dim else (nodes,), val)

    def launch(self, like: fx.Node, payload: fx.Node, numel: int) -> fx.Node:
        """The collective ``like``, on a flat payload, giving ``numel`` elements."""
        return self.call(like.target, (payload, *like.args[1:]), value_like(payload.meta["val"], [numel]))

    def wait(self, launch: fx.Node) -> fx.Node:
        return self.call(WAIT, (launch,), launch.meta["val"])

    def split(self, node: fx.Node, sizes: list[int], dim: int) -> list[fx.Node]:
        """Views of ``node``, ``sizes`` wide along ``dim``."""
        parts = values_of_split(node.meta["val"], sizes, dim)
        split = self.call(aten.split_with_sizes.default, (node, sizes, dim) if dim else (node, sizes), parts)
        return [self.call(operator.getitem, (split, index), part) for index, part in enumerate(parts)]

    def contiguous(self, node: fx.Node) -> fx.Node:
        """A copy, also where a strided view would do: a strided operand changes the bits of a later sum (D13)."""
        val = node.meta["val"]
        kwargs = {"memory_format": torch.contiguous_format}
        return self.call(aten.clone.default, (node,), value_like(val, val.shape), kwargs)

    def view(self, node: fx.Node, shape: list[int]) -> fx.Node:
        val = node.meta["val"]
        return node if list(val.shape) == shape else self.call(aten.view.default, (node, shape), value_like(val, shape))
