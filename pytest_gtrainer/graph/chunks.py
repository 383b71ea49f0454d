"""What nodes of chunked regions carry in ``meta["custom"]``, whoever chunked them (G11, I3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHUNK_ID = "chunk_id"
REGION_FQN = "chunked_region_fqn"
ROLE = "chunked_region_role"
PRODUCER = "chunked_region_producer"

SPLIT_BOUNDARY = "split_boundary"
BODY = "body"
MATERIALIZATION = "materialization"

KEYS = (CHUNK_ID, REGION_FQN, ROLE, PRODUCER)
EAGER = "eager"
GRAPH = "graph"


def annotation(fqn: str, role: str, producer: str, chunk_id: int | None = None) -> dict[str, Any]:
    """The keys of one node; those of a boundary have no ``chunk_id``."""
    keys: dict[str, Any] = {REGION_FQN: fqn, ROLE: role, PRODUCER: producer}
    return keys if chunk_id is None else {CHUNK_ID: chunk_id, **keys}


@dataclass(frozen=True, slots=True)
class Told:
    """What a node's annotation says: the chunked module, the role there, who chunked it, and which chunk."""

    fqn: str
    role: str
    producer: str
    chunk_id: int | None

    def words(self) -> list[str]:
        """All but the module in the words of a graph text: the chunk of a body, else the role.

        >>> Told("layers.0", BODY, GRAPH, 1).words(), Told("layers.0", SPLIT_BOUNDARY, EAGER, None).words()
        (['1'], ['split_boundary', 'eager'])
        """
        place = self.role if self.chunk_id is None else str(self.chunk_id)
        return [place] if self.producer == GRAPH else [place, self.producer]


def told_by(custom: Mapping[Any, Any]) -> Told | None:
    """The annotation among a node's annotations, None if there is none that ``annotation`` made."""
    if ROLE not in custom:
        return None
    told = Told(custom.get(REGION_FQN, ""), custom[ROLE], custom.get(PRODUCER, ""), custom.get(CHUNK_ID))
    regular = told.fqn and told.role in (SPLIT_BOUNDARY, BODY, MATERIALIZATION) and told.producer in (EAGER, GRAPH)
    return told if regular and (told.role == BODY) == (told.chunk_id is not None) else None
