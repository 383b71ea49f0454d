"""What nodes of chunked regions carry in ``meta["custom"]``, whoever chunked them (G11, I3)."""

from __future__ import annotations

from typing import Any

CHUNK_ID = "chunk_id"
REGION_FQN = "chunked_region_fqn"
ROLE = "chunked_region_role"
PRODUCER = "chunked_region_producer"

SPLIT_BOUNDARY = "split_boundary"
BODY = "body"
MATERIALIZATION = "materialization"

EAGER = "eager"
GRAPH = "graph"


def annotation(fqn: str, role: str, producer: str, chunk_id: int | None = None) -> dict[str, Any]:
    """The keys of one node; those of a boundary have no ``chunk_id``."""
    keys: dict[str, Any] = {REGION_FQN: fqn, ROLE: role, PRODUCER: producer}
    return keys if chunk_id is None else {CHUNK_ID: chunk_id, **keys}
