"""Prefetch and deferral: what moves, how far, and what stays."""

from itertools import pairwise

import pytest

from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as joint_pass
from pytest_gtrainer._torch.passes import ALL_GATHER, REDUCE_SCATTER, WAIT

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


def schedule(gm, launch):
    """The launches and waits of one kind of collective, as ("launch" | "wait", bucket)."""
    events = []
    for node in gm.graph.nodes:
        kind = "wait" if node.target is WAIT else "launch"
        source = node.args[0] if node.target is WAIT else node
        if source.target is launch:
            events.append((kind, "+".join(node.meta["fsdp_bucket"]["plan_fqns"])))
    return events


BUCKETS = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm+lm_head"]


def test_the_next_all_gather_is_launched_before_the_wait_of_this_one(joint, plan):
    """E1, E5: launch i + 1 right before wait i, ascending."""
    events = schedule(joint_pass(joint.gm, bucket_plan=plan), ALL_GATHER)
    expected = [("launch", BUCKETS[0])]
    for this, following in pairwise(BUCKETS):
        expected += [("launch", following), ("wait", this)]
    assert events == [*expected, ("wait", BUCKETS[-1])]


def test_a_reduce_scatter_is_waited_for_after_the_launch_of_the_next(joint, plan):
    """E2: in the backward's order, last bucket first."""
    events = schedule(joint_pass(joint.gm, bucket_plan=plan), REDUCE_SCATTER)
    backward = BUCKETS[::-1]
    expected = [("launch", backward[0])]
    for this, following in pairwise(backward):
        expected += [("launch", following), ("wait", this)]
    assert events == [*expected, ("wait", backward[-1])]


def test_without_reordering_each_wait_follows_where_it_was(joint, plan):
    """The twin of E1 and E2."""
    gm = joint_pass(joint.gm, bucket_plan=plan, reorder=False)
    for launch in (ALL_GATHER, REDUCE_SCATTER):
        kinds = [kind for kind, _ in schedule(gm, launch)]
        assert kinds == ["launch", "wait"] * len(BUCKETS)


def test_a_launch_stands_behind_its_inputs_and_before_its_wait(joint, plan):
    """Nothing is used before it is made, and no wait is the launch's neighbour where there is
    compute to hide.
    """
    gm = joint_pass(joint.gm, bucket_plan=plan)
    place = {node: index for index, node in enumerate(gm.graph.nodes)}
    early = [
        f"{node} reads {s}"
        for node in gm.graph.nodes
        for s in node.all_input_nodes
        if place[s] >= place[node]
    ]
    assert not early, "before it is made"
    gathers = [node for node in gm.graph.nodes if node.target is ALL_GATHER]
    hidden = [place[next(iter(node.users))] - place[node] for node in gathers[2:]]
    assert min(hidden) > 5


@pytest.mark.second_tier
def test_recomputed_all_gathers_are_the_backwards_and_descend(gt_mesh, make_net, plan):
    """D1, E1, E3, E5: with activation checkpointing each block gathers again in the backward,
    prefetched there.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    from pytest_gtrainer import data_parallel, trace_step

    model = data_parallel(make_net(3, 8), gt_mesh)
    for layer in model.layers:
        run = layer.forward
        layer.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    traced = trace_step(model, lambda m, t: m(t).sum(), (tokens,), reuse_gathers=False)
    gm = joint_pass(traced.gm, bucket_plan=plan)
    events = [(kind, bucket) for kind, bucket, way in directed_schedule(gm) if way == "bwd"]
    layers = ["layers.2", "layers.1", "layers.0"]
    assert [bucket for kind, bucket in events if kind == "launch"] == layers
    assert events[:3] == [("launch", "layers.2"), ("launch", "layers.1"), ("wait", "layers.2")]
    forward = [(kind, bucket) for kind, bucket, way in directed_schedule(gm) if way == "fwd"]
    assert [bucket for kind, bucket in forward if kind == "launch"] == BUCKETS


def directed_schedule(gm):
    for node in gm.graph.nodes:
        source = node.args[0] if node.target is WAIT else node
        if source.target is ALL_GATHER:
            bucket = node.meta["fsdp_bucket"]
            yield (
                "wait" if node.target is WAIT else "launch",
                "+".join(bucket["plan_fqns"]),
                bucket["direction"],
            )
