"""A forward and a backward graph, bucketed alone, have the buckets of the joint graph (D12)."""

import pytest
import torch
from torch import fx

from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as joint_pass
from pytest_gtrainer import transformer_block_bucketing_reordering_pass as separate_pass
from pytest_gtrainer._torch.passes import ALL_GATHER, REDUCE_SCATTER
from pytest_gtrainer.graph.collectives import PlanError

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


def half(gm, direction, *, marks=True):
    """The nodes of one direction as a graph of its own, as a partitioner makes it: what it reads is
    an input.
    """
    wanted = [
        n
        for n in gm.graph.nodes
        if n.op == "call_function" and is_backward(n) == (direction == "bwd")
    ]
    graph, copies = fx.Graph(), {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or (
            node not in wanted and any(user in wanted for user in node.users)
        ):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
            if node.op != "placeholder":
                copies[node].meta["gt_input"] = {"kind": "saved", "fqn": node.name}
    for node in wanted:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if not marks:
            copies[node].meta.pop("autograd_backward", None)
    results = [node for node in gm.graph.output_node().all_input_nodes if node in wanted]
    graph.output(tuple(copies[node] for node in results))
    if direction == "bwd":
        output = gm.graph.output_node()
        graph.output_node().meta = {**output.meta, "gt_outputs": output.meta["gt_outputs"][1:]}
    return fx.GraphModule(gm, graph)


def is_backward(node):
    return bool(node.meta.get("autograd_backward"))


def buckets(gm, direction, target):
    """Per collective of the direction: its bucket, dtype, size, and the nodes that its payload is
    made from.
    """
    return [
        (
            node.meta["fsdp_bucket"],
            node.meta["val"].dtype,
            node.meta["val"].numel(),
            len(payload_of(node)),
        )
        for node in sorted(gm.graph.find_nodes(op="call_function", target=target))
        if node.meta["fsdp_bucket"]["direction"] == direction
    ]


def payload_of(launch):
    node = launch.all_input_nodes[0]
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.all_input_nodes


@pytest.mark.parametrize(("direction", "target"), [("fwd", ALL_GATHER), ("bwd", REDUCE_SCATTER)])
def test_joint_equals_separate(joint, plan, direction, target):
    """D12: the backward's nodes need no mark, since its graph is said to be the backward's."""
    alone = separate_pass(
        half(joint.gm, direction, marks=False), bucket_plan=plan, direction=direction
    )
    together = joint_pass(joint.gm, bucket_plan=plan)
    assert buckets(alone, direction, target) == buckets(together, direction, target)
    assert len(buckets(alone, direction, target)) == len(plan)
    created = [node for node in alone.graph.nodes if node.target is target]
    assert not [node for node in created if is_backward(node) != (direction == "bwd")]


def test_module_names_come_from_the_module_stack_too(joint, plan):
    """D12: where nothing was annotated."""
    gm = half(joint.gm, "fwd")
    for node in gm.graph.nodes:
        fqn = node.meta.pop("custom", {}).get("module_fqn")
        if fqn:
            node.meta["nn_module_stack"] = {fqn: (fqn, object)}
    alone = separate_pass(gm, bucket_plan=plan, direction="fwd")
    assert buckets(alone, "fwd", ALL_GATHER) == buckets(
        joint_pass(joint.gm, bucket_plan=plan), "fwd", ALL_GATHER
    )


def test_a_graph_of_the_backward_has_marks_on_its_results_or_none(joint, plan):
    """D12: what it recomputes of the forward has no mark, and is no result."""
    for marks in (True, False):
        gm = half(joint.gm, "bwd", marks=marks)
        placeholder = gm.graph.find_nodes(op="placeholder")[0]
        first = next(node for node in gm.graph.nodes if node.op == "call_function")
        with gm.graph.inserting_before(first):
            recomputed = gm.graph.call_function(torch.ops.aten.neg.default, (placeholder,))
        recomputed.meta["val"] = placeholder.meta["val"]
        assert len(
            buckets(separate_pass(gm, bucket_plan=plan, direction="bwd"), "bwd", REDUCE_SCATTER)
        )


def test_a_mark_on_an_input_decides_nothing(joint, plan):
    """D12: an input of a graph that was cut keeps the metadata of the node that it was."""
    gm = half(joint.gm, "bwd", marks=False)
    gm.graph.find_nodes(op="placeholder")[-1].meta["autograd_backward"] = True
    assert len(buckets(separate_pass(gm, bucket_plan=plan, direction="bwd"), "bwd", REDUCE_SCATTER))


def test_a_joint_graph_is_refused(joint, plan):
    before = joint.gm.code
    with pytest.raises(PlanError, match="has nodes of the backward: for a joint graph use joint_"):
        separate_pass(joint.gm, bucket_plan=plan, direction="fwd")
    with pytest.raises(PlanError, match=r"a result of the forward \(.*\): for a joint graph use "):
        separate_pass(joint.gm, bucket_plan=plan, direction="bwd")
    with pytest.raises(ValueError, match="direction='backward': expected 'fwd' or 'bwd'"):
        separate_pass(joint.gm, bucket_plan=plan, direction="backward")
    assert joint.gm.code == before
