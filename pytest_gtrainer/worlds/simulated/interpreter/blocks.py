"""Blocks: plain operators between two collectives, replayed rank by rank.

Idea: all of a rank's nodes run before the next rank's, as one generated function. What a rank needs only
inside is gone before the next rank allocates, so memory does not grow with ranks, and the caches stay warm.
Nodes are sorted into blocks by kind: what all ranks share runs once, what a group shares once a group.

What the ranks are about to reduce lies side by side in one *scratch* buffer that serves all reductions: a new one
each time would cost more than the reduction, as the operating system has to clear it.

Invariant: nothing in a block draws random numbers, writes to its operands or communicates, so the order of
ranks cannot matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer.worlds.simulated.interpreter.operators import described, source_of
from pytest_gtrainer.worlds.simulated.interpreter.values import Kind, Kinds, PerRank, Values, at

ALIGNMENT = 64


class Lifetimes:
    """The pieces of a graph that use each value; the output counts as one more piece at the end."""

    def __init__(self, graph: fx.Graph, pieces: Sequence[Sequence[fx.Node]]) -> None:
        self._pieces = pieces
        self._users: dict[fx.Node, set[int]] = {node: set() for node in graph.find_nodes(op="placeholder")}
        for index, piece in enumerate([*pieces, [graph.output_node()]]):
            for node in piece:
                self._users.setdefault(node, set())
                for given in node.all_input_nodes:
                    self._users[source_of(given)].add(index)

    def needed(self, piece: int) -> frozenset[fx.Node]:
        """Nodes of the piece that a later one uses."""
        return frozenset(node for node in self._pieces[piece] if max(self._users[node], default=piece) > piece)

    def dying(self, piece: int) -> frozenset[fx.Node]:
        """Nodes of the piece, or before it, that no later one uses."""
        own = {node for node in self._pieces[piece] if max(self._users[node], default=piece) <= piece}
        used = {source_of(given) for node in self._pieces[piece] for given in node.all_input_nodes}
        return frozenset(own | {node for node in used if max(self._users[node]) <= piece})

    def only_in(self, piece: int, node: fx.Node) -> bool:
        """Whether nobody but that piece uses the node."""
        return self._users[node] == {piece}


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of plain nodes in a graph.

    Attributes:
        inputs: nodes before it that it uses.
        needed: nodes of it that somebody behind it uses.
        dying: nodes, of it or before it, that nobody behind it uses.
        reduced: nodes that only the reduction right behind it uses, and the order in which it wants its ranks.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    needed: frozenset[fx.Node]
    dying: frozenset[fx.Node]
    reduced: Mapping[fx.Node, Sequence[int]]


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes before these that they use, each once."""
    own = set(nodes)
    used = (source_of(given) for node in nodes for given in node.all_input_nodes)
    return list(dict.fromkeys(given for given in used if given not in own))


@dataclass(frozen=True, slots=True)
class OperatorBlock:
    """Nodes of one kind, as one function from the values of ``inputs`` to those of ``outputs``."""

    kind: Kind
    graph: fx.GraphModule
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    dying: frozenset[fx.Node]
    reduced: Mapping[fx.Node, Sequence[int]]

    def run(self, values: Values, scratch: Scratch, kinds: Kinds) -> None:
        """Add the values of ``outputs`` to ``values``."""
        given = [values[node] for node in self.inputs]
        dying = [values[node] for node in self.inputs if node in self.dying and type(values[node]) is PerRank]
        results: list[list[Any]] = [[None] * kinds.size for _ in self.outputs]
        rows = [_Rows(self.reduced[node], scratch) if node in self.reduced else None for node in self.outputs]
        for ranks in self.kind.classes:
            own = self._call([at(value, ranks[0]) for value in given], ranks[0])
            for index, result in enumerate(own):
                row = rows[index]
                kept = result if row is None else row.keep(result, ranks[0])
                for rank in ranks:
                    results[index][rank] = kept
            for value in dying:
                for rank in ranks:
                    value[rank] = None
        for node, result in zip(self.outputs, results, strict=True):
            values[node] = result[0] if self.kind is kinds.uniform else PerRank(result, self.kind)

    def _call(self, own: list[Any], rank: int) -> Sequence[Any]:
        try:
            return self.graph.forward(*own)
        except Exception as error:
            finder = _Finder(self.graph)  # runs one node after the other: nothing here has effects
            with suppress(Exception):
                finder.run(*own)
            error.add_note(f"in {described(finder.last)}, for rank {rank}")
            raise


class Scratch:
    """One buffer, cut into rows until it is given back; a payload is given up as soon as it is reduced."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def rows(self, count: int, like: Tensor) -> Tensor:
        """``[count, *like.shape]`` of uninitialised memory."""
        size = count * like.numel() * like.itemsize
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + size > self._buffer.numel():
            if self._used:
                return like.new_empty(count, *like.shape)
            start, self._buffer = 0, torch.empty(size, dtype=torch.uint8)
        self._used = start + size
        return self._buffer[start : start + size].view(like.dtype).view(count, *like.shape)

    def give_back(self) -> None:
        """Nobody reads the rows any more."""
        self._used = 0


class _Rows:
    """Copies of what the ranks are about to reduce, side by side in the order of their group."""

    def __init__(self, order: Sequence[int], scratch: Scratch) -> None:
        self._place = {rank: place for place, rank in enumerate(order)}
        self._scratch = scratch
        self._rows: Tensor | None = None

    def keep(self, result: Tensor, rank: int) -> Tensor:
        if self._rows is None:
            self._rows = self._scratch.rows(len(self._place), result)
        if result.shape != self._rows.shape[1:] or result.dtype != self._rows.dtype:
            return result  # the ranks disagree, which the reduction will say
        return self._rows[self._place[rank]].copy_(result)


class _Finder(fx.Interpreter):
    """Remembers the node that it runs."""

    last: fx.Node

    def run_node(self, n: fx.Node) -> Any:
        self.last = n
        return super().run_node(n)


def blocks_of(segment: Segment, kind_of: Mapping[fx.Node, Kind], kinds: Kinds) -> list[OperatorBlock]:
    """The blocks of a segment whose inputs are of these kinds, coarser kinds first: they use nothing of finer ones."""
    known = dict(kind_of)
    by_kind: dict[Kind, list[fx.Node]] = {}
    for node in segment.nodes:
        known[node] = kinds.common(known[source_of(given)] for given in node.all_input_nodes)
        by_kind.setdefault(known[node], []).append(node)
    parts = sorted(by_kind.items(), key=lambda part: len(part[0].classes))
    inputs = [inputs_of(nodes) for _, nodes in parts]
    return [
        _block(segment, kind, nodes, inputs[index], {node for later in inputs[index + 1 :] for node in later})
        for index, (kind, nodes) in enumerate(parts)
    ]


def _block(
    segment: Segment, kind: Kind, nodes: list[fx.Node], inputs: list[fx.Node], used_later: set[fx.Node]
) -> OperatorBlock:
    outputs = [node for node in nodes if node in segment.needed or node in used_later]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda given: copies[source_of(given)])
    graph.output(tuple(copies[node] for node in outputs))
    return OperatorBlock(
        kind,
        fx.GraphModule(torch.nn.Module(), graph),
        inputs,
        outputs,
        frozenset(node for node in inputs if node in segment.dying and node not in used_later),
        {node: segment.reduced[node] for node in outputs if node in segment.reduced and node not in used_later},
    )
