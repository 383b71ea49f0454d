"""Who uses what until when, in a graph cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from pytest_gtrainer.worlds.simulated.interpreter.collective_calls import passes_through


def source_of(node: fx.Node) -> fx.Node:
    """The node whose value this one has: what a wait waits for, else itself."""
    while passes_through(node):
        node = node.all_input_nodes[0]
    return node


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
