"""The pass that chunks regions of a joint graph."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import fx

from pytest_gtrainer.passes.chunking.checks import check_bodies, check_extents
from pytest_gtrainer.passes.chunking.config import ChunkConfig
from pytest_gtrainer.passes.chunking.errors import ChunkError
from pytest_gtrainer.passes.chunking.regions import find_regions
from pytest_gtrainer.passes.chunking.rewrite import CHUNKING, ChunkCounts, Rewrite
from pytest_gtrainer.passes.chunking.storages import Storages
from pytest_gtrainer.passes.chunking.symbolic import symbolic_twins
from pytest_gtrainer.passes.chunking.twins import Twins

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
    full, part = (gm, twin) if twin is not None else _twins_of_symbols(gm, example_inputs, config)
    try:
        made = _rewritten(full, part, config)
    except ChunkError as error:
        extent = f", of extent {found}" if (found := _extent(full, part)) is not None else ""
        error.add_note(
            f"while {config.module_fqn} was chunked by {config.chunk_dim}{extent}, into {config.num_chunks} chunks"
        )
        raise
    _log(made.meta[CHUNKING], config)
    return made


def _rewritten(full: fx.GraphModule, part: fx.GraphModule, config: ChunkConfig) -> fx.GraphModule:
    twins = Twins(full, part, config.num_chunks)
    check_extents(twins, config)
    storages = Storages(full.graph)
    regions = find_regions(twins, config, storages)
    check_bodies(twins, regions, config)
    return Rewrite(twins, regions, storages, config.dim).run()


def _extent(full: fx.GraphModule, part: fx.GraphModule) -> int | None:
    """The chunk dimension's, as the first input that has it tells."""
    pairs = zip(full.graph.find_nodes(op="placeholder"), part.graph.find_nodes(op="placeholder"), strict=False)
    shapes = ((getattr(node.meta.get("val"), "shape", ()) for node in pair) for pair in pairs)
    return next((a for ours, theirs in shapes for a, b in zip(ours, theirs, strict=False) if a != b), None)


def _twins_of_symbols(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None, config: ChunkConfig
) -> tuple[fx.GraphModule, fx.GraphModule]:
    twins = symbolic_twins(gm, example_inputs, config)
    if twins is None:
        raise ChunkError(
            "a graph of static shapes is chunked with its twin, the same step at the extent of one chunk: trace with "
            "trace_step(..., chunk=config) and give twin=traced.twin"
        )
    return twins


def _log(counts: ChunkCounts, config: ChunkConfig) -> None:
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    roots = dict.fromkeys(root for root, _ in counts.body_nodes)
    _logger.debug("%s matches %s", config, ", ".join(roots))
    for (root, direction), size in counts.body_nodes.items():
        _logger.debug("%s/%s: %d nodes a chunk", root, direction, size)
    _logger.debug(
        "live-ins split: %d; live-outs joined: %d, added: %d; handed on chunk by chunk: %d",
        *(counts.split, counts.joined, counts.added, counts.handed_on),
    )
