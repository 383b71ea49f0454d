"""Make the chunked graph: a new graph, in one sweep over the units of the given one.

A body is copied once per chunk, in order forwards and last first backwards, as an eager run does.
Tensors that enter are cut at the boundary. What leaves is joined, or added if it is a part of a
gradient, or handed on chunk by chunk. *Invariant.* The given graphs are only read. *Cost.* Linear
in the nodes of the new graph.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import Renaming, is_engine_addition, renew_symbols
from pytest_gtrainer._torch.graph_modules import empty_graph, finished
from pytest_gtrainer._torch.passes import values_of_split
from pytest_gtrainer._torch.values import value_like
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    BODY,
    FORWARD,
    GRAPH,
    MATERIALIZATION,
    SPLIT_BOUNDARY,
    annotation,
    direction,
)
from pytest_gtrainer.passes.chunking.config import ChunkError, describe
from pytest_gtrainer.passes.chunking.regions import (
    Region,
    RegionKey,
    Storages,
    may_be_gradient_of,
    may_have_gradient,
)
from pytest_gtrainer.passes.chunking.schedule import units_in_order
from pytest_gtrainer.passes.chunking.twins import Twins, constant, unknown_dims


@dataclass(frozen=True, slots=True)
class TermGroup:
    """Consecutive terms of a sum that come from one region, with what the region passes on.

    ``region`` is None for a term from outside of all regions.
    """

    region: Region | None
    nodes: tuple[fx.Node, ...]


class Sums:
    """Autograd's additions outside of all bodies, to which a body contributes.

    A value with several uses gets its gradient as ``((a + b) + c)``, a chain of additions.

    Attributes:
        tops: the last addition of each chain, with its terms in order.
        partial: the additions before that, which only the next one reads.
    """

    def __init__(self, twins: Twins, region_of: Mapping[fx.Node, Region]) -> None:
        self.tops: dict[fx.Node, list[TermGroup]] = {}
        self.partial: set[fx.Node] = set()
        regions = {region.key: region for region in region_of.values()}
        terms_of: dict[fx.Node, list[fx.Node]] = {}
        chains: dict[fx.Node, list[fx.Node]] = {}
        for node in twins.full.graph.nodes:
            if node in region_of or not is_engine_addition(node):
                continue
            older, newer = cast("tuple[fx.Node, fx.Node]", node.args)
            if older in chains and len(older.users) == 1:
                terms_of[node] = [*terms_of.pop(older), newer]
                chains[node] = [*chains.pop(older), older]
            else:
                terms_of[node], chains[node] = [older, newer], []
        for node, terms in terms_of.items():
            if region_of.keys().isdisjoint(terms):
                continue
            groups: list[TermGroup] = []
            for term in terms:
                region = region_of.get(term)
                if groups and region is not None and groups[-1].region is region:
                    groups[-1] = TermGroup(region, (*groups[-1].nodes, term))
                else:
                    groups.append(TermGroup(region, (term,)))
            if node in twins.dims:
                groups = _include_passed_on(groups, node, twins, regions)
            self.tops[node] = groups
            self.partial.update(chains[node])


def _include_passed_on(
    groups: list[TermGroup], top: fx.Node, twins: Twins, regions: Mapping[RegionKey, Region]
) -> list[TermGroup]:
    """Move terms that pass through a region, as a residual's gradient does, into its group.

    Each chunk of an eager run adds these terms itself. Gradients of uses after the region, or in
    front of it, are added outside.
    """
    places = [place for place, group in enumerate(groups) if group.region is not None]
    if len(places) != 1:
        return groups
    (place,) = places
    region = groups[place].region
    assert region is not None
    uses_behind = uses_in_front = 0
    forward = regions.get(RegionKey(region.key.root, FORWARD))
    if forward is not None:
        body = set(forward.body)
        read = dict.fromkeys(source for node in forward.body for source in node.all_input_nodes)
        for source in read:
            if source in body or source not in twins.dims:
                continue
            if not may_be_gradient_of(source.meta["val"], top.meta["val"]):
                continue
            for use in source.users:
                if use not in body and may_have_gradient(use):
                    uses_behind += use > forward.body[0]
                    uses_in_front += use <= forward.body[0]
    # The engine runs backwards: gradients of the latest uses arrive first.
    first = min(place, uses_behind)
    last = max(place, len(groups) - 1 - uses_in_front)
    inner = tuple(node for group in groups[first : last + 1] for node in group.nodes)
    return [*groups[:first], TermGroup(region, inner), *groups[last + 1 :]]


aten = torch.ops.aten


class Rewrite:
    """One rewriting; ``run`` gives the new GraphModule.

    Attributes:
        reads_chunks: nodes of the full graph that read a body's values by chunk.
        whole: per node of the full graph the new node that stands for all of it.
        chunks: per node of a body its copies, by chunk.
        cut: per node that enters a body its pieces, by chunk.
        renamings: per chunk new symbols for sizes of the data, which differ between chunks.
        constants: per ``get_attr`` of the part its new node.
        attributes: what the new ``get_attr`` nodes read.
    """

    def __init__(
        self, twins: Twins, regions: Sequence[Region], storages: Storages, dim: int
    ) -> None:
        self.twins, self.storages, self.dim = twins, storages, dim
        self.region_of = {node: region for region in regions for node in region.body}
        self.sums = Sums(twins, self.region_of)
        self.reads_chunks = {*self.region_of, *self.sums.tops, *self.sums.partial}
        self.graph = empty_graph(like=twins.full.graph)
        self.whole: dict[fx.Node, fx.Node] = {}
        self.chunks: dict[fx.Node, list[fx.Node]] = {}
        self.cut: dict[fx.Node, list[fx.Node]] = {}
        self.renamings: list[Renaming] = [{} for _ in range(twins.num_chunks)]
        self.constants: dict[fx.Node, fx.Node] = {}
        self.attributes: dict[str, Any] = {}

    def run(self) -> fx.GraphModule:
        nodes = list(self.twins.full.graph.nodes)
        for unit in units_in_order(nodes, self.region_of, self.storages):
            if isinstance(unit, Region):
                self._emit_region(unit)
            elif unit in self.sums.tops:
                terms: list[fx.Node] = []
                for group in self.sums.tops[unit]:
                    terms += self._terms(group, unit)
                self.whole[unit] = self._fold(terms, unit)
            elif unit not in self.sums.partial:
                self.whole[unit] = self.graph.node_copy(unit, self._whole)
                self.whole[unit].meta = dict(unit.meta)
                if unit.op in ("get_attr", "call_module"):
                    self.attributes[str(unit.target)] = constant(self.twins.full, unit)
        # Bodies read the constants of the part, so those of the full graph may have no reader.
        for node in list(self.graph.find_nodes(op="get_attr")):
            if not node.users:
                self.graph.erase_node(node)
        return finished(self.graph, self.twins.full, self.attributes)

    def _terms(self, group: TermGroup, top: fx.Node) -> list[fx.Node]:
        """Return the new terms of a sum that come from one group."""
        if group.region is None:
            return [self._whole(group.nodes[0])]
        dim = self.twins.dim(top)
        if dim is None:
            # The gradient of something that all chunks share: each chunk has its terms, last first.
            backwards = reversed(range(self.twins.num_chunks))
            return [self.chunks[node][chunk] for chunk in backwards for node in group.nodes]
        pieces = []
        for node in group.nodes:
            pieces.append(self.chunks.get(node) or self._cut(node, dim, group.region))
        part = self.twins.part_of[top]
        sums = [self._fold(terms, part) for terms in zip(*pieces, strict=True)]
        return [self._joined(top, sums, group.region)]

    def _fold(self, terms: Sequence[fx.Node], like: fx.Node) -> fx.Node:
        """Add terms as ``((a + b) + c)``, with the metadata of ``like``."""
        total, *rest = terms
        for term in rest:
            total = self.graph.call_function(aten.add.Tensor, (total, term))
            total.meta = dict(like.meta)
        return total

    def _emit_region(self, region: Region) -> None:
        body = set(region.body)
        entering: set[fx.Node] = set()
        for node in region.body:
            for source in node.all_input_nodes:
                # A constant is never cut: the part has one of its own.
                if source not in body and source.op != "get_attr":
                    entering.add(source)
        copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(self.twins.num_chunks)]
        for source in sorted(entering):
            home = self.region_of.get(source)
            if home is not None and home.key.root == region.key.root:
                pieces = self.chunks[source]  # saved by the forward of the same chunk
            elif unknown_dims(source.meta.get("val")):
                raise ChunkError(
                    f"{describe(source)} has an extent that is known only at run time, so "
                    f"{region.key.root} cannot read it chunk by chunk: compute it inside the module"
                )
            else:
                dim = self.twins.dim(source)
                if dim is None:
                    continue  # all chunks read the same
                pieces = self._cut(source, dim, region)
            for known, piece in zip(copies, pieces, strict=True):
                known[source] = piece
        self._emit_bodies(region, copies)
        for node in region.body:
            self.chunks[node] = [known[node] for known in copies]
        for node in region.body:
            if not self.reads_chunks.issuperset(node.users):
                self._whole(node)

    def _emit_bodies(self, region: Region, copies: list[dict[fx.Node, fx.Node]]) -> None:
        """Copy one chunk after the other, as random numbers and buffers require, into ``copies``.

        ``copies`` begins with what enters, by chunk.
        """
        for chunk in self._chunk_order(region):
            for node in region.body:
                copies[chunk][node] = self._copy(node, copies[chunk], chunk, region)

    def _chunk_order(self, region: Region) -> Sequence[int]:
        order = range(self.twins.num_chunks)
        return order[::-1] if region.key.direction == BACKWARD else order

    def _copy(
        self, node: fx.Node, known: dict[fx.Node, fx.Node], chunk: int, region: Region
    ) -> fx.Node:
        """Copy a node of a body for one chunk, with arguments and metadata of the part."""
        part = self.twins.part_of[node]

        def mapped(source: fx.Node) -> fx.Node:
            ours = self.twins.full_of[source]
            if ours.op == "get_attr" and ours in self.twins.differing:
                return self._constant_of_part(source, ours)
            return known[ours] if ours in known else self._whole(ours)

        args, kwargs = fx.node.map_arg(part.args, mapped), fx.node.map_arg(part.kwargs, mapped)
        name = f"{node.name}_chunk{chunk}"
        copied = self.graph.create_node(node.op, node.target, args, kwargs, name)
        copied.meta = dict(part.meta)
        renew_symbols(copied.meta, self.renamings[chunk])
        copied.meta["custom"] = {
            **(node.meta.get("custom") or {}),
            **annotation(region.key.root, BODY, GRAPH, chunk),
        }
        return copied

    def _constant_of_part(self, part: fx.Node, full: fx.Node) -> fx.Node:
        """Return a constant or nested graph at the extent of one chunk, under its own name."""
        if part not in self.constants:
            name = f"{str(full.target).replace('.', '_')}_of_chunk"
            self.attributes[name] = constant(self.twins.part, part)
            self.constants[part] = self.graph.create_node("get_attr", name, name=name)
            self.constants[part].meta = dict(part.meta)
        return self.constants[part]

    def _cut(self, source: fx.Node, dim: int, region: Region) -> list[fx.Node]:
        """Return the pieces of a value that enters a body, by chunk."""
        if source not in self.cut:
            self._check_boundary(source, dim, region, "enters")
            if source in self.region_of:
                pieces = self.chunks[source]
                self.cut[source] = [self._contiguous(piece, region) for piece in pieces]
            else:
                self.cut[source] = self._split(source, dim, region)
        return self.cut[source]

    def _split(self, source: fx.Node, dim: int, region: Region) -> list[fx.Node]:
        """Split a whole tensor into equal parts, which are contiguous."""
        value = source.meta["val"]
        sizes = [value.shape[dim] // self.twins.num_chunks] * self.twins.num_chunks
        values = values_of_split(value, sizes, dim)
        args = (self._whole(source), sizes, dim)
        split = self._boundary(aten.split_with_sizes.default, args, values, region, SPLIT_BOUNDARY)
        pieces = []
        for index, part in enumerate(values):
            piece = self._boundary(operator.getitem, (split, index), part, region, SPLIT_BOUNDARY)
            # Autograd's backward of a concatenation along the batch cuts by views, too.
            if direction(source) != BACKWARD or dim != 0:
                piece = self._contiguous(piece, region)
            pieces.append(piece)
        return pieces

    def _contiguous(self, piece: fx.Node, region: Region) -> fx.Node:
        # Eager chunking hands over contiguous pieces; for other strides other kernels may run.
        value = piece.meta["val"]
        if value.is_contiguous():
            return piece
        value = value_like(value, value.shape)
        copied = self._boundary(aten.clone.default, (piece,), value, region, SPLIT_BOUNDARY)
        copied.kwargs = {"memory_format": torch.contiguous_format}
        return copied

    def _whole(self, node: fx.Node) -> fx.Node:
        """Return the new node for all of a value: joined, added, or that of the last chunk."""
        if node in self.whole:
            return self.whole[node]
        region, pieces = self.region_of[node], self.chunks[node]
        if self.storages.of[node] not in self.region_of:
            # The chunks have written to one buffer, one after the other.
            self.whole[node] = pieces[self._chunk_order(region)[-1]]
        elif self._leaving_dim(node, region) is not None:
            self.whole[node] = self._joined(node, pieces, region)
        else:
            # Parts of a gradient, added as an eager backward does: the last chunk first.
            self.whole[node] = self._fold(pieces[::-1], node)
        return self.whole[node]

    def _leaving_dim(self, node: fx.Node, region: Region) -> int | None:
        """Return the dimension along which a live-out is joined; None if its chunks are added."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            wrong = "is no tensor"
        elif unknown_dims(node.meta["val"]):
            wrong = "has an extent that is known only at run time"
        else:
            dim = self.twins.dim(node)
            # Parts of a gradient, which the backward makes, are added; values of a forward never.
            if dim is not None or region.key.direction != FORWARD:
                return dim
            wrong = "does not have the chunk dimension"
        users = [describe(user) for user in node.users if user not in self.region_of]
        raise ChunkError(
            f"{describe(node)} leaves the chunked module {region.key.root} but {wrong}, so the "
            f"chunks' values cannot be put together for {', '.join(users[:3])}: compute it outside "
            "the module, or use it inside"
        )

    def _joined(self, node: fx.Node, pieces: list[fx.Node], region: Region) -> fx.Node:
        dim = self.twins.dim(node)
        assert dim is not None
        self._check_boundary(node, dim, region, "leaves")
        value = value_like(node.meta["val"], node.meta["val"].shape)
        return self._boundary(aten.cat.default, (list(pieces), dim), value, region, MATERIALIZATION)

    def _check_boundary(self, node: fx.Node, dim: int, region: Region, does: str) -> None:
        """Refuse another dimension, or other strides, than eager chunking hands over."""
        if dim != self.dim:
            raise ChunkError(
                f"{describe(node)} {does} the chunked module {region.key.root} with the chunk "
                f"dimension in place {dim}; eager chunking cuts and joins along {self.dim}: hand "
                "over tensors that have it there"
            )
        if direction(node) == FORWARD and not node.meta["val"].is_contiguous():
            raise ChunkError(
                f"{describe(node)} {does} the chunked module {region.key.root} with strides "
                f"{list(node.meta['val'].stride())}; eager chunking hands over contiguous tensors, "
                "for which other operators may run: make it .contiguous()"
            )

    def _boundary(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        value: Any,
        region: Region,
        role: str,
    ) -> fx.Node:
        node = self.graph.call_function(target, args)
        custom = {"module_fqn": region.key.root, **annotation(region.key.root, role, GRAPH)}
        node.meta = {"val": value, "custom": custom}
        if region.key.direction == BACKWARD:
            node.meta["autograd_backward"] = True
        return node
