"""Chunk regions of a joint graph, after a check that chunks compute what the whole computes."""

import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import ALL_TO_ALL, WAIT
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.facts import check_type
from pytest_gtrainer.graph.collectives import group_of
from pytest_gtrainer.graph.nodes import BACKWARD, FORWARD, direction, is_collective
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError, describe
from pytest_gtrainer.passes.chunking.mixing import (
    HOW_MANY,
    Call,
    Content,
    Mixing,
    Operand,
    RowInfo,
    Rows,
    Statistic,
    propagate,
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
    """Check that the inputs of the twins are N to 1 in the chunk dimension, or equal."""
    is_checked = False
    for node in twins.full.graph.find_nodes(op="placeholder"):
        for dim in twins.dims.get(node, ()):
            is_checked = True
            ours = node.meta["val"].shape[dim]
            theirs = twins.part_of[node].meta["val"].shape[dim]
            wanted = config.chunk_extent(ours, f"{config.module_fqn} reads {describe(node)}")
            if theirs != wanted:
                raise ChunkError(
                    f"{config.module_fqn}: the twin of {describe(node)} has extent {theirs} where "
                    f"the {config.chunk_dim} dimension has {ours}; a chunk of {config.num_chunks} "
                    f"has {wanted}: trace it with the same ChunkConfig"
                )
    if not is_checked:
        raise ChunkError(
            "the graph and its twin have inputs of the same extents, so nothing is known of the "
            f"{config.chunk_dim} dimension of {config.module_fqn}: trace the twin with "
            "trace_step(..., chunk=config)"
        )


def check_bodies(
    twins: Twins, regions: Sequence[Region], storages: Storages, config: ChunkConfig
) -> None:
    """Refuse a body that would not compute the same in chunks.

    A body may have no collectives but expert-parallel ones, no operator that mixes rows, no full
    extent as a fixed number, and in the forward no value of the backward.
    """
    reductions = gradient_reductions(twins.full.graph)
    body_judge = BodyJudge(twins, regions, storages, config)
    for region in regions:
        root = region.key.root
        is_forward = region.key.direction == FORWARD
        for node in region.body:
            # Experts exchange rows chunk by chunk; gradients are summed over chunks.
            is_allowed = node.target in (ALL_TO_ALL, WAIT) or node in reductions
            if is_collective(node) and not is_allowed:
                raise collective_error(describe(node), group_of(node), root)
            for source in node.all_input_nodes if is_forward else ():
                if direction(source) == BACKWARD:
                    raise ChunkError(
                        f"{describe(node)} in the forward of {root} reads {describe(source)} of "
                        "the backward: which chunk's value it would be is not known; mark "
                        "recomputed nodes as the backward's"
                    )
            _check_fixed_extent(node, region, twins)
            # The pattern itself in row_wise: the user answers for all operators of its modules.
            if config.module_fqn in config.row_wise:
                continue
            body_judge.judge_node(node, root)
            if is_forward and not body_judge.bodies.issuperset(node.users):
                body_judge.check_leaving(node, root)


def collective_error(what: str, group: str | None, root: str) -> ChunkError:
    """Return the refusal of a collective on activations, with its process group."""
    among = ""
    if group is not None:
        among = f" over the process group {group!r}"
        with suppress(ValueError):  # a group of another process
            among += f" of ranks {list(group_ranks(group))}"
    return ChunkError(
        f"{what} is a collective{among} that the chunk dimension reaches inside {root}. Only "
        "all-to-alls of expert parallelism and reductions of parameter gradients may run once per "
        "chunk, tensor parallelism may not: chunk modules without it, or take the collective out "
        "of the module"
    )


class BodyJudge:
    """A judge of all bodies, node by node in graph order, with what is known of their values.

    The dimensions of rows are those in which the twins differ. Eager code that has no twin is
    judged by ``references.chunk_judges.ForwardJudge``; both ask ``mixing.propagate``.
    """

    def __init__(
        self, twins: Twins, regions: Sequence[Region], storages: Storages, config: ChunkConfig
    ) -> None:
        self.twins, self.storages, self.config = twins, storages, config
        self.bodies = {node for region in regions for node in region.body}
        self.known: dict[fx.Node, list[RowInfo]] = {}
        self.warned: set[str] = set()
        self.written: dict[fx.Node, RowInfo] = {}  # by storage

    def judge_node(self, node: fx.Node, root: str) -> None:
        """Note what is known of a node's results; refuse it if it mixes rows."""
        if node.target is operator.getitem:
            source, index = node.args
            of_source = self.known.get(source, [])
            if index < len(of_source):
                self.known[node] = [of_source[index]]
            else:
                self.known[node] = [self._known_of(node)]
            return

        def operand(source: fx.Node) -> Operand:
            return Operand(source.meta.get("val"), self._known_of(source))

        args = fx.node.map_arg(node.args, operand)
        kwargs = fx.node.map_arg(node.kwargs, operand)
        # Numbers of the backward may depend on the extent, as the divisor of a mean's gradient.
        part = self.twins.part_of[node]
        part_args = None
        if direction(node) == FORWARD:
            part_args = fx.node.map_arg(
                (part.args, part.kwargs), lambda source: source.meta.get("val")
            )
        call = Call(node.target, args, kwargs, self._results_of(node), part_args)
        self.known[node] = propagate(call, describe(node), root, self.config, self.warned)
        # By storage: what is written may be read through any view of the memory.
        for storage in self.storages.written.get(node, ()):
            if storage in self.bodies:
                self.written[storage] = self.known[node][0]
            elif self.storages.of[node] is storage:
                # The result is a buffer, which goes from chunk to chunk. An operator that writes
                # to one may also return rows.
                self.known[node] = [None]

    def check_leaving(self, node: fx.Node, root: str) -> None:
        """Check that what leaves the module can be joined: rows in their order, of data."""
        known = self._known_of(node)
        if not isinstance(known, Rows):
            return
        if known.content in (Content.ROW_NUMBERS, Content.POSITIONAL):
            wrong, is_of_chunk = f"depends on their number, or on {HOW_MANY},", True
        elif known.content is Content.DATA and known.front != 1:
            wrong, is_of_chunk = "has rows in another order", False
        else:
            return
        wrong += f" and leaves the module in dimension {known.dims[0]}"
        mixing = Mixing(wrong, is_of_chunk=is_of_chunk)
        refuse_mixing(describe(node), mixing, root, self.config, self.warned)

    def _results_of(self, node: fx.Node) -> list[tuple[Any, Sequence[int]]]:
        """Return the values of a node, each with its dimensions that are the chunk dimension."""
        ours, theirs = node.meta.get("val"), self.twins.part_of[node].meta.get("val")
        if not isinstance(ours, list | tuple):
            ours, theirs = [ours], [theirs]
        results: list[tuple[Any, Sequence[int]]] = []
        for value, part in zip(ours, theirs, strict=True):
            dims: Sequence[int] = ()
            if isinstance(value, torch.Tensor) and isinstance(part, torch.Tensor):
                dims = differing_dims(value, part) or unknown_dims(value)
            results.append((value, dims))
        return results

    def _known_of(self, node: fx.Node) -> RowInfo:
        known = self.known.get(node, [None])[0]
        written = self.written.get(self.storages.of[node])
        if isinstance(known, Rows) and isinstance(written, Rows):
            # Memory that the module has made holds what was written to it since.
            if known.content is Content.UNIFORM:
                return replace(known, content=written.content)
            return known
        if known is not None:
            return known
        if node in self.bodies:
            return written
        if node.op == "get_attr":
            return self._known_of_constant(node)
        dims = self.twins.dims.get(node) or unknown_dims(node.meta.get("val"))
        return Rows(tuple(dims)) if dims else None

    def _known_of_constant(self, node: fx.Node) -> RowInfo:
        """Return what is known of a tensor that the graph holds, and not its inputs."""
        value = node.meta.get("val")
        if node not in self.twins.differing or not isinstance(value, torch.Tensor):
            return None
        dims = self.twins.dims.get(node, [])
        if len(dims) != 1:
            return Statistic(f"{describe(node)}, by {HOW_MANY}", is_count=True)
        ours = constant(self.twins.full, node)
        theirs = constant(self.twins.part, self.twins.part_of[node])
        first = ours.select(dims[0], 0)
        # A constant of equal rows, as ``torch.ones(B)``, serves a chunk as well as the whole.
        rows = [*ours.unbind(dims[0]), *theirs.unbind(dims[0])]
        is_uniform = not ours.is_meta and all(torch.equal(row, first) for row in rows)
        return Rows(tuple(dims), Content.UNIFORM if is_uniform else Content.POSITIONAL)


def _check_fixed_extent(node: fx.Node, region: Region, twins: Twins) -> None:
    """Refuse a reshape with the full extent as a number: it runs on a chunk, but cuts otherwise.

    With the batch 4, ``x.view(4, -1)`` of ``[4, 6]`` gives 4 rows; of a chunk ``[2, 6]`` it gives
    4 rows too, which are half rows.
    """
    if node.target not in _RESHAPES:
        return
    source = node.all_input_nodes[0]
    dims, source_dims = twins.dims.get(node, []), twins.dims.get(source, [])
    if len(dims) != 1 or len(source_dims) != 1:
        return
    dim, source_dim = dims[0], source_dims[0]
    shape, source_shape = node.meta["val"].shape, source.meta["val"].shape
    part_shape = twins.part_of[node].meta["val"].shape
    extent = source_shape[source_dim]
    if math.prod(shape[:dim]) <= math.prod(source_shape[:source_dim]):
        return  # the chunk dimension has not moved inwards
    for ours, theirs in zip(shape[:dim], part_shape[:dim], strict=True):
        if ours == theirs == extent:
            raise ChunkError(
                f"{describe(node)} in {region.key.root} has the full extent {extent} as a fixed "
                f"number: a chunk of {list(twins.part_of[source].meta['val'].shape)} would become "
                f"{list(part_shape)}. Write x.shape[{source_dim}], or -1, in its place"
            )


def chunk_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    config: ChunkConfig,
    twin: fx.GraphModule | None = None,
) -> fx.GraphModule:
    """Return a new graph in which the regions that ``config`` names run in chunks.

    The given graphs are only read.

    Args:
        example_inputs: of a symbolic graph, for the extents; by default those of the traced
            example.
        twin: the graph of the same step at the extent of one chunk, after the same passes;
            ``trace_step(..., chunk=config)`` makes it. A symbolic graph needs none: it is its own
            twin at two extents.

    Raises:
        ChunkError: what cannot be chunked, by module, node and extent, and what to do about it.
        TypeError: a graph is no GraphModule, or ``config`` no ``ChunkConfig``.
    """
    check_type(gm, fx.GraphModule, "gm", "a GraphModule")
    check_type(config, ChunkConfig, "config", "a ChunkConfig")
    if twin is not None:
        check_type(twin, fx.GraphModule, "twin", "a GraphModule")
    twins = (gm, twin) if twin is not None else symbolic_twins(gm, example_inputs, config)
    if twins is None:
        raise ChunkError(
            "a graph of static shapes is chunked with its twin, the same step at the extent of one "
            "chunk: trace with trace_step(..., chunk=config) and give twin=traced.twin, or compile "
            "it inside eager_chunked"
        )
    try:
        aligned = Twins(*twins, config.num_chunks)
        check_extents(aligned, config)
        storages = Storages(aligned.full.graph)
        regions = find_regions(aligned, config, storages)
        check_bodies(aligned, regions, storages, config)
        return Rewrite(aligned, regions, storages, config.dim).run()
    except ChunkError as error:
        extent = _first_differing_extent(*twins)
        of_extent = "" if extent is None else f", of extent {extent}"
        error.add_note(
            f"while {config.module_fqn} was chunked by {config.chunk_dim}{of_extent}, into "
            f"{config.num_chunks} chunks"
        )
        raise


def _first_differing_extent(full: fx.GraphModule, part: fx.GraphModule) -> Any:
    """Return the first extent of an input that differs between twins; None if none does."""
    pairs = (graph.graph.find_nodes(op="placeholder") for graph in (full, part))
    for node, twin in zip(*pairs, strict=False):
        shapes = (getattr(each.meta.get("val"), "shape", ()) for each in (node, twin))
        for ours, theirs in zip(*shapes, strict=False):
            if ours != theirs:
                return ours
    return None
