"""A wait stays directly behind its all-reduce, as an operator that does nothing seems to read it.

pytorch#127324 (2024): a pass moves waits down to the first reader, so that computation runs beside
the collective. A no-op that only hands the result on counted as a reader, and nothing overlapped.
Values are right in every order.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import CheckFailure, assert_graph

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
NO_OPS = (aten.alias.default, aten.detach.default)


def toy(x, y):
    total = collectives.all_reduce(x, "sum", dist.group.WORLD).detach()
    return total, (y @ y).relu()


def sink_waits(gm, bug):
    """Move each wait down to who reads it; what only hands it on moves along."""
    for wait in gm.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
        moving = [wait]
        while not bug and len(moving[-1].users) == 1:
            (reader,) = moving[-1].users
            if reader.target not in NO_OPS:
                break
            moving.append(reader)
        place = min(moving[-1].users)
        for node in moving:
            place.prepend(node)
    gm.recompile()
    return gm


@exhibit(
    "pytorch#127324",
    2024,
    kind="compile",
    found_by="golden",
    raises=CheckFailure,
    says="no node matches after the last match",
    usual="nobody: all values are equal",
)
@pytest.mark.gt_world("fake", size=2)
def test_computation_runs_beside_the_all_reduce(gt_world, bug):
    gm = make_fx(toy, tracing_mode="fake")(torch.ones(4), torch.ones(4, 4))
    assert_graph(
        sink_waits(gm, bug),
        """
        then all_reduce as r
        then mm
        then relu
        then wait_tensor(r)
        """,
    )
