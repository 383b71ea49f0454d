"""Both ranks post a receive before the send that the other one waits for.

pytorch#109401 (2023): ``isend`` and ``irecv`` between two ranks hung with NCCL, which runs what
two ranks exchange in the order in which it was issued, one after the other. With gloo the same
code ends, so no run on a CPU shows it. Here the order of both ranks' graphs is judged by NCCL's rule.
"""

import pytest
from museum import exhibit

from pytest_gtrainer import Deadlock, assert_no_deadlock, graphtext

SEND = "isend: f32[3] = _c10d_functional.isend(I.x, {other}, 0, pp)"
RECEIVE = "irecv: f32[3] = _c10d_functional.irecv(I.buffer, {other}, 0, pp)"
GRAPH = """pp = group(range(0, 2))
if I:
  I.x: f32[3]
  I.buffer: f32[3]
if fwd:
  with exchange:
    {first}
    {second}
    wait_tensor: f32[3] = _c10d_functional.wait_tensor(isend)
    wait_tensor_1: f32[3] = _c10d_functional.wait_tensor(irecv)
if out:
  yield fwd.exchange.wait_tensor_1
"""


def graph_of(rank, bug):
    """Give x to the other rank; in the fixed version rank 0 sends first."""
    order = [SEND, RECEIVE] if rank == 0 and not bug else [RECEIVE, SEND]
    first, second = (line.format(other=1 - rank) for line in order)
    return graphtext.parse(GRAPH.format(first=first, second=second))


@exhibit(
    "pytorch#109401",
    2023,
    kind="collectives",
    found_by="wait",
    raises=Deadlock,
    says="rank 0 waits in send to 1 (isend of exchange), behind recv from 1 (irecv of exchange)",
    usual="nobody with gloo; with NCCL it hangs",
)
@pytest.mark.gt_world("fake", size=2)
def test_ranks_exchange(gt_mesh, bug):
    assert_no_deadlock({rank: graph_of(rank, bug) for rank in range(2)})
