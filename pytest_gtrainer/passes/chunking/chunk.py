"""The pass that chunks regions of a joint graph."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import ALL_TO_ALL, WAIT
from pytest_gtrainer.graph.nodes import BACKWARD, FORWARD, direction, is_collective
from pytest_gtrainer.passes.chunking.config import SEQUENCE, ChunkConfig, ChunkError, described
from pytest_gtrainer.passes.chunking.regions import Region, Storages, find_regions, gradient_reductions
from pytest_gtrainer.passes.chunking.rewrite import CHUNKING, Rewrite
from pytest_gtrainer.passes.chunking.twins import Twins, symbolic_twins

aten = torch.ops.aten
_ATTENTION = ("scaled_dot_product", "flex_attention")
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
}


def check_extents(twins: Twins, config: ChunkConfig) -> None:
    """The graphs' inputs are N to 1 in the chunk dimension, or equal (G9)."""
    differing = [node for node in twins.full.graph.find_nodes(op="placeholder") if twins.carries(node)]
    for node in differing:
        pairs = zip(node.meta["val"].shape, twins.part_of[node].meta["val"].shape, strict=True)
        for ours, theirs in ((a, b) for a, b in pairs if a != b):
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


def check_bodies(twins: Twins, regions: Sequence[Region], config: ChunkConfig) -> None:
    """Nothing in a body that cannot run once per chunk: a collective that is not expert-parallel (G8), attention by
    sequence (G3), a forward that reads the backward (G8), a fixed full extent (G10).
    """
    reductions = gradient_reductions(twins.full.graph)
    for region in regions:
        root = region.key.root
        for node in region.body:
            if is_collective(node) and node.target not in (ALL_TO_ALL, WAIT) and node not in reductions:
                raise ChunkError(
                    f"{described(node)} is a collective that the chunk dimension reaches inside {root}. Only "
                    "all-to-alls of expert parallelism and reductions of parameter gradients may run once per chunk, "
                    "tensor parallelism may not: chunk modules without it, or take the collective out of the module"
                )
            attends = any(word in str(node.target) for word in _ATTENTION)
            # positions of other chunks cannot be seen; a tensor over pairs of positions differs in two extents
            if config.chunk_dim == SEQUENCE and (attends or len(twins.dims.get(node, ())) > 1):
                raise ChunkError(
                    f"{described(node)} is attention inside {root}, which is chunked by {SEQUENCE}: positions would "
                    "not see those of other chunks; chunk it by batch"
                )
            for source in node.all_input_nodes if region.key.direction == FORWARD else ():
                if direction(source) == BACKWARD:
                    raise ChunkError(
                        f"{described(node)} in the forward of {root} reads {described(source)} of the backward: "
                        "which chunk's value it would be cannot be told; mark recomputed nodes as the backward's"
                    )
            _check_fixed_extent(node, region, twins)


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
    if inward and any(a == b == extent for a, b in zip(value.shape[:dim], part.shape[:dim], strict=True)):
        raise ChunkError(
            f"{described(node)} in {region.key.root} has the full extent {extent} as a fixed number: a chunk of "
            f"{list(twins.part_of[source].meta['val'].shape)} would become {list(part.shape)}. Write x.shape[{given}], "
            "or -1, in its place"
        )


_logger = logging.getLogger(__name__)


def chunk_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    config: ChunkConfig,
    twin: fx.GraphModule | None = None,
) -> fx.GraphModule:
    """A new graph in which the regions that ``config`` names run in chunks; the given ones are only read.

    Its ``meta["gt_chunking"]`` holds the ``ChunkCounts``, which are logged for debugging, too.

    Args:
        example_inputs: of a symbolic graph, for the extents; by default those of the traced example.
        twin: the graph of the same step at the extent of one chunk, after the same passes;
            ``trace_step(..., chunk=config)`` makes it. A symbolic graph needs none: it is its own twin at
            two extents.

    Raises:
        ChunkError: what cannot be chunked, by module, node and extent, and what to do about it.
    """
    twins = (gm, twin) if twin is not None else symbolic_twins(gm, example_inputs, config)
    if twins is None:
        raise ChunkError(
            "a graph of static shapes is chunked with its twin, the same step at the extent of one chunk: trace with "
            "trace_step(..., chunk=config) and give twin=traced.twin"
        )
    try:
        aligned = Twins(*twins, config.num_chunks)
        check_extents(aligned, config)
        storages = Storages(aligned.full.graph)
        regions = find_regions(aligned, config, storages)
        check_bodies(aligned, regions, config)
        made = Rewrite(aligned, regions, storages, config.dim).run()
    except ChunkError as error:
        extent = f", of extent {found}" if (found := _extent(*twins)) is not None else ""
        error.add_note(
            f"while {config.module_fqn} was chunked by {config.chunk_dim}{extent}, into {config.num_chunks} chunks"
        )
        raise
    counts = made.meta[CHUNKING]
    _logger.debug("%s matches %s", config, ", ".join(dict.fromkeys(root for root, _ in counts.body_nodes)))
    for (root, way), size in counts.body_nodes.items():
        _logger.debug("%s/%s: %d nodes a chunk", root, way, size)
    told = "live-ins split: %d; live-outs joined: %d, added: %d; handed on chunk by chunk: %d"
    _logger.debug(told, counts.split, counts.joined, counts.added, counts.handed_on)
    return made


def _extent(full: fx.GraphModule, part: fx.GraphModule) -> int | None:
    """The chunk dimension's, as the first input that has it tells."""
    pairs = zip(full.graph.find_nodes(op="placeholder"), part.graph.find_nodes(op="placeholder"), strict=False)
    shapes = ((getattr(node.meta.get("val"), "shape", ()) for node in pair) for pair in pairs)
    return next((a for ours, theirs in shapes for a, b in zip(ours, theirs, strict=False) if a != b), None)
