"""Make the chunked graph: a new graph, in one sweep over the units of the given one.

A body is copied once per chunk, in order forwards and last first backwards, as an eager run does. What enters is cut at
the boundary; what leaves is joined, or added where it is a part of a gradient, or handed on chunk by chunk.
*Invariant.* The given graphs are only read. *Cost.* Linear in the nodes of the new graph.
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
from pytest_gtrainer.passes.chunking.config import ChunkError, described
from pytest_gtrainer.passes.chunking.regions import Region, RegionKey, Storages, alike, propagates
from pytest_gtrainer.passes.chunking.schedule import units_in_order
from pytest_gtrainer.passes.chunking.twins import Twins, constant, unknown_dims


@dataclass(frozen=True, slots=True)
class Contributions:
    """Consecutive contributions of one region, and what it passes on from outside; or one from outside (None)."""

    region: Region | None
    nodes: tuple[fx.Node, ...]


class Sums:
    """Additions outside of all bodies to which a body contributes."""

    def __init__(self, twins: Twins, region_of: Mapping[fx.Node, Region]) -> None:
        self.tops: dict[
            fx.Node, list[Contributions]
        ] = {}  # per sum its last addition, and what arrives in order
        self.partial: set[fx.Node] = (
            set()
        )  # its additions before that; only the next one reads them
        regions = {region.key: region for region in region_of.values()}
        arriving: dict[fx.Node, list[fx.Node]] = {}
        chains: dict[fx.Node, list[fx.Node]] = {}
        for node in twins.full.graph.nodes:
            if node not in region_of and is_engine_addition(node):
                older, newer = cast("tuple[fx.Node, fx.Node]", node.args)
                arriving[node], chains[node] = [older, newer], []
                if older in chains and len(older.users) == 1:
                    arriving[node], chains[node] = (
                        [*arriving.pop(older), newer],
                        [*chains.pop(older), older],
                    )
        for node, nodes in arriving.items():
            if any(source in region_of for source in nodes):
                groups: list[Contributions] = []
                for source in nodes:
                    region = region_of.get(source)
                    if groups and region is not None and groups[-1].region is region:
                        groups[-1] = Contributions(region, (*groups[-1].nodes, source))
                    else:
                        groups.append(Contributions(region, (source,)))
                self.tops[node] = (
                    _with_passed_on(groups, node, twins, regions) if node in twins.dims else groups
                )
                self.partial.update(chains[node])


def _with_passed_on(
    groups: list[Contributions], top: fx.Node, twins: Twins, regions: Mapping[RegionKey, Region]
) -> list[Contributions]:
    """The groups of an activation's gradient, with what is passed on inside a region in that region's group."""
    places = [place for place, group in enumerate(groups) if group.region is not None]
    if len(places) != 1 or (region := groups[places[0]].region) is None:
        return groups
    (place,) = places
    behind = before = (
        0  # uses that the activation has outside, behind the region in the forward and in front of it
    )
    forward = regions.get(RegionKey(region.key.root, FORWARD))
    if forward is not None:
        body = set(forward.body)
        read = dict.fromkeys(source for node in forward.body for source in node.all_input_nodes)
        entering = [source for source in read if source not in body and source in twins.dims]
        of_its_kind = [source for source in entering if alike(source.meta["val"], top.meta["val"])]
        uses = [
            use
            for source in of_its_kind
            for use in source.users
            if use not in body and propagates(use)
        ]
        behind = sum(use > forward.body[0] for use in uses)
        before = len(uses) - behind
    first, last = min(place, behind), max(place, len(groups) - 1 - before)
    inner = tuple(node for group in groups[first : last + 1] for node in group.nodes)
    return [*groups[:first], Contributions(region, inner), *groups[last + 1 :]]


aten = torch.ops.aten


class Rewrite:
    """One rewriting; ``run`` gives the new GraphModule."""

    def __init__(
        self, twins: Twins, regions: Sequence[Region], storages: Storages, dim: int
    ) -> None:
        self.twins, self.regions, self.storages, self.dim = twins, regions, storages, dim
        self.region_of = {node: region for region in regions for node in region.body}
        self.sums = Sums(twins, self.region_of)
        self.graph = empty_graph(like=twins.full.graph)
        self.whole: dict[fx.Node, fx.Node] = {}
        self.chunks, self.cut = dict[fx.Node, list[fx.Node]](), dict[fx.Node, list[fx.Node]]()
        self.renamings: list[Renaming] = [{} for _ in range(twins.num_chunks)]
        self.constants: dict[fx.Node, fx.Node] = {}
        self.attributes: dict[str, Any] = {}

    def run(self) -> fx.GraphModule:
        for unit in units_in_order(
            list(self.twins.full.graph.nodes), self.region_of, self.storages
        ):
            if isinstance(unit, Region):
                self._emit_region(unit)
            elif unit in self.sums.tops:
                terms = [
                    term for group in self.sums.tops[unit] for term in self._terms(group, unit)
                ]
                self.whole[unit] = self._fold(terms, unit)
            elif unit not in self.sums.partial:
                self.whole[unit] = self.graph.node_copy(unit, self._whole)
                self.whole[unit].meta = dict(unit.meta)
                if unit.op in ("get_attr", "call_module"):
                    self.attributes[str(unit.target)] = constant(self.twins.full, unit)
        for node in list(self.graph.find_nodes(op="get_attr")):
            if not node.users:
                self.graph.erase_node(node)
        return finished(self.graph, self.twins.full, self.attributes)

    # what is not chunked

    def _terms(self, group: Contributions, top: fx.Node) -> list[fx.Node]:
        """What arrives at a sum from one group."""
        if group.region is None:
            return [self._whole(group.nodes[0])]
        dim = self.twins.dim(top)
        if dim is None:
            backwards = reversed(range(self.twins.num_chunks))
            return [self.chunks[node][chunk] for chunk in backwards for node in group.nodes]
        part = self.twins.part_of[top]
        pieces = [
            self.chunks.get(node) or self._cut(node, dim, group.region) for node in group.nodes
        ]
        return [
            self._joined(
                top, [self._fold(terms, part) for terms in zip(*pieces, strict=True)], group.region
            )
        ]

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
        sources = (
            source for node in region.body for source in node.all_input_nodes if source not in body
        )
        entering = {
            source for source in sources if source.op != "get_attr"
        }  # a constant is never cut
        copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(self.twins.num_chunks)]
        for source in sorted(entering):
            home = self.region_of.get(source)
            if home is not None and home.key.root == region.key.root:
                pieces = self.chunks[source]
            elif unknown_dims(source.meta.get("val")):
                raise ChunkError(
                    f"{described(source)} has an extent that is known only at run time, so {region.key.root} cannot "
                    "read it chunk by chunk: compute it inside the module"
                )
            elif (dim := self.twins.dim(source)) is not None:
                pieces = self._cut(source, dim, region)
            else:
                continue  # all chunks read the same
            for known, piece in zip(copies, pieces, strict=True):
                known[source] = piece
        self._emit_bodies(region, copies)
        self.chunks.update((node, [known[node] for known in copies]) for node in region.body)
        taken = (self.region_of, self.sums.tops, self.sums.partial)
        for node in region.body:
            if any(all(user not in known for known in taken) for user in node.users):
                self._whole(node)

    def _emit_bodies(self, region: Region, copies: list[dict[fx.Node, fx.Node]]) -> None:
        """One chunk after the other, as random numbers and buffers ask for; ``copies`` begins with what enters."""
        for chunk in self._chunk_order(region):
            for node in region.body:
                copies[chunk][node] = self._copy(node, copies[chunk], chunk, region)

    def _chunk_order(self, region: Region) -> Sequence[int]:
        order = range(self.twins.num_chunks)
        return order[::-1] if region.key.direction == BACKWARD else order

    def _copy(
        self, node: fx.Node, known: dict[fx.Node, fx.Node], chunk: int, region: Region
    ) -> fx.Node:
        """A body's node for one chunk: arguments and metadata of the part."""
        part = self.twins.part_of[node]

        def mapped(source: fx.Node) -> fx.Node:
            ours = self.twins.full_of[source]
            if ours.op == "get_attr" and ours in self.twins.differing:
                return self._constant_of_part(source, ours)
            return known[ours] if ours in known else self._whole(ours)

        args, kwargs = fx.node.map_arg(part.args, mapped), fx.node.map_arg(part.kwargs, mapped)
        copied = self.graph.create_node(
            node.op, node.target, args, kwargs, f"{node.name}_chunk{chunk}"
        )
        copied.meta = dict(part.meta)
        renew_symbols(copied.meta, self.renamings[chunk])
        copied.meta["custom"] = {
            **(node.meta.get("custom") or {}),
            **annotation(region.key.root, BODY, GRAPH, chunk),
        }
        return copied

    def _constant_of_part(self, part: fx.Node, full: fx.Node) -> fx.Node:
        """A constant or nested graph at the extent of one chunk, under a name of its own."""
        if part not in self.constants:
            name = f"{str(full.target).replace('.', '_')}_of_chunk"
            self.attributes[name] = constant(self.twins.part, part)
            self.constants[part] = self.graph.create_node("get_attr", name, name=name)
            self.constants[part].meta = dict(part.meta)
        return self.constants[part]

    # boundaries

    def _cut(self, source: fx.Node, dim: int, region: Region) -> list[fx.Node]:
        if source not in self.cut:
            self._check_boundary(source, dim, region, "enters")
            if source in self.region_of:
                self.cut[source] = [
                    self._contiguous(piece, region) for piece in self.chunks[source]
                ]
            else:
                self.cut[source] = self._split(source, dim, region)
        return self.cut[source]

    def _split(self, source: fx.Node, dim: int, region: Region) -> list[fx.Node]:
        """Equal parts of a whole tensor: views where they are contiguous, else contiguous copies (G5)."""
        whole, count, value = self._whole(source), self.twins.num_chunks, source.meta["val"]
        sizes = [value.shape[dim] // count] * count
        values = values_of_split(value, sizes, dim)
        split = self._boundary(
            aten.split_with_sizes.default, (whole, sizes, dim), values, region, SPLIT_BOUNDARY
        )
        items = [((split, index), part) for index, part in enumerate(values)]
        pieces = [
            self._boundary(operator.getitem, args, part, region, SPLIT_BOUNDARY)
            for args, part in items
        ]
        # along the batch autograd's backward of a concatenation cuts by views, too
        is_gradient = direction(source) == BACKWARD and dim == 0
        return pieces if is_gradient else [self._contiguous(piece, region) for piece in pieces]

    def _contiguous(self, piece: fx.Node, region: Region) -> fx.Node:
        value = piece.meta["val"]
        if value.is_contiguous():
            return piece
        copied = self._boundary(
            aten.clone.default, (piece,), value_like(value, value.shape), region, SPLIT_BOUNDARY
        )
        copied.kwargs = {"memory_format": torch.contiguous_format}
        return copied

    def _whole(self, node: fx.Node) -> fx.Node:
        """What stands for a value of the given graph where all of it is read: joined, added, or of the last chunk."""
        if node in self.whole:
            return self.whole[node]
        region, pieces = self.region_of[node], self.chunks[node]
        if (
            self.storages.of[node] not in self.region_of
        ):  # all share its memory, a buffer's that a write returns
            self.whole[node] = pieces[self._chunk_order(region)[-1]]
        elif self._leaving_dim(node, region) is not None:
            self.whole[node] = self._joined(node, pieces, region)
        else:
            self.whole[node] = self._fold(pieces[::-1], node)
        return self.whole[node]

    def _leaving_dim(self, node: fx.Node, region: Region) -> int | None:
        """The dimension along which a live-out is joined; None if its chunks are added."""
        dim = reason = None
        if not isinstance(node.meta.get("val"), torch.Tensor):
            reason = "is no tensor"
        elif unknown_dims(node.meta["val"]):
            reason = "has an extent that is known only at run time"
        elif (dim := self.twins.dim(node)) is None and region.key.direction == FORWARD:
            reason = "does not have the chunk dimension"
        if reason is not None:
            users = [user for user in node.users if user not in self.region_of]
            raise ChunkError(
                f"{described(node)} leaves the chunked module {region.key.root} but {reason}, so the chunks' values "
                f"cannot be put together for {', '.join(described(user) for user in users[:3])}: compute it outside "
                "the module, or use it inside"
            )
        return dim

    def _joined(self, node: fx.Node, pieces: list[fx.Node], region: Region) -> fx.Node:
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
