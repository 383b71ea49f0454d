"""Make the chunked graph: a new graph, in one sweep over the units of the given one.

A body is copied once per chunk, one chunk after the other, in order forwards and last first backwards, as
an eager run does. What enters is cut at the boundary; what leaves is joined, or added where it is a part of
a gradient, or handed on chunk by chunk. *Invariant.* The given graphs are only read. *Cost.* Linear
in the nodes of the new graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import Renaming, is_engine_addition, renew_symbols
from pytest_gtrainer._torch.graph_modules import empty_graph, finished
from pytest_gtrainer._torch.passes import value_like, values_of_split
from pytest_gtrainer.graph.chunks import BODY, GRAPH, MATERIALIZATION, SPLIT_BOUNDARY, annotation
from pytest_gtrainer.graph.nodes import BACKWARD, FORWARD, direction
from pytest_gtrainer.passes.chunking.config import ChunkError, described
from pytest_gtrainer.passes.chunking.regions import Key, Region, Storages, alike, propagates
from pytest_gtrainer.passes.chunking.schedule import units_in_order
from pytest_gtrainer.passes.chunking.twins import Twins, constant


@dataclass(frozen=True, slots=True)
class Contributions:
    """Consecutive contributions of one region, or (``region`` None) one from outside, as they arrive.

    Of a region, nodes may be outside: gradients that enter it and are passed on as they are.
    """

    region: Region | None
    nodes: tuple[fx.Node, ...]


class Sums:
    """Additions outside of all bodies to which a body contributes.

    Attributes:
        tops: per sum its last addition, and what arrives in order.
        partial: its additions before that; only the next one reads them.
    """

    def __init__(self, twins: Twins, region_of: Mapping[fx.Node, Region]) -> None:
        self.tops: dict[fx.Node, list[Contributions]] = {}
        self.partial: set[fx.Node] = set()
        arriving: dict[fx.Node, list[fx.Node]] = {}
        regions = {region.key: region for region in region_of.values()}
        for node in twins.full.graph.nodes:
            if node not in region_of and is_engine_addition(node):
                older, newer = operands(node)
                if older in arriving and len(older.users) == 1:
                    self.partial.add(older)
                    arriving[node] = [*arriving[older], newer]
                else:
                    arriving[node] = [older, newer]
        for node, nodes in arriving.items():
            if node not in self.partial and any(source in region_of for source in nodes):
                groups = _grouped(nodes, region_of)
                self.tops[node] = _with_passed_on(groups, node, twins, regions) if twins.carries(node) else groups
        involved = {add for top in self.tops for add in _chain(top, self.partial)}
        self.partial &= involved


def operands(addition: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The older and the newer gradient that an addition of the engine's adds."""
    older, newer = addition.args
    assert isinstance(older, fx.Node)
    assert isinstance(newer, fx.Node)
    return older, newer


def _chain(top: fx.Node, partial: set[fx.Node]) -> list[fx.Node]:
    chain = []
    node, _ = operands(top)
    while node in partial:
        chain.append(node)
        node, _ = operands(node)
    return chain


def _grouped(nodes: list[fx.Node], region_of: Mapping[fx.Node, Region]) -> list[Contributions]:
    groups: list[Contributions] = []
    for node in nodes:
        region = region_of.get(node)
        if groups and region is not None and groups[-1].region is region:
            groups[-1] = Contributions(region, (*groups[-1].nodes, node))
        else:
            groups.append(Contributions(region, (node,)))
    return groups


def _with_passed_on(
    groups: list[Contributions], top: fx.Node, twins: Twins, regions: Mapping[Key, Region]
) -> list[Contributions]:
    """The groups of an activation's gradient, with what is passed on inside a region in that region's group."""
    contributing = [group.region for group in groups if group.region is not None]
    if len(contributing) != 1:
        return groups
    (region,) = contributing
    place = next(place for place, group in enumerate(groups) if group.region is region)
    behind, before = _uses_outside(regions.get(Key(region.key.root, FORWARD)), top, twins)
    first, last = min(place, behind), max(place, len(groups) - 1 - before)
    inner = tuple(node for group in groups[first : last + 1] for node in group.nodes)
    return [*groups[:first], Contributions(region, inner), *groups[last + 1 :]]


def _uses_outside(forward: Region | None, gradient: fx.Node, twins: Twins) -> tuple[int, int]:
    """How many uses the activation has behind the region in the forward, and how many in front of it."""
    if forward is None:
        return 0, 0
    body = set(forward.body)
    entering = {s: None for node in forward.body for s in node.all_input_nodes if s not in body and twins.carries(s)}
    uses = [
        user
        for source in entering
        if alike(source.meta["val"], gradient.meta["val"])
        for user in source.users
        if user not in body and propagates(user)
    ]
    behind = sum(use > forward.body[0] for use in uses)
    return behind, len(uses) - behind


aten = torch.ops.aten
CHUNKING = "gt_chunking"
"""In the ``meta`` of a chunked GraphModule: its ``ChunkCounts``."""


@dataclass(slots=True)
class ChunkCounts:
    """What was done, for reports.

    Attributes:
        body_nodes: nodes of one chunk, by region.
        split, joined, added, handed_on: live-ins cut, live-outs joined, live-outs added, and values that went
            from body to body chunk by chunk.
    """

    body_nodes: dict[tuple[str, str], int] = field(default_factory=dict)
    split: int = 0
    joined: int = 0
    added: int = 0
    handed_on: int = 0


class Rewrite:
    """One rewriting; ``run`` gives the new GraphModule."""

    def __init__(self, twins: Twins, regions: Sequence[Region], storages: Storages, dim: int) -> None:
        self.twins, self.regions, self.storages, self.dim = twins, regions, storages, dim
        self.region_of = {node: region for region in regions for node in region.body}
        self.sums = Sums(twins, self.region_of)
        self.graph = empty_graph(like=twins.full.graph)
        self.whole: dict[fx.Node, fx.Node] = {}
        self.chunks: dict[fx.Node, list[fx.Node]] = {}
        self.cut: dict[fx.Node, list[fx.Node]] = {}
        self.renamings: list[Renaming] = [{} for _ in range(twins.num_chunks)]
        self.constants: dict[fx.Node, fx.Node] = {}
        self.attributes: dict[str, Any] = {}
        self.counts = ChunkCounts()

    def run(self) -> fx.GraphModule:
        for unit in units_in_order(list(self.twins.full.graph.nodes), self.region_of, self.storages):
            if isinstance(unit, Region):
                self._emit_region(unit)
            elif unit in self.sums.tops:
                self._emit_sum(unit)
            elif unit not in self.sums.partial:
                self._emit_node(unit)
        return self._finished()

    def _finished(self) -> fx.GraphModule:
        full = self.twins.full
        for node in list(self.graph.find_nodes(op="get_attr")):
            if not node.users:
                self.graph.erase_node(node)
        made = finished(self.graph, full, self.attributes)
        made.meta[CHUNKING] = self.counts
        return made

    # what is not chunked

    def _emit_node(self, node: fx.Node) -> None:
        copied = self.graph.node_copy(node, self._whole)
        copied.meta = dict(node.meta)
        self.whole[node] = copied
        if node.op in ("get_attr", "call_module"):
            self.attributes[str(node.target)] = constant(self.twins.full, node)

    def _emit_sum(self, top: fx.Node) -> None:
        terms = [term for group in self.sums.tops[top] for term in self._terms(group, top)]
        self.whole[top] = self._fold(terms, top)

    def _terms(self, group: Contributions, top: fx.Node) -> list[fx.Node]:
        """What arrives at a sum from one group."""
        if group.region is None:
            return [self._whole(group.nodes[0])]
        dim = self.twins.dim(top)
        if dim is None:
            count = self.twins.num_chunks
            return [self.chunks[node][chunk] for chunk in reversed(range(count)) for node in group.nodes]
        part = self.twins.part_of[top]
        pieces = [self.chunks.get(node) or self._cut(node, dim, group.region) for node in group.nodes]
        own = [self._fold(terms, part) for terms in zip(*pieces, strict=True)]
        return [self._joined(top, own, group.region)]

    def _fold(self, terms: Sequence[fx.Node], like: fx.Node) -> fx.Node:
        """``((a + b) + c)``, with the metadata of ``like``."""
        total, *rest = terms
        for term in rest:
            total = self.graph.call_function(aten.add.Tensor, (total, term))
            total.meta = dict(like.meta)
        return total

    # bodies

    def _emit_region(self, region: Region) -> None:
        body = set(region.body)
        entering = {source for node in region.body for source in node.all_input_nodes if source not in body}
        parts = {source: parts for source in sorted(entering) if (parts := self._entering(source, region)) is not None}
        chunks = range(self.twins.num_chunks)
        copies = [{source: pieces[chunk] for source, pieces in parts.items()} for chunk in chunks]
        self._emit_bodies(region, copies)
        for node in region.body:
            self.chunks[node] = [known[node] for known in copies]
        self.counts.body_nodes[region.key.root, region.key.direction] = len(region.body)
        for node in region.body:
            if self._is_read_whole(node):
                self._whole(node)

    def _emit_bodies(self, region: Region, copies: list[dict[fx.Node, fx.Node]]) -> None:
        """One chunk after the other, as random numbers and buffers ask for; ``copies`` begins with what enters."""
        for chunk in self._chunk_order(region):
            for node in region.body:
                copies[chunk][node] = self._copy(node, copies[chunk], chunk, region)

    def _chunk_order(self, region: Region) -> Sequence[int]:
        order = range(self.twins.num_chunks)
        return order[::-1] if region.key.direction == BACKWARD else order

    def _is_read_whole(self, node: fx.Node) -> bool:
        taken = (self.region_of, self.sums.tops, self.sums.partial)
        return any(all(user not in known for known in taken) for user in node.users)

    def _copy(self, node: fx.Node, known: dict[fx.Node, fx.Node], chunk: int, region: Region) -> fx.Node:
        """A body's node for one chunk: arguments and metadata of the part."""
        part, full_of = self.twins.part_of[node], self.twins.full_of

        def mapped(source: fx.Node) -> fx.Node:
            ours = full_of[source]
            if ours.op == "get_attr" and self.twins.differs(ours):
                return self._constant_of_part(ours)
            return known[ours] if ours in known else self._whole(ours)

        args, kwargs = fx.node.map_arg(part.args, mapped), fx.node.map_arg(part.kwargs, mapped)
        copied = self.graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_chunk{chunk}")
        copied.meta = dict(part.meta)
        renew_symbols(copied.meta, self.renamings[chunk])
        custom = {**(node.meta.get("custom") or {}), **annotation(region.key.root, BODY, GRAPH, chunk)}
        copied.meta["custom"] = custom
        return copied

    def _constant_of_part(self, node: fx.Node) -> fx.Node:
        """A constant or nested graph at the extent of one chunk, under a name of its own."""
        if node not in self.constants:
            name = f"{str(node.target).replace('.', '_')}_of_chunk"
            part = self.twins.part_of[node]
            self.attributes[name] = constant(self.twins.part, part)
            made = self.graph.create_node("get_attr", name, name=name)
            made.meta = dict(part.meta)
            self.constants[node] = made
        return self.constants[node]

    # boundaries

    def _entering(self, source: fx.Node, region: Region) -> list[fx.Node] | None:
        """The chunks of what a body reads from outside; None if all chunks read the same."""
        home = self.region_of.get(source)
        if home is not None and home.key.root == region.key.root:
            self.counts.handed_on += 1
            return self.chunks[source]
        if self.twins.has_unknown_extent(source):
            raise ChunkError(
                f"{described(source)} has an extent that is known only at run time, so {region.key.root} cannot read "
                "it chunk by chunk: compute it inside the module"
            )
        dim = self.twins.dim(source)
        if dim is None:
            return None
        return self._cut(source, dim, region)

    def _cut(self, source: fx.Node, dim: int, region: Region) -> list[fx.Node]:
        if source not in self.cut:
            self._check_boundary(source, dim, region, "enters")
            if source in self.region_of:
                self.counts.handed_on += 1
                self.cut[source] = [self._contiguous(piece, region) for piece in self.chunks[source]]
            else:
                self.cut[source] = self._split(source, dim, region)
        return self.cut[source]

    def _split(self, source: fx.Node, dim: int, region: Region) -> list[fx.Node]:
        """Equal parts of a whole tensor: views where they are contiguous, else contiguous copies (G5).

        A gradient is cut along the batch as autograd's backward of a concatenation does, by views.
        """
        self.counts.split += 1
        whole, count = self._whole(source), self.twins.num_chunks
        value = source.meta["val"]
        sizes = [value.shape[dim] // count] * count
        values = values_of_split(value, sizes, dim)
        split = self._boundary(aten.split_with_sizes.default, (whole, sizes, dim), values, region, SPLIT_BOUNDARY)
        pieces = []
        for index, part in enumerate(values):
            pieces.append(self._boundary(operator.getitem, (split, index), part, region, SPLIT_BOUNDARY))
        is_gradient = direction(source) == BACKWARD and dim == 0
        return pieces if is_gradient else [self._contiguous(piece, region) for piece in pieces]

    def _contiguous(self, piece: fx.Node, region: Region) -> fx.Node:
        value = piece.meta["val"]
        if value.is_contiguous():
            return piece
        own = value_like(value, value.shape)
        copied = self._boundary(aten.clone.default, (piece,), own, region, SPLIT_BOUNDARY)
        copied.kwargs = {"memory_format": torch.contiguous_format}
        return copied

    def _whole(self, node: fx.Node) -> fx.Node:
        """What stands for a value of the given graph where all of it is read."""
        if node in self.whole:
            return self.whole[node]
        made = self._materialized(node, self.region_of[node])
        self.whole[node] = made
        return made

    def _materialized(self, node: fx.Node, region: Region) -> fx.Node:
        """A live-out for those outside the body: joined, added, or of its last chunk where all share its memory."""
        if self._shows_state(node):
            return self.chunks[node][self._chunk_order(region)[-1]]
        self._check_leaving(node, region)
        if self.twins.dim(node) is not None:
            return self._joined(node, self.chunks[node], region)
        self.counts.added += 1
        return self._fold(self.chunks[node][::-1], node)

    def _shows_state(self, node: fx.Node) -> bool:
        """Whether the memory is not the chunk's: a buffer's that a write returns."""
        return self.storages.of[node] not in self.region_of

    def _joined(self, node: fx.Node, pieces: list[fx.Node], region: Region) -> fx.Node:
        self.counts.joined += 1
        dim = self.twins.dim(node)
        assert dim is not None
        self._check_boundary(node, dim, region, "leaves")
        value = value_like(node.meta["val"], node.meta["val"].shape)
        return self._boundary(aten.cat.default, (list(pieces), dim), value, region, MATERIALIZATION)

    def _check_boundary(self, node: fx.Node, dim: int, region: Region, does: str) -> None:
        """What crosses the boundary of a module as eager chunking hands it over: along one dimension, contiguous."""
        if dim != self.dim:
            raise ChunkError(
                f"{described(node)} {does} the chunked module {region.key.root} with the chunk dimension in place "
                f"{dim}; eager chunking cuts and joins along {self.dim}: hand over tensors that have it there"
            )
        if direction(node) == FORWARD and not node.meta["val"].is_contiguous():
            raise ChunkError(
                f"{described(node)} {does} the chunked module {region.key.root} with strides "
                f"{list(node.meta['val'].stride())}; eager chunking hands over contiguous tensors, for which other "
                "operators may run: make it .contiguous()"
            )

    def _check_leaving(self, node: fx.Node, region: Region) -> None:
        reason = None
        if not isinstance(node.meta.get("val"), torch.Tensor):
            reason = "is no tensor"
        elif self.twins.has_unknown_extent(node):
            reason = "has an extent that is known only at run time"
        elif self.twins.dim(node) is None and region.key.direction == FORWARD:
            reason = "does not have the chunk dimension"
        if reason is not None:
            users = [user for user in node.users if user not in self.region_of]
            raise ChunkError(
                f"{described(node)} leaves the chunked module {region.key.root} but {reason}, so the chunks' values "
                f"cannot be put together for {', '.join(described(user) for user in users[:3])}: compute it outside "
                "the module, or use it inside"
            )

    def _boundary(
        self, target: Callable[..., Any], args: tuple[Any, ...], value: Any, region: Region, role: str
    ) -> fx.Node:
        node = self.graph.call_function(target, args)
        custom = {"module_fqn": region.key.root, **annotation(region.key.root, role, GRAPH)}
        node.meta = {"val": value, "custom": custom}
        if region.key.direction == BACKWARD:
            node.meta["autograd_backward"] = True
        return node
