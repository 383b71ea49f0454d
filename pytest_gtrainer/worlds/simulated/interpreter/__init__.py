"""The graph interpreter: one traced graph, replayed for all ranks in one process.

A value is *uniform*, the same on all ranks and computed once, or *per rank*. Collectives are carried out
by a net model among the ranks of their groups; every other operator is the plain one, so bits are those
of a replay on real ranks.
"""

from pytest_gtrainer.worlds.simulated.interpreter.groups import RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.random_states import RandomStates
from pytest_gtrainer.worlds.simulated.interpreter.run import Interpreter, interpret
from pytest_gtrainer.worlds.simulated.interpreter.same_graph import check_same_on_all
from pytest_gtrainer.worlds.simulated.interpreter.values import PerRank

__all__ = ["Interpreter", "PerRank", "RandomStates", "RankGraph", "check_same_on_all", "interpret"]
