"""The pass that chunks regions of a joint graph."""

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import ALL_TO_ALL, WAIT
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.graph.collectives import group_of
from pytest_gtrainer.graph.nodes import BACKWARD, FORWARD, direction, is_collective
from pytest_gtrainer.passes.chunking import mixing
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError, described
from pytest_gtrainer.passes.chunking.mixing import (
    HOW_MANY,
    Call,
    Known,
    Operand,
    Rows,
    Statistic,
    judge,
    refuse_mixing,
)
from pytest_gtrainer.passes.chunking.regions import (
    Region,
    Storages,
    find_regions,
    gradient_reductions,
)
from pytest_gtrainer.passes.chunking.rewrite import Rewrite
from pytest_gtrainer.passes.chunking.twins import (
    Twins,
    constant,
    differing_dims,
    symbolic_twins,
    unknown_dims,
)

aten = torch.ops.aten
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
)


def check_extents(twins: Twins, config: ChunkConfig) -> None:
    """The graphs' inputs are N to 1 in the chunk dimension, or equal (G9)."""
    differing = [
        node for node in twins.full.graph.find_nodes(op="placeholder") if node in twins.dims
    ]
    for node, dim in ((each, dim) for each in differing for dim in twins.dims[each]):
        ours, theirs = node.meta["val"].shape[dim], twins.part_of[node].meta["val"].shape[dim]
        wanted = config.chunk_extent(ours, f"{config.module_fqn} reads {described(node)}")
        if theirs != wanted:
            raise ChunkError(
                f"{config.module_fqn}: the twin of {described(node)} has extent {theirs} where the "
                f"{config.chunk_dim} dimension has {ours}; a chunk of {config.num_chunks} has {wanted}: trace it "
                "with the same ChunkConfig"
            )
    if not differing:
        raise ChunkError(
            f"the graph and its twin have inputs of the same extents, so nothing is known of the {config.chunk_dim} "
            f"dimension of {config.module_fqn}: trace the twin with trace_step(..., chunk=config)"
        )


def check_bodies(
    twins: Twins, regions: Sequence[Region], storages: Storages, config: ChunkConfig
) -> None:
    """Refuse other collectives than expert-parallel ones (G8), mixed rows (G3), a fixed full extent (G10) in a body."""
    reductions = gradient_reductions(twins.full.graph)
    following = _Following(twins, regions, storages, config)
    for region in regions:
        root = region.key.root
        for node in region.body:
            if (
                is_collective(node)
                and node.target not in (ALL_TO_ALL, WAIT)
                and node not in reductions
            ):
                raise collective_error(described(node), group_of(node), root)
            for source in node.all_input_nodes if region.key.direction == FORWARD else ():
                if direction(source) == BACKWARD:
                    raise ChunkError(
                        f"{described(node)} in the forward of {root} reads {described(source)} of the backward: "
                        "which chunk's value it would be cannot be told; mark recomputed nodes as the backward's"
                    )
            _check_fixed_extent(node, region, twins)
            if config.module_fqn not in config.row_wise:
                following.check(node, root)
                if region.key.direction == FORWARD and any(
                    user not in following.bodies for user in node.users
                ):
                    following.check_leaving(node, root)


def collective_error(what: str, group: str | None, root: str) -> ChunkError:
    """The refusal of a collective on activations, with its process group."""
    among = "" if group is None else f" over the process group {group!r}"
    with suppress(ValueError):  # a group of another process
        among += f" of ranks {list(group_ranks(group))}" if group is not None else ""
    return ChunkError(
        f"{what} is a collective{among} that the chunk dimension reaches inside {root}. Only all-to-alls of expert "
        "parallelism and reductions of parameter gradients may run once per chunk, tensor parallelism may not: chunk "
        "modules without it, or take the collective out of the module"
    )


class _Following:
    """What is known of the values of all bodies, node by node in graph order."""

    def __init__(
        self, twins: Twins, regions: Sequence[Region], storages: Storages, config: ChunkConfig
    ) -> None:
        self.twins, self.storages, self.config = twins, storages, config
        self.bodies = {node for region in regions for node in region.body}
        self.known: dict[fx.Node, list[Known]] = {}
        self.told: set[str] = set()
        self.written: dict[fx.Node, Known] = {}

    def check(self, node: fx.Node, root: str) -> None:
        """Note what a node gives; refuse it if it mixes rows."""
        if node.target is operator.getitem:
            source, index = node.args
            self.known[node] = self.known.get(source, [])[index : index + 1] or [self._of(node)]
            return
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: Operand(n.meta.get("val"), self._of(n))
        )
        part = self.twins.part_of[node]
        numbers = (
            (part.args, part.kwargs) if direction(node) == FORWARD else None
        )  # autograd's are those of a mean
        call = Call(node.target, args, kwargs, list(self._results(node)), numbers)
        self.known[node] = judge(call, described(node), root, self.config, self.told)
        for storage in self.storages.written.get(node, ()):
            if self.storages.of[storage] in self.bodies:
                self.written[storage] = self.known[node][0]
            else:
                self.known[node] = [None]  # a buffer, which goes from chunk to chunk

    def check_leaving(self, node: fx.Node, root: str) -> None:
        """What leaves the module can be joined: in the order of the rows, and no numbers of a chunk's own rows."""
        known = self._of(node)
        if not isinstance(known, Rows):
            return
        counted = known.hold in (mixing.NUMBERS, mixing.COUNTED)
        turned = known.hold == mixing.INPUT and known.front != 1
        if counted or turned:
            wrong = (
                f"depends on their number, or on {HOW_MANY},"
                if counted
                else "has rows in another order"
            )
            wrong += f" and leaves the module in dimension {known.dims[0]}"
            refuse_mixing(described(node), wrong, root, self.config, self.told)

    def _results(self, node: fx.Node) -> Iterator[tuple[Any, Sequence[int]]]:
        ours, theirs = node.meta.get("val"), self.twins.part_of[node].meta.get("val")
        pairs = (
            zip(ours, theirs, strict=True) if isinstance(ours, list | tuple) else [(ours, theirs)]
        )
        for value, part in pairs:
            is_tensor = isinstance(value, torch.Tensor) and isinstance(part, torch.Tensor)
            yield value, (differing_dims(value, part) or unknown_dims(value)) if is_tensor else ()

    def _of(self, node: fx.Node) -> Known:
        known, written = self.known.get(node, [None])[0], self.written.get(self.storages.of[node])
        if isinstance(known, Rows) and isinstance(written, Rows) and known.hold == mixing.MADE:
            return replace(known, hold=written.hold)
        if known is None and node in self.bodies:
            return written
        if known is None and node.op == "get_attr":
            return self._of_constant(node)
        if known is None and (
            dims := self.twins.dims.get(node) or unknown_dims(node.meta.get("val"))
        ):
            return Rows(tuple(dims))
        return known

    def _of_constant(self, node: fx.Node) -> Known:
        """A tensor of the model's own: the same in every row of either twin, or not."""
        if node not in self.twins.differing or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        if len(dims := self.twins.dims.get(node, [])) != 1:
            return Statistic(f"{described(node)}, by {HOW_MANY}")
        ours, theirs = (
            constant(self.twins.full, node),
            constant(self.twins.part, self.twins.part_of[node]),
        )
        rows = [row for tensor in (ours, theirs) for row in tensor.unbind(dims[0])]
        same = not ours.is_meta and all(torch.equal(row, rows[0]) for row in rows)
        return Rows(tuple(dims), mixing.MADE if same else mixing.COUNTED)


def _check_fixed_extent(node: fx.Node, region: Region, twins: Twins) -> None:
    """G10: a reshape with the full extent as a fixed number still runs on a chunk, and cuts it otherwise."""
    if node.target not in _RESHAPES:
        return
    source = node.all_input_nodes[0]
    dims, given_dims = twins.dims.get(node, []), twins.dims.get(source, [])
    if len(dims) != 1 or len(given_dims) != 1:
        return
    dim, given = *dims, *given_dims
    value, before = node.meta["val"], source.meta["val"]
    extent, part = before.shape[given], twins.part_of[node].meta["val"]
    inward = math.prod(value.shape[:dim]) > math.prod(before.shape[:given])
    if inward and any(
        a == b == extent for a, b in zip(value.shape[:dim], part.shape[:dim], strict=True)
    ):
        raise ChunkError(
            f"{described(node)} in {region.key.root} has the full extent {extent} as a fixed number: a chunk of "
            f"{list(twins.part_of[source].meta['val'].shape)} would become {list(part.shape)}. Write x.shape[{given}], "
            "or -1, in its place"
        )


def chunk_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    config: ChunkConfig,
    twin: fx.GraphModule | None = None,
) -> fx.GraphModule:
    """A new graph in which the regions that ``config`` names run in chunks; the given ones are only read.

    Args:
        example_inputs: of a symbolic graph, for the extents; by default those of the traced example.
        twin: the graph of the same step at the extent of one chunk, after the same passes; ``trace_step(...,
            chunk=config)`` makes it. A symbolic graph needs none: it is its own twin at two extents.

    Raises:
        ChunkError: what cannot be chunked, by module, node and extent, and what to do about it.
    """
    twins = (gm, twin) if twin is not None else symbolic_twins(gm, example_inputs, config)
    if twins is None:
        wrong = "a graph of static shapes is chunked with its twin, the same step at the extent of one chunk"
        way = "trace with trace_step(..., chunk=config) and give twin=traced.twin, or compile it inside eager_chunked"
        raise ChunkError(f"{wrong}: {way}")
    try:
        aligned = Twins(*twins, config.num_chunks)
        check_extents(aligned, config)
        storages = Storages(aligned.full.graph)
        regions = find_regions(aligned, config, storages)
        check_bodies(aligned, regions, storages, config)
        return Rewrite(aligned, regions, storages, config.dim).run()
    except ChunkError as error:
        inputs = zip(*(graph.graph.find_nodes(op="placeholder") for graph in twins), strict=False)
        shapes = (
            zip(*(getattr(n.meta.get("val"), "shape", ()) for n in pair), strict=False)
            for pair in inputs
        )
        extent = next(
            (f", of extent {a}" for pairs in shapes for a, b in pairs if a != b), ""
        )  # of the first input
        error.add_note(
            f"while {config.module_fqn} was chunked by {config.chunk_dim}{extent}, into {config.num_chunks} chunks"
        )
        raise
