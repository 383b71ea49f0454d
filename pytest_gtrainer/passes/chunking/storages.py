"""Which values share memory, and who writes to it.

The *storage* of a value is told by the node that made it: a view, a part of several results and the
result of a write have that of their operand. One walk over the graph.
"""

from __future__ import annotations

import operator

from torch import fx

from pytest_gtrainer._torch.chunking import returns_an_operand
from pytest_gtrainer._torch.passes import WAIT, is_view, written_operands


class Storages:
    """The storage of every node of a graph, as the node that made it.

    Attributes:
        of: the storage.
        written: what a node writes to, for nodes that write.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.of: dict[fx.Node, fx.Node] = {}
        self.written: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            writes = written_operands(node) if node.op == "call_function" else []
            if writes:
                self.written[node] = [self.of[operand] for operand in writes]
            self.of[node] = self._storage(node, writes)

    def _storage(self, node: fx.Node, writes: list[fx.Node]) -> fx.Node:
        if writes and returns_an_operand(node):
            return self.of[writes[0]]
        shows = node.op == "call_function" and (is_view(node.target) or node.target in (operator.getitem, WAIT))
        return self.of[node.all_input_nodes[0]] if shows and node.all_input_nodes else node
