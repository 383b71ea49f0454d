"""Mistakes that people make with several parallelisms, planted one at a time: each is seen, on four
ranks or fewer.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fixtures.models import llama3
from fixtures.models.context_parallel import gathered_attention, ulysses_attention
from fixtures.models.tensor_parallel import apply_tensor_parallel
from fixtures.training import Parallelism, llama3_training
from pytest_gtrainer import (
    MixedPrecisionPolicy,
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_same_layout,
    bind_options,
    bucket_layout,
    compare,
    data_parallel,
    graphtext,
    joint_transformer_block_bucketing_reordering_pass,
    reduce_scatter_before_all_reduce_pass,
    split_stage_graph,
    trace_stage,
    trace_step,
)
from pytest_gtrainer.graph.collectives import PlanError, group_of, results_of
from pytest_gtrainer.graph.nodes import BACKWARD, direction, node_fqn
from pytest_gtrainer.passes.stages import PARTS
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun, RanksDisagree, assert_same_collectives
from pytest_gtrainer.references.replicas import texts_of_ranks
from pytest_gtrainer.tracing.model import local

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER, REDUCE = (
    getattr(c10d, name).default
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
)


def launched(gm, target, mesh, where=lambda node: True):
    """The launches of a kind in a mesh's group, in graph order."""
    group = mesh.get_group().group_name
    return [
        n
        for n in gm.graph.find_nodes(op="call_function", target=target)
        if group_of(n) == group and where(n)
    ]


def backwards(node):
    return direction(node) == BACKWARD


def in_dtype(gm, node, dtype, own=None):
    """A collective in another dtype, its result in its own again."""
    wait, own = next(iter(node.users)), own or node.args[0].meta["val"].dtype
    with gm.graph.inserting_before(node):
        node.update_arg(
            0, gm.graph.call_function(aten._to_copy.default, (node.args[0],), {"dtype": dtype})
        )
    with gm.graph.inserting_after(wait):
        back = gm.graph.call_function(aten._to_copy.default, (wait,), {"dtype": own})
    wait.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)


def left_out(node):
    """A collective whose result has the shape of its operand."""
    next(iter(node.users)).replace_all_uses_with(node.args[0])


# --- FSDP beside tensor and sequence parallelism


def sum_for_average(gm, mesh):
    launched(gm, SCATTER, mesh["dp"])[0].update_arg(1, "sum")


def gradients_added_in_bf16(gm, mesh):
    """Over the data ranks, where the policy says fp32."""
    in_dtype(gm, launched(gm, SCATTER, mesh["dp"])[0], torch.bfloat16)


def gradient_cast_on_the_other_side_of_the_tensor_reduction(gm, mesh):
    """FSDP2 casts a norm's gradient behind the sum over the model's ranks up to 2.14, and in front
    of it from 2.15.
    """
    node = launched(gm, REDUCE, mesh["tp"], lambda n: backwards(n) and "norm" in node_fqn(n))[0]
    is_narrow = node.args[0].meta["val"].dtype == torch.bfloat16
    in_dtype(gm, node, torch.float32 if is_narrow else torch.bfloat16, torch.float32)


def gradient_of_a_norm_not_summed(gm, mesh):
    left_out(launched(gm, REDUCE, mesh["tp"], lambda n: backwards(n) and "norm" in node_fqn(n))[0])


def sum_of_a_product_left_out(gm, mesh):
    """A rank's own part of a row-parallel product, in the place of the sum."""
    node = launched(gm, SCATTER, mesh["tp"])[0]
    with gm.graph.inserting_before(node):
        rows = node.meta["val"].shape[0]
        own = gm.graph.call_function(aten.slice.Tensor, (node.args[0], 0, 0, rows))
    next(iter(node.users)).replace_all_uses_with(own)


def reduced_over_the_ranks_of_the_model(gm, mesh):
    launched(gm, SCATTER, mesh["dp"])[0].update_arg(3, mesh["tp"].get_group().group_name)


def gathered_over_the_ranks_of_the_model(gm, mesh):
    launched(gm, GATHER, mesh["dp"])[0].update_arg(2, mesh["tp"].get_group().group_name)


def parameters_gathered_in_another_dtype(gm, mesh):
    """Eight bits in the place of sixteen, as bytes on the wire."""
    node = launched(gm, GATHER, mesh["dp"])[-1]
    with gm.graph.inserting_before(node):
        narrow = gm.graph.call_function(
            aten._to_copy.default, (node.args[0],), {"dtype": torch.float8_e4m3fn}
        )
        node.update_arg(
            0, gm.graph.call_function(aten._to_copy.default, (narrow,), {"dtype": torch.bfloat16})
        )


def two_gradients_exchanged(gm, mesh):
    """The keys' for the values', of one shape."""
    output, results = gm.graph.output_node(), results_of(gm)
    one, other = (
        output.meta["gt_outputs"].index(f"layers.0.attention.{name}.weight")
        for name in ("wk", "wv")
    )
    results[one], results[other] = results[other], results[one]
    output.args = (tuple(results),)


def gradient_added_twice(gm, mesh):
    """A bucket's gradients behind their reduction."""
    wait = next(iter(launched(gm, SCATTER, mesh["dp"])[0].users))
    with gm.graph.inserting_after(wait):
        twice = gm.graph.call_function(aten.add.Tensor, (wait, wait))
    wait.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)


BESIDE_TENSOR = [
    sum_for_average,
    gradients_added_in_bf16,
    gradient_of_a_norm_not_summed,
    gradient_cast_on_the_other_side_of_the_tensor_reduction,
    sum_of_a_product_left_out,
    reduced_over_the_ranks_of_the_model,
    gathered_over_the_ranks_of_the_model,
    parameters_gathered_in_another_dtype,
    two_gradients_exchanged,
    gradient_added_twice,
]


# --- replicas of shards


def replica_not_reduced(gm, mesh):
    left_out(launched(gm, REDUCE, mesh["replicate"])[0])


def sum_over_replicas(gm, mesh):
    launched(gm, REDUCE, mesh["replicate"])[0].update_arg(1, "sum")


def replicas_added_in_bf16(gm, mesh):
    in_dtype(gm, launched(gm, REDUCE, mesh["replicate"])[0], torch.bfloat16)


OF_REPLICAS = [replica_not_reduced, sum_over_replicas, replicas_added_in_bf16]


def gradients(model):
    return {name: local(parameter.grad) for name, parameter in model.named_parameters()}


def check_mistakes(eager, model, traced, inputs, mesh, mistakes):
    """The graph's gradients are eager's, and no mistake's are, on some rank at least."""
    for mistake in [None, *mistakes]:
        gm = copy.deepcopy(traced.gm)
        if mistake is not None:
            mistake(gm, mesh)
        gm.recompile()
        model.zero_grad()
        traced.with_graph(gm).replay(model, *inputs)
        texts = texts_of_ranks(compare(gradients(model), gradients(eager)).outcome)
        assert ("different" in texts) == (mistake is not None), (mistake, texts)


def beside_tensor_parallelism(mesh):
    """Return a training of one layer of Llama 3 over data ranks, each of several ranks that share
    the model and, between projections, the sequence.
    """

    def model():
        built = llama3.Llama3(replace(llama3.FLAVORS["debug"], n_layers=1))
        built.init_weights(seed=0)
        apply_tensor_parallel(built, mesh["tp"], sequence=True)
        return built

    config = llama3_training(
        mesh, "bf16_fp32", parallel=Parallelism({"sequence": True}), model=model, steps=1
    )
    return replace(config, bucket_plan=["tok_embeddings", "layers.0", ["norm", "lm_head"]])


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=4, mesh={"dp": 2, "tp": 2})
def test_beside_tensor_parallelism(gt_mesh):
    """N2: a cast in front of the sum over TP is among the mistakes."""
    config = beside_tensor_parallelism(gt_mesh)
    eager, graph, inputs = EagerRun(config).model, GraphRun(config), config.inputs(0)
    config.step(eager, *inputs).backward()
    check_mistakes(eager, graph.model, graph.traced, inputs, gt_mesh, BESIDE_TENSOR)


DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def trace_replicas(mesh, x):
    """Return a model whose shards have replicas, and its step as it is traced."""
    model = data_parallel(
        stage(), mesh, mode="hybrid_shard", mp_policy=MixedPrecisionPolicy(**DTYPES)
    )
    return model, trace_step(model, lambda net, x: net(x).square().sum(), (x,))


def scattered_first(traced):
    """Return a step in which replicas add what has been scattered, as FSDP2 does."""
    first = bind_options(reduce_scatter_before_all_reduce_pass)
    return traced.with_graph(apply_graph_passes(traced.gm, traced.example_inputs, [first]))


@pytest.mark.gt_world("ranks", size=4, mesh={"replicate": 2, "shard": 2})
def test_of_replicas(gt_mesh, gt_world):
    """A value that is reduced in bf16 is fp32 behind the reduce-scatter, so replicas have bits to
    lose.
    """
    eager = fully_shard(stage(), mesh=gt_mesh, mp_policy=FSDP2Policy(**DTYPES))
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(gt_world.rank)).bfloat16()
    eager(x).square().sum().backward()
    model, traced = trace_replicas(gt_mesh, x)
    check_mistakes(eager, model, scattered_first(traced), (x,), gt_mesh, OF_REPLICAS)


# --- contexts: against the whole sequence, as parity cannot see what both sides do


def slice_off_by_one(mesh, q, k, v):
    return gathered_attention(mesh, q.roll(1, 2), k, v)


def parts_in_the_wrong_order(mesh, q, k, v):
    return gathered_attention(mesh, q, *(x.flip(2) for x in (k, v)))


def heads_in_the_wrong_order(mesh, q, k, v):
    return ulysses_attention(mesh, q, k.flip(1), v)


OF_CONTEXTS = [slice_off_by_one, parts_in_the_wrong_order, heads_in_the_wrong_order]


@pytest.mark.gt_world("ranks", size=2, mesh={"cp": 2})
def test_of_contexts(gt_mesh):
    """The result is as close to attention on the whole sequence as ten roundings of fp32; a mistake
    is off by more than a percent.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 8, 16, generator=generator)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    own = [x.chunk(2, 2)[gt_mesh.get_local_rank()].contiguous() for x in (q, k, v, whole)]
    for attend in (gathered_attention, ulysses_attention):
        torch.testing.assert_close(attend(gt_mesh, *own[:3]), own[3], rtol=0, atol=10 * 2**-23)
    for mistake in OF_CONTEXTS:
        assert (mistake(gt_mesh, *own[:3]) - own[3]).abs().max() > 0.01, mistake


# --- stages


def stage():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def run_microbatches(
    graphs, module, given, *, order=(0, 1, 2), tangent_of=lambda at: at, once=True
):
    """Gradients of the parameters, of microbatches (input, tangent)."""
    sums = {}
    for at in order:
        values = dict(
            zip(
                graphs.inputs,
                [*module.parameters(), given[at][0], given[tangent_of(at)][1]],
                strict=True,
            )
        )
        graphs.run(values, *PARTS)
        for name in graphs.accumulates:
            sums[name] = sums[name] + values[name] if name in sums and once else values[name]
    return [sums[name].detach() for name in graphs.results[2:]]


OF_STAGES = {
    "a microbatch left out": {"order": (0, 1)},
    "the tangent of another microbatch": {"tangent_of": lambda at: (at + 1) % 3},
    "only the last microbatch kept": {"once": False},
    "another order of adding": {"order": (2, 1, 0)},
}


def test_of_stages():
    module = stage()
    given = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(3)]
    for x, tangent in given:
        module(x).backward(tangent)
    expected = [parameter.grad for parameter in module.parameters()]
    gm = trace_stage(module, (torch.zeros(2, 4, requires_grad=True),)).gm
    graphs = split_stage_graph(gm)
    assert_bitwise_equal(run_microbatches(graphs, module, given), expected)
    for mistake in OF_STAGES.values():
        assert_bitwise_different(run_microbatches(graphs, module, given, **mistake), expected)
    needed = gm.graph.find_nodes(op="call_function", target=aten.tanh_backward.default)[0]
    with pytest.raises(
        PlanError, match=r"needs tanh_backward of 1 \(backward_weight\), which runs later"
    ):
        split_stage_graph(gm, moved={needed: "backward_weight"})


# --- mistakes that are reported before anything runs


def small(mesh):
    """Two products, sharded over ``tp`` where the mesh has it, and over the rest; the bucketed
    graph of a step.
    """
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    names = mesh.mesh_dim_names
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    data_parallel(model, mesh["dp"])
    traced = trace_step(model, lambda net, x: net(x).sum(), (torch.ones(2, 8),))
    bucketed = bind_options(
        joint_transformer_block_bucketing_reordering_pass, bucket_plan=["0", "1"]
    )
    return apply_graph_passes(traced.gm, traced.example_inputs, [bucketed])


@pytest.mark.gt_world("fake", mesh={"dp": 4, "tp": 2})
def test_of_the_order_of_a_mesh(gt_mesh):
    """Data ranks of one node for those across nodes: the same shapes, other ranks."""
    swapped = small(init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "dp")))
    with pytest.raises(AssertionError, match=r"bucket layouts differ[^$]*ranks"):
        assert_same_layout(bucket_layout(swapped), bucket_layout(small(gt_mesh)))


@pytest.mark.gt_world("fake", mesh={"dp": 4, "tp": 2})
def test_of_a_wait_that_moves(gt_mesh):
    """The data's, in front of the first product: no bit changes, but nothing hides the gather. Its
    line has moved.
    """
    gm = small(gt_mesh)
    before = graphtext.render(gm, view="schedule").splitlines()
    second = launched(gm, GATHER, gt_mesh["dp"])[1]
    second.append(next(iter(second.users)))
    after = graphtext.render(gm, view="schedule").splitlines()
    wait, product = '  wait(bucket(_["1"]).all_gather_into_tensor)', '  compute(_["0"], mm, ops=1)'
    assert before.index(wait) > before.index(product)
    assert after.index(wait) < after.index(product)


@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 2})
def test_of_one_rank_alone(gt_mesh, gt_world):
    """Two collectives change places on one rank, where ranks would wait for ever."""
    gm = small(gt_mesh)
    assert_same_collectives(gm)
    first, second = launched(gm, GATHER, gt_mesh["dp"])
    if gt_world.rank == 1:
        first.append(second) if second < first else first.prepend(second)
    with pytest.raises(
        RanksDisagree,
        match=r"collective 0 differs: rank 0 issues .*all_gather.* of 0 .*, rank 1 issues",
    ):
        assert_same_collectives(gm)
