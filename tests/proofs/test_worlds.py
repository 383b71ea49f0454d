"""Proofs of data-parallel graphs on simulated nodes: passes, and mistakes that are planted."""

import copy

import pytest
import torch

from fixtures.models.gated import VOCABULARY, GatedModel
from fixtures.models.gated import own_token_step as step
from pytest_gtrainer import (
    canonicalize_graph_pass,
    data_parallel,
    deduplicate_fsdp_unshard_chains_pass,
    joint_transformer_block_bucketing_reordering_pass,
    prove,
    trace_step,
)
from pytest_gtrainer.proofs.inputs import draw_inputs

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
PLAN = [["embed"], ["blocks.0"], ["head"]]

pytestmark = pytest.mark.gt_world("simulated", size=4, mesh={"fsdp": 4}, nodes=2)


@pytest.fixture
def traced(gt_mesh):
    return traced_on(gt_mesh)


def traced_on(mesh):
    torch.manual_seed(0)
    model = data_parallel(GatedModel(blocks=1), mesh)
    return trace_step(model, step, (torch.randint(0, VOCABULARY, (2, 3)),)).gm


def bucketed(gm, order="managed"):
    return joint_transformer_block_bucketing_reordering_pass(
        copy.deepcopy(gm), bucket_plan=PLAN, payload_order=order
    )


def test_a_pass_that_only_moves_is_identical(traced, gt_world):
    before = bucketed(traced)
    after = deduplicate_fsdp_unshard_chains_pass(copy.deepcopy(before))
    proof = prove(canonicalize_graph_pass(after), before, world=gt_world)
    assert proof.kind == "identical", str(proof)
    assert proof.first is None
    assert proof.compared == 4 * (1 + 7)


def test_another_payload_order_is_reordered_in_the_gradients_that_changed_place(traced, gt_world):
    proof = prove(bucketed(traced, "execution"), bucketed(traced), world=gt_world)
    assert proof.kind == "reordered", str(proof)
    assert proof.first.result.startswith("blocks.0.")
    assert "reduce_scatter_tensor" in proof.origin


@pytest.mark.second_tier
def test_one_node_with_one_ring_adds_in_another_order_than_two(traced, gt_world):
    """The world decides; a world of one channel and two ranks has no order to choose."""
    proof = prove(bucketed(traced), traced, world=gt_world)
    assert proof.kind == "reordered", str(proof)


@pytest.mark.parametrize("target", [SCATTER, GATHER])
def test_a_collective_that_nobody_reads_is_named(traced, gt_world, target):
    """It is no result, and other ranks wait for it."""
    more = copy.deepcopy(traced)
    launch = first(more, target, -1)
    with more.graph.inserting_after(launch):
        more.graph.node_copy(launch)
    for pair, many in (((more, traced), "1 and 0"), ((traced, more), "0 and 1")):
        proof = prove(*pair, world=gt_world)
        assert proof.kind == "identical"
        assert f"nobody reads the results of {many} collectives" in "".join(proof.assumes)
    assert "nobody reads" not in "".join(prove(traced, traced, world=gt_world).assumes)


# --- mistakes


def first(gm, target, place=0):
    return [node for node in gm.graph.nodes if node.target is target][place]


def after(gm, node, target, *args, **kwargs):
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(target, (node, *args), kwargs)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def before(gm, node, target, *args, **kwargs):
    operand = node.args[0]
    with gm.graph.inserting_before(node):
        node.update_arg(0, gm.graph.call_function(target, (operand, *args), kwargs))


def wait_of(node):
    return next(iter(node.users))


def sum_for_average(gm):
    first(gm, SCATTER).update_arg(1, "sum")


def averaged_twice(gm):
    after(gm, wait_of(first(gm, SCATTER)), aten.div.Scalar, 4)


def rounded_before_the_sum(gm):
    node = first(gm, SCATTER)
    before(gm, node, aten._to_copy.default, dtype=torch.bfloat16)
    before(gm, node, aten._to_copy.default, dtype=torch.float32)


def payload_rolled(gm):
    before(gm, first(gm, SCATTER), aten.roll.default, [1], [0])


def ranks_flipped(gm):
    wait = wait_of(first(gm, GATHER, 1))
    after(gm, wait, aten.flip.default, [0])


def members_exchanged(gm):
    for split in [node for node in gm.graph.nodes if node.target is aten.split_with_sizes.default]:
        by_shape = {}
        for user in split.users:
            other = by_shape.setdefault(user.meta["val"].shape, user)
            if other is not user:
                ours, theirs = user.args[1], other.args[1]
                user.update_arg(1, theirs)
                other.update_arg(1, ours)
                return
    raise AssertionError("no bucket has two members of one shape")


def sign_of_a_gradient(gm):
    after(gm, wait_of(first(gm, SCATTER)), aten.neg.default)


def other_eps(gm):
    for node in gm.graph.nodes:
        if node.target is aten._fused_rms_norm.default:
            node.update_arg(3, 1e-3)
            return
    node = next(n for n in gm.graph.nodes if n.target is aten.add.Scalar)
    node.update_arg(1, 1e-3)


def a_little_more(gm):
    after(gm, wait_of(first(gm, SCATTER)), aten.mul.Scalar, 1 + 2**-30)


def own_part_without_a_sum(gm):
    node = first(gm, SCATTER)
    rows = node.meta["val"].shape[0]
    with gm.graph.inserting_before(node):
        own = gm.graph.call_function(aten.slice.Tensor, (node.args[0], 0, 0, rows))
    wait_of(node).replace_all_uses_with(own)


def weight_scaled_before_its_use(gm):
    node = next(n for n in gm.graph.nodes if n.op == "placeholder")
    with gm.graph.inserting_before(next(iter(node.users))):
        gm.graph.call_function(aten.mul_.Tensor, (node, 0.5))


def weight_scaled_at_the_end(gm):
    node = next(n for n in gm.graph.nodes if n.op == "placeholder")
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(aten.mul_.Tensor, (node, 0.5))


def times_one(gm):
    after(gm, wait_of(first(gm, SCATTER)), aten.mul.Scalar, 1.0)


PLANTED = {
    sum_for_average: "another function",
    averaged_twice: "another function",
    rounded_before_the_sum: "rounds elsewhere",
    payload_rolled: "another function",
    ranks_flipped: "another function",
    members_exchanged: "another function",
    sign_of_a_gradient: "another function",
    a_little_more: "another function",
    own_part_without_a_sum: "another function",
    weight_scaled_before_its_use: "another function",
    weight_scaled_at_the_end: "another function",
    times_one: "identical",
}
FACTORS = {sum_for_average: 2, averaged_twice: "1/4", sign_of_a_gradient: -1}


@pytest.mark.second_tier(
    *("sum_for", "averaged", "rounded", "payload", "ranks", "members", "sign", "other", "a_little"),
    *("own_part", "weight_scaled"),
)
@pytest.mark.gt_world("simulated", size=2, mesh={"fsdp": 2})
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_told_in_its_kind(traced, gt_world, plant):
    good = bucketed(traced)
    bad = copy.deepcopy(good)
    plant(bad)
    bad.recompile()
    proof = prove(bad, good, world=gt_world)
    assert proof.kind == PLANTED[plant], str(proof)
    assert str(proof.factor) == str(FACTORS.get(plant))
    if proof.first is not None and proof.first.element is not None:
        moves = plant in (payload_rolled, own_part_without_a_sum)
        assert proof.origin.startswith("a move: " if moves else "node "), str(proof)


@pytest.mark.second_tier
@pytest.mark.parametrize("ranks", ["one for all", "all"])
def test_a_draw_that_nobody_reads_is_another_function(traced, gt_world, ranks):
    """The next draws are other numbers."""
    drawing = copy.deepcopy(traced)
    after(drawing, first(drawing, aten.embedding.default), aten.rand_like.default)
    node = first(drawing, aten.rand_like.default)
    node.replace_all_uses_with(node.args[0])
    inputs = None
    if ranks == "all":
        of_ranks = [draw_inputs(traced, seed=rank) for rank in range(gt_world.size)]
        inputs = of_ranks.__getitem__
    proof = prove(drawing, traced, world=gt_world, inputs=inputs)
    assert proof.kind == "another function", str(proof)
    assert proof.first.result == "random state of torch.cpu afterwards"


def test_collectives_need_a_world(traced):
    with pytest.raises(ValueError, match="communicates: give world="):
        prove(traced, traced)


def test_in_a_world_both_are_graphs(traced, gt_world):
    with pytest.raises(ValueError, match="both programs are graphs"):
        prove(lambda *args: args, traced, world=gt_world)
