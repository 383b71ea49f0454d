"""The graph interpreter: one traced graph, replayed for all ranks in one process.

A net model carries out collectives among the ranks of their groups. Every other operator is the
plain one, so bits are those of a replay on real ranks. The interpreter takes a ``RankGraph``
(``graph``), its inputs for all ranks (``values``), and a net. ``program`` compiles the graph to
blocks of plain operators and ``steps`` for all others, and runs it.
"""

from pytest_gtrainer.worlds.simulated.interpreter.graph import (
    RankGraph,
    RankLiterals,
    check_same_on_all,
)
from pytest_gtrainer.worlds.simulated.interpreter.program import Interpreter
from pytest_gtrainer.worlds.simulated.interpreter.values import PerRank, RankRandomStates

__all__ = [
    "Interpreter",
    "PerRank",
    "RankGraph",
    "RankLiterals",
    "RankRandomStates",
    "check_same_on_all",
]
