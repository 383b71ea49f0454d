"""Two graphs of one step, aligned node for node; what differs depends on the chunk dimension.

*Idea.* The full graph is the step at extent B, the part the step at B/N. If Python ran the same operators
in both, they correspond by position. A value whose extents differ carries the chunk dimension, and the
dimension that differs is where; a literal that differs (``arange(B)``, ``/ B``, a size) is one that each
chunk has of its own. The body of a chunk takes its arguments and metadata from the part.
*Invariant.* Operators and operands correspond everywhere; else the step depends on the extent and is
refused (G18). *Cost.* Linear in nodes, a few microseconds each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pytest_gtrainer.passes.chunking.config import ChunkError, described


class Twins:
    """The full graph and its part.

    Attributes:
        full, part: the graphs, at extent B and at B/N.
        part_of: for each node of the full graph its twin; ``full_of`` the other way round.
        num_chunks: N.
    """

    def __init__(self, full: fx.GraphModule, part: fx.GraphModule, num_chunks: int) -> None:
        self.full, self.part, self.num_chunks = full, part, num_chunks
        self.part_of = dict(aligned(full, part))
        self.full_of = {part: full for full, part in self.part_of.items()}
        self._differs = {node for node, twin in self.part_of.items() if _differ(full, node, part, twin)}
        self._dims: dict[fx.Node, list[int]] = {}
        for node in self._differs:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and (dims := _differing_dims(value, self.part_of[node].meta["val"])):
                self._dims[node] = dims

    def differs(self, node: fx.Node) -> bool:
        """Whether the node's own extents, literals or constant depend on the chunk dimension."""
        return node in self._differs

    def carries(self, node: fx.Node) -> bool:
        """Whether a tensor's extents, as far as they are known, depend on the chunk dimension."""
        return node in self._dims

    def differing_dims(self, node: fx.Node) -> list[int]:
        """The dimensions of a tensor whose known extents differ; none of anything else."""
        return self._dims.get(node, [])

    def has_unknown_extent(self, node: fx.Node) -> bool:
        """Whether an extent is known only at run time."""
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and any(isinstance(extent, torch.SymInt) for extent in value.shape)

    def dim(self, node: fx.Node) -> int | None:
        """The dimension along which the full tensor is the chunks' tensors one behind the other; None without one.

        Raises:
            ChunkError: several dimensions differ, or the extents are not N to 1.
        """
        if not self.carries(node):
            return None
        value, part = node.meta["val"], self.part_of[node].meta["val"]
        dims = self._dims[node]
        if len(dims) > 1 or value.shape[dims[0]] != self.num_chunks * part.shape[dims[0]]:
            raise ChunkError(
                f"{described(node)} is {list(part.shape)} for one chunk of {self.num_chunks}: it can neither be cut "
                "into chunks nor joined from them; keep it inside the chunked module"
            )
        return dims[0]

def constant(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What a ``get_attr`` node names."""
    found: Any = gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def aligned(full: fx.GraphModule, part: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes of the two graphs in pairs.

    Raises:
        ChunkError: a pair differs in its operator, or in whose results it reads (G18).
    """
    known: dict[fx.Node | None, fx.Node | None] = {}
    for node, twin in itertools.zip_longest(full.graph.nodes, part.graph.nodes):
        same = node is not None and twin is not None and node.op == twin.op
        same = same and (node.op != "call_function" or node.target == twin.target)
        if not same or [known.get(source) for source in node.all_input_nodes] != twin.all_input_nodes:
            ours, theirs = (described(one) if one is not None else "nothing" for one in (node, twin))
            raise ChunkError(
                "the operators of the step depend on the chunk dimension's extent. The first that differ: at full "
                f"extent {ours}, at the extent of one chunk {theirs}. Leave loops over that dimension and branches on "
                "its extent (an extent of 1 included) out of the model"
            )
        known[node] = twin
        yield node, twin


def _differ(full: fx.GraphModule, node: fx.Node, part: fx.GraphModule, twin: fx.Node) -> bool:
    """Whether two nodes that correspond differ in the extents of their values, in a literal, or in a constant."""
    if _extents_differ(node.meta.get("val"), twin.meta.get("val")):
        return True
    if node.op != "get_attr":
        return _literals_differ(node.args, twin.args) or _literals_differ(node.kwargs, twin.kwargs)
    ours, theirs = constant(full, node), constant(part, twin)
    if isinstance(ours, fx.GraphModule) and isinstance(theirs, fx.GraphModule):
        return any(_differ(ours, inner, theirs, other) for inner, other in aligned(ours, theirs))
    if ours is theirs or not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    same_kind = ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.device == theirs.device
    return not same_kind or not (ours.is_meta or torch.equal(ours, theirs))


def _extents_differ(ours: Any, theirs: Any) -> bool:
    if ours is None or theirs is None:  # a value nobody noted, as of some nodes of nested graphs
        return False
    if isinstance(ours, torch.Tensor):
        return bool(_differing_dims(ours, theirs))
    if isinstance(ours, list | tuple):
        return any(map(_extents_differ, ours, theirs))
    return type(ours) is int and ours != theirs


def _differing_dims(ours: torch.Tensor, theirs: torch.Tensor) -> list[int]:
    """Dimensions of known extents that differ."""
    pairs = enumerate(zip(ours.shape, theirs.shape, strict=True))
    return [dim for dim, (a, b) in pairs if type(a) is int and type(b) is int and a != b]


def _literals_differ(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, fx.Node):
        return False
    if isinstance(ours, list | tuple):
        return len(ours) != len(theirs) or any(map(_literals_differ, ours, theirs))
    if isinstance(ours, dict):
        return any(_literals_differ(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, slice):
        parts = [(ours.start, theirs.start), (ours.stop, theirs.stop), (ours.step, theirs.step)]
        return any(_literals_differ(a, b) for a, b in parts)
    if isinstance(ours, torch.SymInt | torch.SymFloat | torch.SymBool):
        return False  # both are of data, and no literal of the chunk dimension
    return type(ours) is not type(theirs) or bool(ours != theirs)
