"""Graphs in a graph that communicate, or are modules of it: their nodes are steps like those around them.

A graph that an operator calls and that does not communicate needs none of this: the operator is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_gtrainer.worlds.simulated import CollectiveMismatch, NoModel
from pytest_gtrainer.worlds.simulated.interpreter.binding import Binder
from pytest_gtrainer.worlds.simulated.interpreter.steps import Frame
from pytest_gtrainer.worlds.simulated.interpreter.values import PerRank, interned, of_rank

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.interpreter.program import Program

COND = torch.ops.higher_order.cond
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph


@dataclass(frozen=True, slots=True)
class NestedStep:
    """A graph that is called with values of this one.

    ``bind`` gives the arguments of the call with nodes' values filled in, uniform or per rank.
    """

    target: Any
    operands: Sequence[fx.Node]
    bind: Binder
    programs: dict[int, Program]

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        args, _ = self.bind(frame.of(self.operands))
        graph, given = self._called(args)
        output = self.programs[id(graph)].run(given, frame.random)
        return frame.kinds.value(interned([of_rank(output, rank) for rank in range(frame.kinds.size)]))

    def _called(self, args: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The graph and what it is called with."""
        if self.target is COND:
            predicate, if_true, if_false, given = args
            return (if_true if _decided(predicate) else if_false), list(given)
        if self.target is INVOKE_SUBGRAPH:
            return args[0], list(args[2:])
        return self.target, list(args)


def _decided(predicate: Any) -> bool:
    """The one way that all ranks go."""
    ways = {bool(own) for own in (predicate if type(predicate) is PerRank else [predicate])}
    if len(ways) > 1:
        raise CollectiveMismatch(
            "the ranks disagree on the predicate of a cond with a collective in it: some would wait forever"
        )
    return ways.pop()


def check_nested(node: fx.Node) -> None:
    """Refuse operators that call graphs with collectives in a way of their own.

    Raises:
        NoModel: naming the operator.
    """
    if node.op != "call_module" and node.target not in (COND, INVOKE_SUBGRAPH):
        raise NoModel(
            f"{node.target} ({node.name}) calls a graph with a collective, which has a model only in cond, "
            "invoke_subgraph and called modules: inline it"
        )
