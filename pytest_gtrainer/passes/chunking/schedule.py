"""Interleave the chunks of a region, so that the all-to-alls of one run while another computes.

*Idea.* A *stage* of a chunk ends with the launch of an exchange; the next one begins with its wait.
Stage 0 of every chunk comes first, then stage 1; forwards chunk 0 first, backwards the last.
*Invariant.* What reads, writes or draws random numbers keeps its order, so no bit changes.
*Source.* The dispatch and combine overlap of expert-parallel trainers (DeepSeek-V3 technical
report, 3.2). *Cost.* Linear in nodes and edges, and a heap.
"""

import graphlib
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from torch import fx

from pytest_gtrainer._torch.passes import ALL_TO_ALL
from pytest_gtrainer.graph.collectives import group_of
from pytest_gtrainer.graph.nodes import chunk_annotation, direction, is_random, node_fqn
from pytest_gtrainer.passes.chunking.config import ChunkError, describe
from pytest_gtrainer.passes.chunking.regions import Region, RegionKey, Storages
from pytest_gtrainer.passes.graph_pass import graph_pass

Unit: TypeAlias = fx.Node | Region


def units_in_order(
    nodes: Sequence[fx.Node], region_of: Mapping[fx.Node, Region], storages: Storages
) -> list[Unit]:
    """Return nodes and regions, each once, after all that they depend on.

    Raises:
        ChunkError: a region depends on itself, as its values leave the module and come back.
    """
    places: dict[Unit, int] = {}
    for place, node in enumerate(nodes):
        places.setdefault(region_of.get(node, node), place)
    before = dependencies(nodes, region_of, storages)
    ordered = dict.fromkeys(_sort_topologically(before, places))
    for region in before:
        if isinstance(region, Region) and region not in ordered:
            unit = next(source for source in before[region] if source not in ordered)
            through = unit if isinstance(unit, fx.Node) else unit.body[0]
            raise ChunkError(
                f"the {region.key.direction} region of {region.key.root} leaves and re-enters the "
                f"module: it depends on {describe(through)}, which depends on it. Move what lies "
                "between into the module, or out of it"
            )
    return list(ordered)


def _sort_topologically(
    before: Mapping[Unit, Collection[Unit]], places: Mapping[Unit, Any]
) -> Iterator[Unit]:
    """Yield units after those ``before`` them; of several that are ready, the first by place.

    Units on a cycle, and after one, are left out.
    """
    sorter = graphlib.TopologicalSorter(before)
    with suppress(graphlib.CycleError):  # the sorter yields what is in front of the cycle
        sorter.prepare()
    ready: list[tuple[Any, Unit]] = []
    while sorter.is_active():
        for unit in sorter.get_ready():
            heapq.heappush(ready, (places[unit], unit))
        _, unit = heapq.heappop(ready)
        yield unit
        sorter.done(unit)


def dependencies(
    nodes: Sequence[fx.Node], region_of: Mapping[fx.Node, Region], storages: Storages
) -> dict[Unit, dict[Unit, None]]:
    """Return what each unit must stand after: its operands, and what orders memory and draws.

    A reader of memory stands after its last writer, a writer after the readers since, and a
    random draw after the one before. The values of the inner dicts are not used.
    """
    before: dict[Unit, dict[Unit, None]] = {}
    writer: dict[fx.Node, Unit] = {}
    readers: dict[fx.Node, list[Unit]] = {}
    written: set[fx.Node] = set()
    for storages_of_writer in storages.written.values():
        written.update(storages_of_writer)
    drawer: Unit | None = None
    for node in nodes:
        unit = region_of.get(node, node)
        sources = before.setdefault(unit, {})
        for source in node.all_input_nodes:
            sources[region_of.get(source, source)] = None
            storage = storages.of[source]
            if storage in written:
                # It reads what was last written, and is done before the next write.
                if storage in writer:
                    sources[writer[storage]] = None
                readers.setdefault(storage, []).append(unit)
        for storage in storages.written.get(node, ()):
            sources.update(dict.fromkeys(readers.pop(storage, ())))
            writer[storage] = unit
        # All draws advance one generator, so their order decides the numbers.
        if is_random(node):
            if drawer is not None:
                sources[drawer] = None
            drawer = unit
        sources.pop(unit, None)
    return before


Turn = tuple[int, ...]
"""A key by which nodes are sorted: the node's place; in a chunk the place of its region, the stage,
the chunk's number in the order of the region, and the node's place."""


@graph_pass
def chunk_schedule_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Let the chunks of every region with all-to-alls take turns, in place.

    The graph may be ``chunk_pass``'s, or the trace of a model under ``eager_chunked``.

    Raises:
        ChunkError: an all-to-all of a chunked module belongs to no chunk, or chunks have different
            ones.
    """
    nodes = list(gm.graph.nodes)
    output = nodes[-1]
    turns = _turns(nodes, _chunks_with_exchanges(nodes))
    before = dependencies(nodes, {}, Storages(gm.graph))
    del before[output]  # it stays the last one, whether or not it reads everything
    ordered = [*_sort_topologically(before, turns), output]
    if ordered == nodes:
        return False
    for node in ordered[:-1]:
        output.prepend(node)
    return True


def _chunks_with_exchanges(nodes: Sequence[fx.Node]) -> list[dict[int, list[fx.Node]]]:
    """Return the regions with all-to-alls, from the annotations of nodes: per chunk its nodes."""
    regions: dict[RegionKey, dict[int, list[fx.Node]]] = {}
    of_no_chunk: list[fx.Node] = []
    for node in nodes:
        if node.op == "placeholder":
            continue  # a backward graph's saved activation keeps the annotation of its forward
        annotated = chunk_annotation(node.meta.get("custom") or {})
        if annotated is not None and annotated.chunk_id is not None:
            region = regions.setdefault(RegionKey(annotated.fqn, direction(node)), {})
            region.setdefault(annotated.chunk_id, []).append(node)
        elif annotated is None and node.target is ALL_TO_ALL:
            of_no_chunk.append(node)
    for node in of_no_chunk:
        for key in regions:
            if f"{node_fqn(node)}.".startswith(f"{key.root}."):
                raise ChunkError(
                    f"{describe(node)} is an exchange of the chunked module {key.root}, but no "
                    "chunk's: its annotation was lost on the way; keep meta['custom'] in the "
                    "passes before this one"
                )
    return [region for key, region in regions.items() if _has_exchanges(key, region)]


def _has_exchanges(key: RegionKey, region: Mapping[int, Sequence[fx.Node]]) -> bool:
    """Return whether chunks have all-to-alls; refuse chunks that have different ones."""
    exchanges: dict[int, list[str]] = {}
    for chunk, nodes in region.items():
        exchanges[chunk] = [
            f"{node.target} in {node_fqn(node)} over group {group_of(node)!r}"
            for node in nodes
            if node.target is ALL_TO_ALL
        ]
    (first, ours), *others = exchanges.items()
    for chunk, theirs in others:
        if ours != theirs:
            raise ChunkError(
                f"the chunks of {key.root} ({key.direction}) do not have the same exchanges and "
                f"cannot take turns: chunk {first} has {', '.join(ours) or 'none'}, chunk {chunk} "
                f"has {', '.join(theirs) or 'none'}"
            )
    return bool(ours)


def _turns(
    nodes: Sequence[fx.Node], regions: Sequence[dict[int, list[fx.Node]]]
) -> dict[Unit, Turn]:
    """Return the turn of every node, by stages within the regions."""
    places = {node: place for place, node in enumerate(nodes)}
    turns: dict[Unit, Turn] = {node: (place,) for node, place in places.items()}
    chunked: set[fx.Node] = set()
    for region in regions:
        start = min(places[chunk[0]] for chunk in region.values())
        for number, chunk in enumerate(region.values()):
            stage = 0
            for node in chunk:
                turns[node] = (start, stage, number, places[node])
                # The launch still belongs to its stage; its wait comes in the next one, after the
                # compute of the other chunks.
                stage += node.target is ALL_TO_ALL
            chunked.update(chunk)
    for node in nodes:
        # Autograd's additions name no module: they take their turn with the latest chunk they read.
        read = [turns[source] for source in node.all_input_nodes if source in chunked]
        if read and node not in chunked and not node_fqn(node):
            turns[node] = (*max(read)[:3], places[node])
            chunked.add(node)
    return turns
