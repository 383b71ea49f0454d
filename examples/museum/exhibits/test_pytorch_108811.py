"""The buffer of a collective is reused while its result is still needed.

pytorch#108811 (2023): Inductor took the result of a wait for another tensor than the buffer of the
all-reduce, thought that buffer free, and wrote a relu into it before the sum was read. Here a pass
lets pointwise operators write into buffers that nobody reads any more.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import AnotherFunction, assert_same_function

OUT = {
    torch.ops.aten.relu.default: torch.ops.aten.relu.out,
    torch.ops.aten.add.Tensor: torch.ops.aten.add.out,
}
WAIT = torch.ops._c10d_functional.wait_tensor.default


def step(x):
    total = collectives.all_reduce(x * 1, "sum", dist.group.WORLD)
    return x.relu().square() + total


def readers(buffer, bug):
    """Return who reads a buffer; a wait gives the same buffer another name."""
    found = list(buffer.users)
    for user in list(found):
        if user.target is WAIT and not bug:
            found += readers(user, bug)
    return found


def reuse(gm, bug):
    """Let operators write into buffers of this graph that are read no more."""
    gm = copy.deepcopy(gm)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    for place, node in enumerate(nodes):
        free = []
        for buffer in nodes[:place]:
            if buffer.target is WAIT or buffer in node.args:
                continue
            if all(reader in nodes[:place] for reader in readers(buffer, bug)):
                free.append(buffer)
        if node.target in OUT and free:
            node.target, node.kwargs = OUT[node.target], {"out": free[-1]}
    gm.recompile()
    return gm


def traced():
    return make_fx(step, tracing_mode="fake")(torch.ones(4, 4))


def numbers(rank):
    torch.manual_seed(rank)
    return (torch.randn(4, 4),)


def on_two_ranks(bug):
    inputs = numbers(dist.get_rank())
    return usual.Sides({"result": reuse(traced(), bug)(*inputs)}, {"result": traced()(*inputs)})


@exhibit(
    "pytorch#108811",
    2023,
    kind="aliasing",
    found_by="proof",
    raises=AnotherFunction,
    says="begins at node add (aten.add.",
    usual=usual.Practice(on_two_ranks, 2),
)
@pytest.mark.gt_world("simulated", size=2)
def test_a_buffer_is_free_when_its_result_is_read(gt_world, bug):
    before = traced()
    assert_same_function(reuse(before, bug), before, inputs=numbers, world=gt_world)
