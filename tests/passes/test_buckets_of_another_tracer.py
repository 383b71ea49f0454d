"""A trainer's own tracer, as torchtitan's: flat tensors, no names, buckets by torch's
``_pre_bucket_all_gather``.

The model as ``names=`` says what inputs are, and whose gradients come last: the layout is whole,
and eager judges it.
"""

import copy

import pytest
import torch
from torch import nn
from torch._inductor.fx_passes import bucketing
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.nn.utils import stateless

from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import assert_same_layout, bucket_layout, eager_bucket_layout, graphtext
from pytest_gtrainer.graph.bucket_plan import Plan
from pytest_gtrainer.graph.collectives import fsdp_all_gathers, fsdp_reduce_scatters
from pytest_gtrainer.graph.foreign import adopt
from pytest_gtrainer.graph.layout import LayoutDifference
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.eager import shard_eagerly
from pytest_gtrainer.references.graph import shard_traceably
from tests.compiling.matrix import local, named

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4}, rank=1)
PACKS = torch.ops.bucketing._pre_bucket_all_gather.default
MODELS = {"llama3": llama3_training, "deepseek_v3": deepseek_v3_training}


def traced(model, step, inputs):
    """``make_fx`` on local tensors of parameters, then buffers, then the batch; the loss and all
    gradients come out.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def flat_step(*flat):
        given = named(state, flat)
        with stateless._reparametrize_module(model, given):
            loss = step(model, *flat[len(state) :])
        trained = [
            given[name] for name, tensor in state.items() if isinstance(tensor, nn.Parameter)
        ]
        return [loss, *map(local, torch.autograd.grad(loss, trained))]

    flat = [
        local(tensor).detach().requires_grad_(tensor.requires_grad) for tensor in state.values()
    ]
    compiler = torch.compiler
    with (
        preserve_node_meta(),
        compiler._non_strict_tracing_context(),
        compiler._patch_engine_backward(),
    ):
        return make_fx(flat_step, tracing_mode="fake")(*flat, *inputs)


@pytest.fixture(scope="module")
def graphs():
    """Cache by model and group: each is traced once, and eager laid out once."""
    return {}


@pytest.fixture(params=MODELS)
def traced_and_eager(request, graphs, gt_mesh):
    key = request.param, gt_mesh.get_group().group_name
    if key not in graphs:
        config = MODELS[request.param](gt_mesh, "bf16_fp32")
        model, eager = shard_traceably(new_model(config), config), new_model(config)
        gm = traced(model, config.step, config.inputs(0))
        shard_eagerly(eager, config)
        config.step(eager, *config.batch(0, 1)).backward()
        graphs[key] = gm, model, config.bucket_plan, eager_bucket_layout(eager)
    gm, *rest = graphs[key]
    return copy.deepcopy(gm), *rest


def bucketed(gm, model, plan, key):
    """Bucket like torchtitan: one bucket for each module of the plan, its members ordered by a key,
    packed by torch.
    """
    named, plan = adopt(gm, model), Plan(plan)
    nodes = {node.name: node for node in gm.graph.nodes}
    for members, merge in (
        (fsdp_all_gathers(named), bucketing.merge_all_gather_bucket),
        (fsdp_reduce_scatters(named), bucketing.merge_reduce_scatter_bucket),
    ):
        for bucket in plan.buckets:
            own = sorted(
                (one for one in members if plan.bucket_of(one.parameter) == bucket), key=key
            )
            merge(gm.graph, [nodes[one.launch.name] for one in own], "custom_ops")
        stable_topological_sort(gm.graph)
    gm.recompile()
    return gm


def registered(model):
    """Eager's order: that in which the model has its parameters."""
    place = {fqn: at for at, (fqn, _) in enumerate(model.named_parameters())}
    return lambda member: place[member.parameter]


@pytest.mark.second_tier("deepseek_v3")
def test_a_graph_that_torch_packed_has_its_whole_layout_and_is_eagers_by_name(traced_and_eager):
    """P1, D4, D17: two collectives a bucket, each parameter and each gradient at eager's byte."""
    gm, model, plan, eager = traced_and_eager
    apart = bucket_layout(gm, names=model)
    made = bucketed(gm, model, plan, registered(model))
    assert made.graph.find_nodes(op="call_function", target=PACKS)
    layout = bucket_layout(made, names=model)
    for kind, way in (("all_gather", "fwd"), ("reduce_scatter", "bwd")):
        assert [each.directions for each in layout.of(kind)] == [(way,)] * len(eager.of(kind))
        held, whole = (
            sorted(fqn for each in one.of(kind) for fqn in each.parameters)
            for one in (layout, apart)
        )
        assert held == whole == sorted(fqn for fqn, _ in model.named_parameters())
    assert_same_layout(made, eager, names=model)


@pytest.mark.second_tier("deepseek_v3")
def test_a_bucket_packed_in_the_order_of_execution_is_told(traced_and_eager):
    """The order bug of a trainer: by bucket and place in the graph, where eager has w1, w2, w3."""
    gm, model, plan, eager = traced_and_eager
    made = bucketed(gm, model, plan, lambda member: member.launch)
    with pytest.raises(LayoutDifference) as failure:
        assert_same_layout(made, eager, names=model)
    assert "bucket 'layers.0', reduce_scatter: layers.0." in str(failure.value)
    assert " sits at byte " in str(failure.value)


@pytest.mark.second_tier("deepseek_v3")
def test_a_text_of_it_comes_back_with_its_layout(traced_and_eager):
    gm, model, plan, eager = traced_and_eager
    text = graphtext.render(bucketed(gm, model, plan, registered(model)), names=model)
    assert "bucketing._pre_bucket_all_gather" in text
    again = graphtext.parse(text)
    assert graphtext.render(again) == text
    assert_same_layout(again, eager)


@pytest.mark.second_tier("deepseek_v3")
def test_without_marks_of_the_backward_no_result_is_called_a_gradient(traced_and_eager):
    """The twin: a result may have a parameter's shape by accident."""
    gm, model, *_ = traced_and_eager
    assert "  lm_head.weight = bwd." in graphtext.render(gm, names=model)
    for node in gm.graph.nodes:
        node.meta.pop("autograd_backward", None)
    assert "lm_head.weight = " not in graphtext.render(gm, names=model)
    reduced = {
        fqn
        for each in bucket_layout(gm, names=model).of("reduce_scatter")
        for fqn in each.parameters
    }
    assert len(reduced) == len({fqn for fqn, _ in model.named_parameters()} - reduced)
