"""Calls that communicate and are no operators: whoever reads communication refuses them."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as with_autograd
from torch import fx
from torch.distributed.tensor import DTensor

from pytest_gtrainer import (
    CheckError,
    PlanError,
    assert_graph,
    assert_no_deadlock,
    bucket_layout,
    graphtext,
    timeline,
)
from pytest_gtrainer.graph.collectives import find_early_read

functional = torch.ops._c10d_functional
CALLS = {
    "a packet": (functional.all_reduce, "sum", "fsdp"),
    "a packet of c10d": (torch.ops.c10d.allreduce_, "fsdp"),
    "torch.distributed": (dist.all_reduce,),
    "a barrier": (dist.barrier,),
    "a functional collective": (funcol.all_reduce, "sum", "fsdp"),
    "one with autograd": (with_autograd.all_reduce,),
}
READERS = {
    "layout": bucket_layout,
    "timeline": timeline,
    "schedule": lambda gm: graphtext.render(gm, view="schedule"),
    "deadlock": lambda gm: assert_no_deadlock({0: gm, 1: gm}, groups={"fsdp": [[0, 1]]}),
}


def graph_with(target, *arguments):
    """Return a graph that calls ``target`` behind a collective that is seen."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    rows.meta["val"] = torch.empty(4, device="meta")
    seen = graph.call_function(functional.all_reduce.default, (rows, "sum", "fsdp"))
    wait = graph.call_function(functional.wait_tensor.default, (seen,))
    seen.meta["val"] = wait.meta["val"] = rows.meta["val"]
    if target is not None:
        graph.call_function(target, (wait, *arguments)).meta["val"] = rows.meta["val"]
    graph.output((wait,))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("of", CALLS)
def test_a_reader_of_communication_refuses_it(of, reader):
    with pytest.raises(PlanError, match="which is no operator, so nobody can say what it commun"):
        READERS[reader](graph_with(*CALLS[of]))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("op", ["packet", "method"])
def test_a_wait_that_is_no_operator_is_refused(op, reader):
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    rows.meta["val"] = torch.empty(4, device="meta")
    sent = graph.call_function(functional.all_reduce.default, (rows, "sum", "fsdp"))
    if op == "packet":
        wait = graph.call_function(functional.wait_tensor, (sent,))
    else:
        wait = graph.call_method("wait", (sent,))
    sent.meta["val"] = wait.meta["val"] = rows.meta["val"]
    graph.output((wait,))
    with pytest.raises(PlanError, match="which is no operator") as refused:
        READERS[reader](fx.GraphModule({}, graph))
    assert str(refused.value).startswith(f"{wait.name} calls ")


@pytest.mark.parametrize("is_packet", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_result_that_is_read_before_its_wait(is_packet, waits):
    """Operators, and packets of one overload, which a pass forgets to name."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    called = functional.all_reduce, functional.wait_tensor
    if not is_packet:
        called = tuple(packet.default for packet in called)
    value = sent = graph.call_function(called[0], (rows, "sum", "fsdp"))
    if waits:
        value = graph.call_function(called[1], (sent,))
    read = graph.call_function(torch.ops.aten.mul.Tensor, (value, 2.0))
    graph.output((read,))
    assert find_early_read(graph) == (None if waits else (sent, read))


@pytest.mark.parametrize("waited", ["the result", "a view", "nothing"])
@pytest.mark.parametrize("read", ["the result", "a view", "another view"])
def test_a_wait_for_a_result_or_a_view_of_it_is_one_for_all_of_them(waited, read):
    graph = fx.Graph()
    sent = graph.call_function(
        functional.all_reduce.default, (graph.placeholder("rows"), "sum", "fsdp")
    )
    views = {"the result": sent}
    for name, shape in (("a view", [2, 2]), ("another view", [4, 1])):
        views[name] = graph.call_function(torch.ops.aten.view.default, (sent, shape))
    if waited in views:
        graph.call_function(functional.wait_tensor.default, (views[waited],))
    reader = graph.call_function(torch.ops.aten.mul.Tensor, (views[read], 2.0))
    graph.output((reader,))
    assert find_early_read(graph) == (None if waited in views else (sent, reader))


@pytest.mark.parametrize(
    "target", [None, dist.get_rank, dist.is_initialized, torch.relu, DTensor.from_local]
)
def test_other_functions_are_no_communication(target):
    assert_no_deadlock(dict.fromkeys((0, 1), graph_with(target)), groups={"fsdp": [[0, 1]]})
    assert bucket_layout(graph_with(target)).payloads == ()


@pytest.mark.parametrize("of", CALLS)
@pytest.mark.parametrize("check", ["never {}c10d*.broadcast*", "never all_to_all_single"])
def test_a_check_of_communication_is_undecided(of, check):
    with pytest.raises(CheckError, match="it communicates and is no operator: trace the graph"):
        assert_graph(graph_with(*CALLS[of]), check.format("_"))
    assert_graph(graph_with(*CALLS[of]), "never mm")
    assert_graph(graph_with(None), check.format("_"))
