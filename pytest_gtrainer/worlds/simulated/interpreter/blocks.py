"""Blocks: plain operators between two collectives, replayed rank by rank.

Idea: all of a rank's nodes run before the next rank's, as one generated function. What a rank needs only
inside is gone before the next rank allocates, so memory does not grow with ranks, and the caches stay warm.
Nodes are sorted into blocks by kind: what all ranks share runs once, what a group shares once a group.

Invariant: nothing in a block draws random numbers, writes to its operands or communicates, so the order of
ranks cannot matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pytest_gtrainer.worlds.simulated.interpreter.lifetimes import source_of
from pytest_gtrainer.worlds.simulated.interpreter.memory import Values
from pytest_gtrainer.worlds.simulated.interpreter.naming import described
from pytest_gtrainer.worlds.simulated.interpreter.scratch import Scratch
from pytest_gtrainer.worlds.simulated.interpreter.values import Kind, Kinds, PerRank, at


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of plain nodes in a graph.

    Attributes:
        needed: nodes of it that somebody behind it uses.
        dying: nodes, of it or before it, that nobody behind it uses.
        reduced: nodes that only the reduction right behind it uses, and the order in which it wants its ranks.
        inputs: nodes before it that it uses.
    """

    nodes: Sequence[fx.Node]
    needed: frozenset[fx.Node]
    dying: frozenset[fx.Node]
    reduced: Mapping[fx.Node, Sequence[int]]

    inputs: Sequence[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", _inputs(self.nodes))


def _inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes before these that they use, each once."""
    own = set(nodes)
    used = (source_of(given) for node in nodes for given in node.all_input_nodes)
    return list(dict.fromkeys(given for given in used if given not in own))


@dataclass(frozen=True, slots=True)
class Block:
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
            error.add_note(f"in {self._failing(own)}, for rank {rank}")
            raise

    def _failing(self, own: list[Any]) -> str:
        """The node that raises, found by running one after the other: nothing here has effects."""
        finder = _Finder(self.graph)
        try:
            finder.run(*own)
        except Exception:
            return described(finder.last)
        return "no node of its own"


class _Rows:
    """Copies of what the ranks are about to reduce, side by side in the order of their group."""

    def __init__(self, order: Sequence[int], scratch: Scratch) -> None:
        self._place = {rank: place for place, rank in enumerate(order)}
        self._scratch = scratch
        self._rows: torch.Tensor | None = None

    def keep(self, result: torch.Tensor, rank: int) -> torch.Tensor:
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


def blocks_of(segment: Segment, kind_of: Mapping[fx.Node, Kind], kinds: Kinds) -> list[Block]:
    """The blocks of a segment whose inputs are of these kinds, coarser kinds first: they use nothing of finer ones."""
    known = dict(kind_of)
    by_kind: dict[Kind, list[fx.Node]] = {}
    for node in segment.nodes:
        known[node] = kinds.common(known[source_of(given)] for given in node.all_input_nodes)
        by_kind.setdefault(known[node], []).append(node)
    parts = sorted(by_kind.items(), key=lambda part: len(part[0].classes))
    inputs = [_inputs(nodes) for _, nodes in parts]
    return [
        _block(segment, kind, nodes, inputs[index], {node for later in inputs[index + 1 :] for node in later})
        for index, (kind, nodes) in enumerate(parts)
    ]


def _block(
    segment: Segment, kind: Kind, nodes: list[fx.Node], inputs: list[fx.Node], used_later: set[fx.Node]
) -> Block:
    outputs = [node for node in nodes if node in segment.needed or node in used_later]
    return Block(
        kind,
        _function(nodes, inputs, outputs),
        inputs,
        outputs,
        frozenset(node for node in inputs if node in segment.dying and node not in used_later),
        {node: segment.reduced[node] for node in outputs if node in segment.reduced and node not in used_later},
    )


def _function(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda given: copies[source_of(given)])
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(torch.nn.Module(), graph)
