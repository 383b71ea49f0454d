"""The pass that chunks regions of a joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from pytest_gtrainer.passes.chunking.config import ChunkConfig
from pytest_gtrainer.passes.chunking.errors import ChunkError
from pytest_gtrainer.passes.chunking.regions import find_regions
from pytest_gtrainer.passes.chunking.rewrite import Rewrite
from pytest_gtrainer.passes.chunking.storages import Storages
from pytest_gtrainer.passes.chunking.twins import Twins


def chunk_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    config: ChunkConfig,
    twin: fx.GraphModule | None = None,
) -> fx.GraphModule:
    """A new graph in which the regions that ``config`` names run in chunks; the given ones are only read.

    Args:
        twin: the graph of the same step at the extent of one chunk, after the same passes;
            ``trace_step(..., chunk=config)`` makes it.

    Raises:
        ChunkError: what cannot be chunked, by module, node and extent, and what to do about it.
    """
    if twin is None:
        raise ChunkError(
            "a graph of static shapes is chunked with its twin, the same step at the extent of one chunk: trace with "
            "trace_step(..., chunk=config) and give twin=traced.twin"
        )
    twins = Twins(gm, twin, config.num_chunks)
    storages = Storages(gm.graph)
    regions = find_regions(twins, config, storages)
    return Rewrite(twins, regions, storages, config.dim).run()
