"""Parameters gathered again in the backward, in traced graphs and on real ranks."""

import copy
import operator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from fixtures.training import llama3_training
from pytest_gtrainer import (
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    construct_default_graph_passes,
    data_parallel,
    graphtext,
    selective_activation_remat_pass,
    tag_with_memory_policy_pass,
    trace_step,
)
from pytest_gtrainer._torch.passes import ALL_GATHER
from pytest_gtrainer.graph.nodes import node_fqn
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

fake = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


def gathers(gm):
    """(direction, bucket) of every all-gather, in the order of their launches."""
    launches = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    found = [node.meta["fsdp_bucket"] for node in sorted(launches)]
    return [(bucket["direction"], bucket["plan_fqns"][0]) for bucket in found]


@fake
def test_layers_ascend_in_the_forward_and_descend_in_the_backward(joint, plan):
    """E5: and without resharding they ascend, and that is all. What stays gathered is not gathered
    again.
    """
    layers = ["layers.0", "layers.1", "layers.2"]
    options = {
        "reshard_after_forward": True,
        "keep_unsharded": ["norm", "lm_head", "tok_embeddings"],
    }
    gm = apply_graph_passes(
        joint.gm, None, construct_default_graph_passes(bucket_plan=plan, **options)
    )
    forward = [("fwd", name) for name in ["tok_embeddings", *layers, "norm"]]
    assert gathers(gm) == [*forward, *(("bwd", name) for name in reversed(layers))]
    once = apply_graph_passes(joint.gm, None, construct_default_graph_passes(bucket_plan=plan))
    assert gathers(once) == forward


@fake
def test_recomputed_nodes_have_their_modules_and_the_order_of_the_forward(joint):
    """M2: no whole parameter is read across the boundary any more."""
    old = set(joint.gm.graph.nodes)
    gm = selective_activation_remat_pass(tag_with_memory_policy_pass(joint.gm))
    new = [node for node in gm.graph.nodes if node not in old]
    assert sum(node.target is ALL_GATHER for node in new) >= 3 * 3  # three matrices a layer
    first = {node.name: node for node in old}
    for node in new:
        original = first[node.name.removesuffix("_recomputed")]
        assert "autograd_backward" not in original.meta
        assert "recompute" not in node.meta
        assert node.meta["custom"] == original.meta["custom"]
        assert not any(user.meta.get("autograd_backward") for user in original.users)
    places = [
        [list(gm.graph.nodes).index(first[n.name.removesuffix("_recomputed")]) for n in run]
        for run in runs(new)
    ]
    swapped = [pair for run in places for pair in pairwise(run) if pair[0] >= pair[1]]
    assert swapped == [], "places in the forward of recomputed neighbours in another order"


@pytest.mark.second_tier
@fake
def test_modules_whose_names_begin_alike_are_resharded(gt_mesh, make_net):
    """``keep_unsharded`` is of whole names: ``layers.1`` keeps no ``layers.10``, ``norm`` no
    ``norm_out``.
    """
    net = make_net(11, 8)
    net.norm_out, net.lm_head = net.lm_head, nn.Identity()
    run = net.forward
    net.forward = lambda tokens: net.norm_out(run(tokens))
    traced = trace_step(
        data_parallel(net, gt_mesh),
        lambda m, t: m(t).sum(),
        (torch.zeros(2, 3, dtype=torch.int64),),
    )
    gm = selective_activation_remat_pass(
        tag_with_memory_policy_pass(traced.gm, keep_unsharded=["layers.1", "norm"])
    )
    again = {node_fqn(node) for node in gm.graph.nodes if "recomputed" in node.name}
    assert {"layers.10.w1", "norm_out"} <= again
    assert not {fqn for fqn in again if f"{fqn}.".startswith(("layers.1.", "norm."))}


PARTS = """
if I:
  I.x: f32[4]
for i in fwd.layers[0]:
  with L:
    split: (f32[2], f32[2]) = aten.split.Tensor(I.x, 2)
    exp: f32[2] = aten.exp(split[0])
for i in bwd.layers[0]:
  with L:
    mul: f32[2] = aten.mul.Tensor(saved.L.split[0], saved.L.split[1])
if out:
  yield fwd.layers[0].exp
  yield bwd.layers[0].mul
"""


@pytest.mark.parametrize("tagged", [0, 1])
def test_a_part_of_several_results_may_have_a_tag_of_its_own(tagged):
    """M2: it is recomputed from what it is a part of, which is saved, and the other part is saved,
    too.
    """
    gm = graphtext.parse(PARTS)
    parts = {node.args[1]: node for node in gm.graph.nodes if node.target is operator.getitem}
    parts[tagged].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    selective_activation_remat_pass(gm)
    again = [node for node in gm.graph.nodes if node.name.endswith("_recomputed")]
    found = [(node.all_input_nodes, node.args[1]) for node in again]
    assert found == [(parts[tagged].all_input_nodes, tagged)], "what is recomputed, and of what"


def test_a_later_pass_may_annotate_a_recomputed_value_alone():
    """M2: and the forward's alone, at any depth."""
    gm = graphtext.parse(PARTS)
    first = next(node for node in gm.graph.nodes if node.target is operator.getitem)
    first.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    first.meta["custom"]["own"] = {"stage": 1}
    selective_activation_remat_pass(gm)
    again = next(node for node in gm.graph.nodes if node.name.endswith("_recomputed"))
    assert again.meta["custom"] == first.meta["custom"]
    again.meta["custom"]["module_fqn"] = "elsewhere"
    again.meta["custom"]["own"]["stage"] = 2
    assert (node_fqn(first), first.meta["custom"]["own"]) == ("layers.0", {"stage": 1})


@fake
def test_a_value_that_has_a_tag_keeps_it(joint):
    """M1: what somebody saves is saved, on the gather or on any value that it passes through."""
    gm = copy.deepcopy(joint.gm)
    first, second = sorted(gm.graph.find_nodes(op="call_function", target=ALL_GATHER))[:2]
    first.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    wait = next(iter(second.users))
    wait.meta["recompute"] = CheckpointPolicy.PREFER_SAVE
    tag_with_memory_policy_pass(gm)
    assert (first.meta["recompute"], wait.meta["recompute"]) == (
        CheckpointPolicy.MUST_SAVE,
        CheckpointPolicy.PREFER_SAVE,
    )
    assert second.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


def runs(nodes):
    """Stretches of neighbours."""
    found = []
    for node in nodes:
        if found and found[-1][-1].next is node:
            found[-1].append(node)
        else:
            found.append([node])
    return found


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_resharding_changes_no_bit(gt_mesh):
    """E5, M2: and the graph equals eager FSDP2, which reshards."""
    config = llama3_training(gt_mesh, "bf16_fp32", "debug_odd", steps=2)
    resharding = GraphRun(config, reshard_after_forward=True)
    assert len(gathers(resharding.traced.gm)) > len(gathers(GraphRun(config).traced.gm)) == 4
    record = resharding.run()
    assert_bitwise_equal(record, EagerRun(config).run())
    later = replace(config, batch=lambda step, rank: config.batch(step + 1, rank))
    assert_bitwise_different(record, EagerRun(later).run(), what="other batches")
