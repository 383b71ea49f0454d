"""The joint pass on graphs that somebody has changed before: the same values, or a sentence."""

import copy
from contextlib import ExitStack
from importlib import import_module
from unittest import mock

import pytest
import torch

from pytest_gtrainer import bucket_layout, data_parallel, graphtext, trace_step
from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as joint_pass
from pytest_gtrainer._torch.passes import ALL_GATHER, REDUCE_SCATTER, WAIT
from pytest_gtrainer.graph.collectives import PlanError, fsdp_all_gathers, fsdp_reduce_scatters
from pytest_gtrainer.graph.layout import UnreadLayout
from pytest_gtrainer.graph.nodes import arguments_given, direction, node_fqn

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
TOKENS = torch.arange(6).view(2, 3)


def values(gm, traced):
    """Under a fake group a gather repeats the shard and a reduction keeps its slice, so values
    carry over.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(t.shape, generator=generator) for t in traced.example_inputs[:-1]]
    return gm(*inputs, TOKENS)


def assert_same_values(gm, before, traced):
    gm.graph.lint()
    pairs = zip(values(gm, traced), values(before, traced), strict=True)
    differ = [
        place
        for place, pair in enumerate(pairs)
        if pair[0] is not pair[1] and not torch.equal(*pair)
    ]
    assert differ == [], "outputs that differ"


def scheduled(gm):
    """All launches of parameters first, their waits as they were; waits of gradients last, in
    reversed order.
    """
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    for member in reversed(fsdp_all_gathers(gm)):
        for node in (*member.chain, member.launch):
            first.prepend(node)
    output = gm.graph.output_node()
    for member in reversed(fsdp_reduce_scatters(gm)):
        for node in (member.wait, *member.chain):
            output.prepend(node)
    gm.recompile()
    return gm


def bucketed_by_torch(gm):
    """Torch's own pass on the forward's all-gathers; the estimates of a GPU that it asks for are
    ours.
    """
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    def stack(node):
        fqn = node_fqn(node)
        return [] if not fqn or direction(node) == "bwd" else [(fqn, torch.nn.Module)]

    with ExitStack() as stubs:  # where torch looks them up differs between its versions
        for home in map(
            import_module, ("torch._inductor.utils", "torch.utils._runtime_estimation")
        ):
            for name in ("get_gpu_dram_gbps", "get_device_tflops"):
                if hasattr(home, name):
                    stubs.enter_context(mock.patch.object(home, name, return_value=100))
        return manual_overlap_bucketing(
            gm, [f"layers.{i}" for i in range(3)], module_stack_fn=stack
        )


@pytest.mark.second_tier("False")
@pytest.mark.parametrize("reorder", [True, False])
def test_a_graph_that_is_scheduled_already_is_bucketed_as_any(joint, plan, reorder):
    """E1, E2, E6: waits in another order than launches; each bucket is one collective again."""
    before = copy.deepcopy(joint.gm)
    gm = joint_pass(scheduled(joint.gm), bucket_plan=plan, reorder=reorder)
    for target in (ALL_GATHER, REDUCE_SCATTER):
        assert len(gm.graph.find_nodes(op="call_function", target=target)) == len(plan)
    assert_same_values(gm, before, joint)


def test_settings_of_collectives_may_be_given_by_keywords(joint, plan):
    before = copy.deepcopy(joint.gm)
    for target in (ALL_GATHER, REDUCE_SCATTER):
        for launch in joint.gm.graph.find_nodes(op="call_function", target=target):
            first, *rest = arguments_given(launch)
            launch.kwargs = {argument.name: given for argument, given in rest}
            launch.args = (first[1],)
    gm = joint_pass(joint.gm, bucket_plan=plan)
    for target in (ALL_GATHER, REDUCE_SCATTER):
        assert len(gm.graph.find_nodes(op="call_function", target=target)) == len(plan)
    assert_same_values(gm, before, joint)


def test_frozen_parameters_are_gathered_and_not_reduced(gt_mesh, make_net, plan):
    """B6: also where a whole bucket is frozen."""
    net = make_net(3, 8)
    net.layers[0].requires_grad_(False)
    net.layers[1].w1.requires_grad_(False)
    net.tok_embeddings.requires_grad_(False)
    traced = trace_step(data_parallel(net, gt_mesh), lambda m, t: m(t).float().sum(), (TOKENS,))
    before = copy.deepcopy(traced.gm)
    gm = joint_pass(traced.gm, bucket_plan=plan)
    assert len(gm.graph.find_nodes(op="call_function", target=ALL_GATHER)) == len(plan)
    assert len(gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)) == len(plan) - 2
    assert_same_values(gm, before, traced)


WRITTEN = """\
fsdp = group(range(0, 4))
if P:
  P.layers[0].w: f32[2, 4]
if fwd:
  with layers[0]:
    moved: f32[2, 4] = aten.{operator}.Tensor(P.layers[0].w, P.layers[0].w)
    gather: f32[8, 4] = _c10d_functional.all_gather_into_tensor(moved, 4, fsdp)
    wait: f32[8, 4] = _c10d_functional.wait_tensor(gather)
if out:
  yield fwd.layers[0].wait
"""


@pytest.mark.parametrize(("operator", "gathered"), [("add", ["layers.0.w"]), ("add_", [])])
def test_what_was_written_to_is_not_moved_as_a_parameter(operator, gathered):
    """D6: its gather could not move in front of the write."""
    gm = graphtext.parse(WRITTEN.format(operator=operator))
    assert [member.parameter for member in fsdp_all_gathers(gm)] == gathered


def test_a_parameter_that_is_copied_into_a_view_of_what_is_sent_is_not_lost():
    """B6: a layout that showed no such collective would pass where a parameter is missing."""
    gm = graphtext.parse(THROUGH_A_VIEW)
    with pytest.raises(
        UnreadLayout, match=r"the collective gather gathers layers\.0\.w, .* order is lost"
    ):
        bucket_layout(gm)


def test_shards_that_are_joined_for_an_all_reduce_are_followed_through_it():
    """B6: reduced one by one over the shards, together over the replicas, and handed out in
    parts.
    """
    payloads = bucket_layout(graphtext.parse(JOINED_FOR_AN_ALL_REDUCE)).payloads
    sent = [
        (each.collective, [(slot.parameter, slot.offset, slot.nbytes) for slot in each.slots])
        for each in payloads
    ]
    w, scale = "layers.0.w", "layers.0.scale"
    assert sent == [
        ("reduce_scatter", [(w, 0, 32)]),
        ("reduce_scatter", [(scale, 0, 8)]),
        ("all_reduce", [(w, 0, 32), (scale, 32, 8)]),
    ]


def test_a_gradient_that_is_returned_once_more_keeps_its_parameters_name():
    """B6: as a norm that is logged beside it."""
    (payload,) = bucket_layout(graphtext.parse(RETURNED_TWICE)).payloads
    assert [slot.parameter for slot in payload.slots] == ["layers.0.w"]


RETURNED_TWICE = """\
fsdp = group(range(0, 4))
if I:
  I.x: f32[8]
if bwd:
  with layers[0]:
    one: f32[2] = _c10d_functional.reduce_scatter_tensor(I.x, 'avg', 4, fsdp)
    one_wait: f32[2] = _c10d_functional.wait_tensor(one)
if out:
  layers[0].w = bwd.layers[0].one_wait
  logged = bwd.layers[0].one_wait
"""


def test_members_of_two_dtypes_have_the_bytes_of_what_they_are_packed_as():
    """B6: ``cat`` makes both the wider one."""
    text = (
        ALIGNED.replace("a: f32[3]", "a: bf16[3]")
        .replace(".a, padding, P", ".a, P")
        .replace("f32[6]", "f32[5]")
    )
    (payload,) = bucket_layout(graphtext.parse(text.replace("f32[24]", "f32[20]"))).payloads
    assert [(slot.offset, slot.nbytes) for slot in payload.slots] == [(0, 12), (12, 8)]


def test_padding_between_members_moves_those_behind_it():
    """B6: who packs at aligned offsets; bytes are counted from the payload's begin."""
    (payload,) = bucket_layout(graphtext.parse(ALIGNED)).payloads
    assert [(slot.parameter, slot.offset, slot.nbytes) for slot in payload.slots] == [
        ("layers.0.a", 0, 12),
        ("layers.0.b", 16, 8),
    ]


ALIGNED = """\
fsdp = group(range(0, 4))
if P:
  P.layers[0].a: f32[3]
  P.layers[0].b: f32[2]
if fwd:
  with layers[0]:
    padding: f32[1] = aten.zeros.default([1])
    bucket: f32[6] = aten.cat([P.layers[0].a, padding, P.layers[0].b])
    gather: f32[24] = _c10d_functional.all_gather_into_tensor(bucket, 4, fsdp)
    wait: f32[24] = _c10d_functional.wait_tensor(gather)
if out:
  yield fwd.layers[0].wait
"""


JOINED_FOR_AN_ALL_REDUCE = """\
shard = group(range(0, 4))
replicate = group([0, 4])
if I:
  I.x: f32[8, 4]
  I.y: f32[8]
if bwd:
  with layers[0]:
    one: f32[2, 4] = _c10d_functional.reduce_scatter_tensor(I.x, 'avg', 4, shard)
    one_wait: f32[2, 4] = _c10d_functional.wait_tensor(one)
    two: f32[2] = _c10d_functional.reduce_scatter_tensor(I.y, 'avg', 4, shard)
    two_wait: f32[2] = _c10d_functional.wait_tensor(two)
    flat: f32[8] = aten.view(one_wait, [8])
    joined: f32[10] = aten.cat([flat, two_wait])
    both: f32[10] = _c10d_functional.all_reduce(joined, 'avg', replicate)
    both_wait: f32[10] = _c10d_functional.wait_tensor(both)
    parts: (f32[8], f32[2]) = aten.split_with_sizes(both_wait, [8, 2])
    w: f32[2, 4] = aten.view(parts[0], [2, 4])
if out:
  layers[0].w = bwd.layers[0].w
  layers[0].scale = bwd.layers[0].parts[1]
"""

THROUGH_A_VIEW = """\
fsdp = group(range(0, 4))
if P:
  P.layers[0].w: f32[2, 4]
if fwd:
  with layers[0]:
    buffer: f32[8] = aten.empty.memory_format([8])
    shown: f32[2, 4] = aten.view(buffer, [2, 4])
    copied: f32[2, 4] = aten.copy_(shown, P.layers[0].w)
    gather: f32[32] = _c10d_functional.all_gather_into_tensor(buffer, 4, fsdp)
    wait: f32[32] = _c10d_functional.wait_tensor(gather)
if out:
  yield fwd.layers[0].wait
"""


class ReadInTheBackward(torch.autograd.Function):
    """Its backward reads a parameter that the forward does not."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.no_grad():
            return gradient * ctx.module.scale, None


def test_a_parameter_read_only_in_the_backward_has_a_bucket_there(gt_mesh, make_net, plan):
    """B6, E3: gathered in the backward, by nobody before."""
    net = make_net(3, 8)
    net.layers[1].forward = lambda x, run=net.layers[1].norm: ReadInTheBackward.apply(
        run(x), net.layers[1]
    )
    traced = trace_step(
        data_parallel(net, gt_mesh), lambda m, t: m(t).float().sum(), (TOKENS,), reuse_gathers=False
    )
    before = copy.deepcopy(traced.gm)
    gm = joint_pass(traced.gm, bucket_plan=plan)
    ways = {
        node.meta["fsdp_bucket"]["direction"]
        for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    }
    assert ways == {"fwd", "bwd"}
    assert_same_values(gm, before, traced)


def test_a_bucket_without_parameters_changes_nothing(joint, plan):
    """B6: of an entry that has none, or of whose modules nothing is left."""
    empty = copy.deepcopy(joint.gm)
    node = next(node for node in empty.graph.nodes if node_fqn(node) == "layers.0.norm")
    node.meta["custom"] = {"module_fqn": "rope"}
    assert (
        joint_pass(empty, bucket_plan=[*plan, "rope"]).code
        == joint_pass(joint.gm, bucket_plan=plan).code
    )


def test_a_graph_that_torch_has_bucketed_is_refused(joint, plan):
    """Its all-gathers are others' buckets, so ours would cover a part of the parameters in
    silence.
    """
    gm = bucketed_by_torch(joint.gm)
    before = gm.code
    with pytest.raises(PlanError, match="is bucketed already, by another pass"):
        joint_pass(gm, bucket_plan=plan)
    assert gm.code == before
    assert any(node.target is WAIT for node in gm.graph.nodes)
