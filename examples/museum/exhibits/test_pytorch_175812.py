"""A reduce-scatter and an all-reduce get one key, and land in one bucket.

pytorch#175812 (2026): one of four bugs that fuzzing found in the overlap scheduler (seed 20): the
keys of both collectives had group, reduction and dtype, and not which collective it is. Rebuilt
from that summary; here the bucket is an all-reduce, and each rank takes the first rows of what was
scattered.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, usual
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import AnotherFunction, assert_same_function

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
REDUCTIONS = (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)


def gradients(norm, weight, bias):
    """Reduce the gradients of what is replicated, and of what is sharded."""
    group = dist.group.WORLD
    return (
        collectives.all_reduce(norm, "sum", group),
        collectives.reduce_scatter_single(weight, "sum", 0, group),
        collectives.all_reduce(bias, "sum", group),
    )


def bucket(gm, bug):
    """Reduce tensors with equal keys together, in the kind of collective that came first."""
    gm = copy.deepcopy(gm)
    buckets = {}
    for node in gm.graph.nodes:
        if node.target in REDUCTIONS:
            key = (node.args[1], node.args[-1]) if bug else (node.target, *node.args[1:])
            buckets.setdefault(key, []).append(node)
    for members in buckets.values():
        if len(members) > 1:
            reduce_together(gm.graph, members)
    gm.graph.lint()
    gm.recompile()
    return gm


def reduce_together(graph, members):
    first, start = members[0], 0
    with graph.inserting_before(members[-1]):
        payload = graph.call_function(aten.cat.default, ([node.args[0] for node in members],))
        total = graph.call_function(first.target, (payload, *first.args[1:]))
        total = graph.call_function(c10d.wait_tensor.default, (total,))
        for node in members:
            (wait,) = node.users
            end = start + len(wait.meta["val"])
            part = graph.call_function(aten.slice.Tensor, (total, 0, start, end))
            start += len(node.args[0].meta["val"])
            wait.replace_all_uses_with(part)
            graph.erase_node(wait)
            graph.erase_node(node)


def traced():
    return make_fx(gradients, tracing_mode="fake")(torch.ones(3), torch.ones(8), torch.ones(3))


def numbers(rank):
    torch.manual_seed(rank)
    return torch.randn(3), torch.randn(8), torch.randn(3)


def on_two_ranks(bug):
    """Compare the results of both ranks."""
    sides = []
    for gm in (bucket(traced(), bug), traced()):
        own = torch.cat(gm(*numbers(dist.get_rank())))
        of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, own)
        sides.append(usual.tensors_of(of_ranks))
    return usual.Sides(*sides)


@exhibit(
    "pytorch#175812",
    2026,
    kind="collectives",
    found_by="proof",
    raises=AnotherFunction,
    says="first output_1, rank 1",
    usual=usual.Practice(on_two_ranks, 2),
)
@pytest.mark.gt_world("simulated", size=2)
def test_a_bucket_has_one_kind_of_collective(gt_world, bug):
    before = traced()
    assert_same_function(bucket(before, bug), before, inputs=numbers, world=gt_world)
