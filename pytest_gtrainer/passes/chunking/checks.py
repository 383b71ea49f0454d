"""What is refused before anything is made, each by module, node and extent (G3, G8, G10)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from pytest_gtrainer._torch.operators import OpOverload
from pytest_gtrainer._torch.passes import ALL_TO_ALL, WAIT, is_collective
from pytest_gtrainer.graph.conventions import BACKWARD, FORWARD, direction
from pytest_gtrainer.passes.chunking.config import SEQUENCE, ChunkConfig
from pytest_gtrainer.passes.chunking.errors import ChunkError, described
from pytest_gtrainer.passes.chunking.reductions import gradient_reductions
from pytest_gtrainer.passes.chunking.regions import Region
from pytest_gtrainer.passes.chunking.twins import Twins

aten = torch.ops.aten
_ATTENTION = ("scaled_dot_product", "flex_attention")
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
}


def check_extents(twins: Twins, config: ChunkConfig) -> None:
    """The graphs' inputs are N to 1 in the chunk dimension, or equal (G9).

    Raises:
        ChunkError: an extent that does not divide, or a twin at another extent.
    """
    differing = 0
    for node in twins.full.graph.find_nodes(op="placeholder"):
        if not twins.carries(node):
            continue
        differing += 1
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
    """Nothing in a body that cannot run once per chunk.

    Raises:
        ChunkError: a collective that is not expert-parallel, attention in a region chunked by sequence, a
            forward that reads the backward, or a fixed full extent.
    """
    reductions = gradient_reductions(twins.full.graph)
    for region in regions:
        for node in region.body:
            _check_collective(node, region, reductions)
            _check_attention(node, region, twins, config)
            _check_direction(node, region)
            _check_fixed_extent(node, region, twins)


def _check_collective(node: fx.Node, region: Region, reductions: set[fx.Node]) -> None:
    """G8."""
    if not isinstance(node.target, OpOverload) or not is_collective(node.target):
        return
    if node.target in (ALL_TO_ALL, WAIT) or node in reductions:
        return
    raise ChunkError(
        f"{described(node)} is a collective that the chunk dimension reaches inside {region.key.root}. Only "
        "all-to-alls of expert parallelism and reductions of parameter gradients may run once per chunk, tensor "
        "parallelism may not: chunk modules without it, or take the collective out of the module"
    )


def _check_attention(node: fx.Node, region: Region, twins: Twins, config: ChunkConfig) -> None:
    """G3: chunks by sequence cannot see each other's positions; a tensor over pairs of these differs in two extents."""
    if config.chunk_dim != SEQUENCE:
        return
    if any(word in str(node.target) for word in _ATTENTION) or len(twins.differing_dims(node)) > 1:
        raise ChunkError(
            f"{described(node)} is attention inside {region.key.root}, which is chunked by {SEQUENCE}: positions would "
            "not see those of other chunks; chunk it by batch"
        )


def _check_direction(node: fx.Node, region: Region) -> None:
    """G8."""
    if region.key.direction != FORWARD:
        return
    for source in node.all_input_nodes:
        if direction(source) == BACKWARD:
            raise ChunkError(
                f"{described(node)} in the forward of {region.key.root} reads {described(source)} of the backward: "
                "which chunk's value it would be cannot be told; mark recomputed nodes as the backward's"
            )


def _check_fixed_extent(node: fx.Node, region: Region, twins: Twins) -> None:
    """G10: a reshape with the full extent as a fixed number still runs on a chunk, and cuts it otherwise."""
    if node.target not in _RESHAPES:
        return
    source = node.all_input_nodes[0]
    dims, given_dims = twins.differing_dims(node), twins.differing_dims(source)
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
