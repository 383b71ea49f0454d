"""Partial checks of a graph, in FileCheck's manner, on nodes and not on strings. Nothing here
imports pytest.

The same words stand in comment lines of graph files (``# check: then aten.mm in layers.0 as m``)
and in the text of ``assert_graph``.

- The *schedule*: the computed nodes of a graph in order, then its output; no items of tuples,
  constants, inputs.
- A *pattern*: what a node must be; a list of *predicates*, each of which says in words how a node
  differs.
- A *check*: what is done with a pattern: ``then``, ``next``, ``same``, ``never``, ``count``,
  ``start``.
- A *capture*: a matched node under a name, which later patterns may use as an operand.

A check that cannot fail, or cannot match, is a ``CheckError``: of an unknown operator, for example,
or no check at all.
"""

from pytest_gtrainer.checks.checker import assert_graph
from pytest_gtrainer.checks.subject import CheckError, CheckFailure

__all__ = ["CheckError", "CheckFailure", "assert_graph"]
