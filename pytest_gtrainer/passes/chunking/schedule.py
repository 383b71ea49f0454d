"""Interleave the chunks of a region, so that one's all-to-alls run while another computes.

*Idea.* A *stage* ends with the launch of an exchange, the next begins with its wait. Stage 0 of every chunk comes
first, then stage 1; forwards chunk 0 first, backwards the last. *Invariant.* What reads, writes or draws random numbers
keeps its order, so no bit changes. *Source.* The dispatch and combine overlap of expert-parallel trainers (DeepSeek-V3
technical report, 3.2). *Cost.* Linear in nodes and edges, and a heap.
"""

import graphlib
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from torch import fx

from pytest_gtrainer._torch.passes import ALL_TO_ALL
from pytest_gtrainer.graph.nodes import direction, is_random, node_fqn, told_by
from pytest_gtrainer.passes.chunking.config import ChunkError, described
from pytest_gtrainer.passes.chunking.regions import Region, RegionKey, Storages
from pytest_gtrainer.passes.graph_pass import graph_pass

Unit: TypeAlias = fx.Node | Region


def units_in_order(
    nodes: Sequence[fx.Node], region_of: Mapping[fx.Node, Region], storages: Storages
) -> list[Unit]:
    """Nodes and regions, each once, after all that they depend on; refuses a region that depends on itself (G17)."""
    places: dict[Unit, int] = {}
    for place, node in enumerate(nodes):
        places.setdefault(region_of.get(node, node), place)
    before = dependencies(nodes, region_of, storages)
    ordered = dict.fromkeys(_in_order(before, places))
    if stuck := [unit for unit in before if unit not in ordered]:
        region = next(unit for unit in stuck if isinstance(unit, Region))
        unit = next(source for source in before[region] if source not in ordered)
        through = unit if isinstance(unit, fx.Node) else unit.body[0]
        raise ChunkError(
            f"the {region.key.direction} region of {region.key.root} leaves and re-enters the module: it depends on "
            f"{described(through)}, which depends on it. Move what lies between into the module, or out of it"
        )
    return list(ordered)


def _in_order(
    before: Mapping[Unit, Collection[Unit]], places: Mapping[Unit, Any]
) -> Iterator[Unit]:
    """A topological sort: of the units that depend on nothing that is left, the one whose place is first."""
    sorter = graphlib.TopologicalSorter(before)
    with suppress(graphlib.CycleError):  # what does not depend on itself comes all the same
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
        for storage in (
            {storages.of[source] for source in node.all_input_nodes} & written if written else ()
        ):
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


Turn = tuple[int, ...]
"""Where a node wants to stand: its place; of a chunk the place of its region, its stage, the chunk's rank, its own."""


@graph_pass
def chunk_schedule_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Let the chunks of every region with all-to-alls take turns, in place.

    The graph may be ``chunk_pass``'s, or the trace of a model under ``eager_chunked``.

    Raises:
        ChunkError: an all-to-all of a chunked module belongs to no chunk, or chunks have different ones.
    """
    nodes = list(gm.graph.nodes)
    output = nodes[-1]
    turns = _turns(nodes, _exchanging(nodes))
    before = dependencies(nodes, {}, Storages(gm.graph))
    del before[output]  # it stays the last one, whether or not it reads everything
    ordered = [*_in_order(before, turns), output]
    if ordered == nodes:
        return False
    for node in ordered[:-1]:
        output.prepend(node)
    return True


def _exchanging(nodes: Sequence[fx.Node]) -> list[dict[int, list[fx.Node]]]:
    """The regions with all-to-alls, as their nodes tell: per chunk its nodes, chunks and nodes in graph order."""
    regions: dict[RegionKey, dict[int, list[fx.Node]]] = {}
    loose: list[fx.Node] = []
    for node in nodes:
        given = (
            node.op == "placeholder"
        )  # of a backward: a chunk's saved activation, which stays where it is
        told = None if given else told_by(node.meta.get("custom") or {})
        if told is not None and told.chunk_id is not None:
            region = regions.setdefault(RegionKey(told.fqn, direction(node)), {})
            region.setdefault(told.chunk_id, []).append(node)
        elif told is None and node.target is ALL_TO_ALL:
            loose.append(node)
    for node, root in ((node, key.root) for node in loose for key in regions):
        if f"{node_fqn(node)}.".startswith(f"{root}."):
            raise ChunkError(
                f"{described(node)} is an exchange of the chunked module {root}, but no chunk's: its annotation "
                "was lost on the way; keep meta['custom'] in the passes before this one"
            )
    found = []
    for key, region in regions.items():
        exchanges = {
            chunk: [
                f"{n.target} in {node_fqn(n)} over group {n.args[-1]!r}"
                for n in part
                if n.target is ALL_TO_ALL
            ]
            for chunk, part in region.items()
        }
        (first, ours), *others = exchanges.items()
        for chunk, theirs in others:
            if ours != theirs:
                raise ChunkError(
                    f"the chunks of {key.root} ({key.direction}) do not have the same exchanges and cannot take turns: "
                    f"chunk {first} has {', '.join(ours) or 'none'}, chunk {chunk} has {', '.join(theirs) or 'none'}"
                )
        if ours:
            found.append(region)
    return found


def _turns(
    nodes: Sequence[fx.Node], regions: Sequence[dict[int, list[fx.Node]]]
) -> dict[Unit, Turn]:
    places = {node: place for place, node in enumerate(nodes)}
    turns: dict[Unit, Turn] = {node: (place,) for node, place in places.items()}
    chunked: set[fx.Node] = set()
    for region in regions:
        start = min(places[chunk[0]] for chunk in region.values())
        for rank, chunk in enumerate(region.values()):
            stage = 0
            for node in chunk:
                turns[node] = (start, stage, rank, places[node])
                stage += node.target is ALL_TO_ALL
            chunked.update(chunk)
    for node in nodes:
        # a node without a module, as autograd's additions are, takes its turn with the latest of a chunk that it reads
        read = [turns[source] for source in node.all_input_nodes if source in chunked]
        if read and node not in chunked and not node_fqn(node):
            turns[node] = (*max(read)[:3], places[node])
            chunked.add(node)
    return turns
