"""The simulated world: all ranks in one process, with true values.

Sums are in the order of multi-node rings and trees. The input is a graph that one rank traced, or a
function of eager code, and a net, which says in which order ranks add. The output is what every
rank would hold, bit for bit. Read ``net`` first, then the files in the order of the data:

- ``rings``, ``trees``, ``logs``, ``net``: the order of a sum, and the sum for all ranks at once;
- ``collectives``: every collective among the ranks of a group, for both folders below;
- ``threads``: eager code, unmodified, on threads as ranks;
- ``interpreter``: one traced graph, replayed for all ranks.

A simulated world refuses with the errors of this module. Each message is one sentence for the
author of the test.
"""

from pytest_gtrainer.facts import FailedCheck


class NoModel(NotImplementedError):
    """A collective, a reduction or another operator that a simulated world does not model."""


class CollectiveMismatch(FailedCheck):
    """Ranks come to the same collective with different operations, sizes, dtypes or splits."""


class DependsOnRank(ValueError):
    """A graph, or an input of it, is valid for one rank only."""


class VacuousCheck(FailedCheck):
    """The check cannot fail.

    Its control, packed otherwise, gives the same bits, or nobody communicates.
    """

    __module__ = "pytest_gtrainer"
