"""A joint graph that AOT autograd traced, not ours: the metadata that torch puts there is all that
passes read.
"""

import pytest
import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.distributed import _functional_collectives as collectives
from torch.fx.traceback import annotate, preserve_node_meta

from pytest_gtrainer import (
    apply_graph_passes,
    assert_graph,
    bucket_layout,
    construct_default_graph_passes,
    graphtext,
    timeline,
)

PARAMETERS = ["tok_embeddings", "layers.0", "layers.0", "layers.1", "layers.1", "lm_head"]
PLAN = ["tok_embeddings", "layers.0", "layers.1", "lm_head"]


def step(x, *shards):
    """Gathers each shard and multiplies by it; ``annotate`` is torch's own."""
    for name, shard in zip(PARAMETERS, shards, strict=True):
        with annotate({"module_fqn": name}):
            gathered = collectives.all_gather_single_autograd(shard, 0, dist.group.WORLD)
            x = torch.mm(x, gathered).sin()
    return (x.sum(),)


@pytest.fixture
def graph(gt_world):
    shards = [torch.randn(2, 8, requires_grad=True) for _ in PARAMETERS]
    with preserve_node_meta():
        return aot_export_joint_simple(step, (torch.randn(3, 8), *shards), trace_joint=True)


@pytest.mark.gt_world("fake", size=4)
def test_it_is_bucketed_laid_out_rendered_and_timed(graph):
    passes = construct_default_graph_passes(bucket_plan=PLAN)
    rewritten = apply_graph_passes(graph, None, passes)
    for count, when in ((6, graph), (4, rewritten)):
        assert_graph(
            when,
            f"count {count} all_gather_into_tensor in fwd\n"
            f"count {count} reduce_scatter_tensor in bwd",
        )
    layout = bucket_layout(rewritten)
    assert {payload.label for payload in layout.payloads} == set(PLAN)
    assert [len(payload.slots) for payload in layout.of("all_gather")] == [1, 2, 2, 1]
    text = graphtext.render(rewritten)
    assert "bucket(layers[0])" in text
    assert graphtext.render(graphtext.parse(text)) == text
    assert timeline(rewritten).exposed < timeline(graph).exposed


@pytest.mark.gt_world("fake", size=4)
def test_without_the_marks_of_the_backward_all_is_forward(graph):
    """The twin: nothing is guessed from names or order."""
    for node in graph.graph.nodes:
        node.meta.pop("autograd_backward", None)
    assert_graph(
        graph, "count 6 reduce_scatter_tensor in bwd"
    )  # what depends on a tangent is of the backward
    for node in graph.graph.nodes:
        node.meta.pop("desc", None)
    with pytest.raises(AssertionError, match="reduce_scatter_tensor in bwd"):
        assert_graph(graph, "count 6 reduce_scatter_tensor in bwd")
