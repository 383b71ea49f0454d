"""Partial checks of a graph, in FileCheck's manner, on nodes and not on strings.

Used where a whole golden would say too much: ``then aten.mm in layers.0 as m``, ``next
wait_tensor(m)``, ``never reduce_scatter_tensor in fwd``. The same words stand in comment lines
of graph files (``# check: …``), in texts (``assert_graph``) and as methods (``check_graph``).
The data flow is ``tokens → syntax → pattern → search → report``; nothing here imports pytest.

Terms:

- The *schedule*: the computed nodes of a graph in order, then its output. Items of a tuple
  (``split[0]``), constants and inputs have no place in it, as they have no line in a text.
- A *pattern*: what a node must be; a list of *predicates* (operator, operands, place, type, …),
  each of which says in words how a node differs.
- A *check*: what is done with a pattern: ``then``, ``next``, ``same``, ``never``, ``count``, ``start``.
- A *capture*: a matched node under a name, which later patterns may use as an operand.

A check that cannot fail, or cannot match, is a ``CheckError``: an operator that no registry
knows, a module that the graph does not have, a name that nothing has captured, no check at all.
"""

from __future__ import annotations

from pytest_gtrainer.checks.checker import GraphChecker, assert_graph, check_graph
from pytest_gtrainer.checks.subject import CheckError, CheckFailure

__all__ = ["CheckError", "CheckFailure", "GraphChecker", "assert_graph", "check_graph"]
