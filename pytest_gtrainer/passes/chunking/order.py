"""The order of the new graph: each body as a whole, everything else where it was as far as possible.

*Idea.* Contract each body to one unit and sort topologically, the unit first whose first node stood first.
Besides results, units depend on each other by what they do to memory and by random numbers, in the order of
the given graph. *Cost.* Linear in nodes and edges, and a heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import fx

from pytest_gtrainer.graph.effects import is_random
from pytest_gtrainer.passes.chunking.errors import ChunkError, described
from pytest_gtrainer.passes.chunking.regions import Region
from pytest_gtrainer.passes.chunking.storages import Storages

Unit: TypeAlias = fx.Node | Region


def units_in_order(nodes: Sequence[fx.Node], region_of: Mapping[fx.Node, Region], storages: Storages) -> Iterator[Unit]:
    """Nodes and regions, each once, after all that they depend on.

    Raises:
        ChunkError: a region depends on what depends on it (G17).
    """
    places: dict[Unit, int] = {}
    for place, node in enumerate(nodes):
        places.setdefault(region_of.get(node, node), place)
    before = dependencies(nodes, region_of, storages)
    readers: dict[Unit, list[Unit]] = {}
    waiting = {unit: len(sources) for unit, sources in before.items()}
    for unit, sources in before.items():
        for source in sources:
            readers.setdefault(source, []).append(unit)
    ready = [(places[unit], unit) for unit, count in waiting.items() if not count]
    heapq.heapify(ready)
    done = 0
    while ready:
        _, unit = heapq.heappop(ready)
        done += 1
        yield unit
        for reader in readers.get(unit, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (places[reader], reader))
    if done < len(waiting):
        raise _re_entrant([unit for unit, count in waiting.items() if count], before, waiting)


def dependencies(
    nodes: Sequence[fx.Node], region_of: Mapping[fx.Node, Region], storages: Storages
) -> dict[Unit, dict[Unit, None]]:
    """What each unit must stand behind: what it reads, and by memory and random numbers what the order decides."""
    before: dict[Unit, dict[Unit, None]] = {}
    writer: dict[fx.Node, Unit] = {}
    readers: dict[fx.Node, list[Unit]] = {}
    written = {storage for found in storages.written.values() for storage in found}
    drawer: Unit | None = None
    for node in nodes:
        unit = region_of.get(node, node)
        sources = before.setdefault(unit, {})
        sources.update((region_of.get(source, source), None) for source in node.all_input_nodes)
        for storage in {storages.of[source] for source in node.all_input_nodes} & written if written else ():
            if storage in writer:
                sources[writer[storage]] = None
            readers.setdefault(storage, []).append(unit)
        for storage in storages.written.get(node, ()):
            sources.update((reader, None) for reader in readers.pop(storage, ()))
            writer[storage] = unit
        if is_random(node):
            if drawer is not None:
                sources[drawer] = None
            drawer = unit
        sources.pop(unit, None)
    return before


def _re_entrant(
    stuck: list[Unit], before: Mapping[Unit, Mapping[Unit, None]], waiting: Mapping[Unit, int]
) -> ChunkError:
    region = next(unit for unit in stuck if isinstance(unit, Region))
    unit = next(source for source in before[region] if waiting[source])
    through = unit if isinstance(unit, fx.Node) else unit.body[0]
    home = f"the {region.key.direction} region of {region.key.root}"
    return ChunkError(
        f"{home} leaves and re-enters the module: it depends on {described(through)}, which depends on it. "
        "Move what lies between into the module, or out of it"
    )
