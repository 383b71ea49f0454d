"""Interleave the chunks of a region, so that one's all-to-alls run while another computes.

*Idea.* A chunk's part of a region falls into *stages*: each ends with the launch of an exchange, the next begins
with its wait. Stages take turns: stage 0 of every chunk, then stage 1 of every chunk; forwards chunk 0 first,
backwards the last one, as the chunks stand in the graph. The order is a topological sort by these turns.
*Invariant.* Every node stays, once; what reads, writes or draws random numbers keeps its order, so no bit changes.
*Source.* The dispatch and combine overlap of expert-parallel trainers (DeepSeek-V3 technical report, 3.2).
*Cost.* Linear in nodes and edges, and a heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from pytest_gtrainer._torch.passes import ALL_TO_ALL
from pytest_gtrainer.graph.chunks import BODY, told_by
from pytest_gtrainer.graph.nodes import direction, is_random, node_fqn
from pytest_gtrainer.passes.chunking.config import ChunkError, described
from pytest_gtrainer.passes.chunking.regions import Key, Region, Storages
from pytest_gtrainer.passes.graph_pass import graph_pass

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


Turn = tuple[int, int, int, int]
"""Where a node wants to stand: the place of its region, its stage, the chunk's rank there, its own place."""


@dataclass(slots=True)
class _Chunked:
    """A region as its nodes tell: per chunk its nodes, chunks and nodes in graph order."""

    chunks: dict[int, list[fx.Node]] = field(default_factory=dict)

    def exchanges(self) -> dict[int, list[fx.Node]]:
        return {chunk: [n for n in nodes if n.target is ALL_TO_ALL] for chunk, nodes in self.chunks.items()}


@graph_pass
def chunk_schedule_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Let the chunks of every region with all-to-alls take turns, in place.

    The graph may be ``chunk_pass``'s, or the trace of a model under ``eager_chunked``.

    Raises:
        ChunkError: an all-to-all of a chunked module belongs to no chunk, or chunks have different ones.
    """
    nodes = list(gm.graph.nodes)
    regions = _regions(nodes)
    _check_labels(nodes, regions)
    exchanging = {key: region for key, region in regions.items() if any(region.exchanges().values())}
    for key, region in exchanging.items():
        _check_equal(key, region)
    ordered = list(_in_turns(nodes, _turns(nodes, exchanging)))
    if ordered == nodes:
        return False
    *moving, output = ordered
    for node in moving:
        output.prepend(node)
    return True


def _regions(nodes: Sequence[fx.Node]) -> dict[Key, _Chunked]:
    regions: dict[Key, _Chunked] = {}
    for node in nodes:
        told = told_by(node.meta.get("custom") or {})
        if told is not None and told.role == BODY and told.chunk_id is not None:
            region = regions.setdefault(Key(told.fqn, direction(node)), _Chunked())
            region.chunks.setdefault(told.chunk_id, []).append(node)
    return regions


def _check_labels(nodes: Sequence[fx.Node], regions: Mapping[Key, _Chunked]) -> None:
    roots = {key.root for key in regions}
    for node in nodes:
        if node.target is not ALL_TO_ALL or told_by(node.meta.get("custom") or {}) is not None:
            continue
        fqn = node_fqn(node)
        root = next((root for root in roots if fqn == root or fqn.startswith(f"{root}.")), None)
        if root is not None:
            raise ChunkError(
                f"{described(node)} is an exchange of the chunked module {root}, but no chunk's: its annotation "
                "was lost on the way; keep meta['custom'] in the passes before this one"
            )


def _check_equal(key: Key, region: _Chunked) -> None:
    first, *others = region.exchanges().items()
    for chunk, launches in others:
        ours, theirs = [_label(launch) for launch in first[1]], [_label(launch) for launch in launches]
        if ours != theirs:
            raise ChunkError(
                f"the chunks of {key.root} ({key.direction}) do not have the same exchanges and cannot take turns: "
                f"chunk {first[0]} has {', '.join(ours) or 'none'}, chunk {chunk} has {', '.join(theirs) or 'none'}"
            )


def _label(launch: fx.Node) -> str:
    return f"{launch.target} in {node_fqn(launch)} over group {launch.args[-1]!r}"


def _turns(nodes: Sequence[fx.Node], regions: Mapping[Key, _Chunked]) -> dict[fx.Node, Turn]:
    places = {node: place for place, node in enumerate(nodes)}
    turns: dict[fx.Node, Turn] = {node: (place, 0, 0, 0) for node, place in places.items()}
    for region in regions.values():
        start = min(places[chunk[0]] for chunk in region.chunks.values())
        for rank, chunk in enumerate(region.chunks.values()):
            stage = 0
            for node in chunk:
                turns[node] = (start, stage, rank, places[node])
                stage += node.target is ALL_TO_ALL
    chunked = {node for region in regions.values() for chunk in region.chunks.values() for node in chunk}
    for node in nodes:
        if node not in chunked and not node_fqn(node):
            _follow(node, turns, chunked)
    return turns


def _follow(node: fx.Node, turns: dict[fx.Node, Turn], chunked: set[fx.Node]) -> None:
    """A node without a module, as autograd's additions are, takes its turn with the latest of a chunk that it reads."""
    latest = max((turns[source] for source in node.all_input_nodes if source in chunked), default=None)
    if latest is not None:
        start, stage, rank, _ = latest
        turns[node] = (start, stage, rank, turns[node][0])
        chunked.add(node)


def _in_turns(nodes: Sequence[fx.Node], turns: Mapping[fx.Node, Turn]) -> Iterator[fx.Node]:
    """The nodes by their turns, as far as what they depend on allows."""
    before = dependencies(nodes, {}, Storages(nodes[0].graph))
    readers: dict[fx.Node, list[fx.Node]] = {}
    waiting = {}
    for node in nodes:
        sources = [source for source in before[node] if isinstance(source, fx.Node)]
        waiting[node] = len(sources)
        for source in sources:
            readers.setdefault(source, []).append(node)
    output = nodes[-1]
    waiting[output] += 1  # it stays the last one, whether or not it reads everything
    ready = [(turns[node], node) for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        yield node
        for reader in readers.get(node, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (turns[reader], reader))
    yield output
