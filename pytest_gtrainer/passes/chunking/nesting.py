"""Chunked modules and buckets: one lies in the other, or they have nothing in common (G20)."""

from __future__ import annotations

from pytest_gtrainer.graph.bucket_plan import BucketPlan
from pytest_gtrainer.passes.chunking.config import MOE, ChunkConfig
from pytest_gtrainer.passes.chunking.errors import ChunkError


def check_nesting(plan: BucketPlan, config: ChunkConfig) -> None:
    """A bucket with modules of a chunked layer has modules of this layer alone.

    Its collectives would else hang on two regions, one of which runs in chunks long before the other.

    Raises:
        ChunkError: a bucket reaches out of a chunked layer, by both names.
    """
    for entry in plan:
        fqns = [entry] if isinstance(entry, str) else list(entry)
        for root in dict.fromkeys(root for fqn in fqns if (root := config.root_of(fqn))):
            layer = root.rpartition(".")[0] if config.kind == MOE else root
            beyond = [fqn for fqn in fqns if fqn != layer and not fqn.startswith(f"{layer}.")]
            if beyond:
                raise ChunkError(
                    f"the bucket [{', '.join(fqns)}] holds a part of the chunked {root} and, beyond {layer}, "
                    f"{', '.join(beyond)}: put what lies in {layer} into buckets of its own"
                )
