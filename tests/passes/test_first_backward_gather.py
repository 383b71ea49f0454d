"""E8: the all-gather that the backward needs first is launched where eager FSDP2 launches it."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import (
    apply_graph_passes,
    construct_default_graph_passes,
    graphtext,
    selective_activation_remat_pass,
    tag_with_memory_policy_pass,
    timeline,
)
from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as joint_pass
from pytest_gtrainer import transformer_block_bucketing_reordering_pass as separate_pass
from pytest_gtrainer._torch.passes import ALL_GATHER
from pytest_gtrainer.graph.collectives import PlanError
from pytest_gtrainer.graph.nodes import BACKWARD, direction
from pytest_gtrainer.references.graph import shard_traceably, trace_config
from tests.passes import test_bucketing

pytestmark = pytest.mark.gt_world("fake", size=8, mesh={"fsdp": 8})
aten = torch.ops.aten
KEPT = {"the last group stays gathered": ["norm", "lm_head"], "every group is resharded": []}
BUCKET = {"the last group stays gathered": "layers.1", "every group is resharded": "norm+lm_head"}


TRACED = {}
"""By model, policy and group: each is traced once, and the passes rewrite a copy."""


def rewritten(config, keep_unsharded, **options):
    model = config.model()
    key = type(model), config.mp_policy, config.mesh.get_group().group_name
    if key not in TRACED:
        TRACED[key] = trace_config(config, shard_traceably(model, config))
    traced = TRACED[key]
    options = {"reshard_after_forward": True, "keep_unsharded": keep_unsharded, **options}
    passes = construct_default_graph_passes(bucket_plan=config.bucket_plan, **options)
    return apply_graph_passes(traced.gm, traced.example_inputs, passes)


def is_judged(node):
    """A product or an all-gather of the backward."""
    return direction(node) == BACKWARD and node.target in (aten.mm.default, ALL_GATHER)


def until_the_first_gather(nodes):
    """Return the products and all-gathers of the backward up to the first all-gather, and its
    result.
    """
    seen = []
    for target, numel in nodes:
        seen.append("product" if target is aten.mm.default else numel)
        if seen[-1] != "product":
            return seen
    return seen


class Recorder(TorchDispatchMode):
    """Products and all-gathers as eager issues them: operator, and elements of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.mm.default or "allgather" in str(func):
            self.calls.append((func, args[0].numel()))
        return func(*args, **(kwargs or {}))


def eager_calls(config, keep_unsharded):
    """Return the calls of FSDP2's backward; a fake group moves no data, but the hooks run as
    anywhere.
    """
    model = config.model()
    for entry in config.bucket_plan:
        modules = [
            model.get_submodule(fqn) for fqn in ([entry] if isinstance(entry, str) else entry)
        ]
        fully_shard(modules, mesh=config.mesh, reshard_after_forward=entry != keep_unsharded)
    fully_shard(model, mesh=config.mesh)
    loss = config.step(model, *config.batch(0, 0))
    with Recorder() as recorder:
        loss.backward()
    return recorder.calls


@pytest.mark.second_tier("every")
@pytest.mark.parametrize("case", list(KEPT))
def test_it_is_launched_where_eager_fsdp2_launches_it(gt_mesh, case):
    """E8: the same payload, before any product of the backward, those of the head first of all."""
    config = llama3_training(gt_mesh, "fp32")
    gm = rewritten(config, KEPT[case])
    backward = [node for node in gm.graph.nodes if direction(node) == BACKWARD]
    issued = [(node.target, node.meta["val"].numel()) for node in backward if is_judged(node)]
    assert until_the_first_gather(issued) == until_the_first_gather(eager_calls(config, KEPT[case]))
    launch = next(node for node in backward if node.target is ALL_GATHER)
    assert "+".join(launch.meta["fsdp_bucket"]["plan_fqns"]) == BUCKET[case]
    (wait,) = launch.users
    hiding = [
        n
        for n in backward[backward.index(launch) : backward.index(wait)]
        if n.target is aten.mm.default
    ]
    assert hiding, f"no product between {launch} and its wait: the all-gather is exposed"
    unordered = rewritten(
        config, KEPT[case], reorder=False
    )  # the twin: where the first parameter is read
    assert next(node for node in unordered.graph.nodes if is_judged(node)).target is aten.mm.default


@pytest.mark.second_tier
def test_a_layer_of_experts_hides_its_first_all_gather(gt_mesh):
    """E8: under the default cost model 4.8 µs of it were exposed."""
    gm = rewritten(deepseek_v3_training(gt_mesh, "bf16_fp32"), ["norm", "lm_head"])
    exposed = [span.label for span in timeline(gm).spans if span.kind == "exposed"]
    assert exposed == ["waits: bwd tok_embeddings"], (
        "only the last reduce-scatter has nothing behind it"
    )


def test_it_stays_behind_the_backward_of_the_loss(gt_mesh):
    """E3, E8: FSDP2's first hook runs there; the bucket is not held at the peak of the logits."""
    config = llama3_training(gt_mesh, "fp32")
    for plan in (
        config.bucket_plan,
        [*config.bucket_plan, ""],
    ):  # an entry for the root is none for the loss
        gm = rewritten(replace(config, bucket_plan=plan), [])
        nodes = list(gm.graph.nodes)
        launch = next(
            node for node in nodes if node.target is ALL_GATHER and direction(node) == BACKWARD
        )
        loss = [
            n
            for n in nodes
            if direction(n) == BACKWARD and n.meta.get("custom", {}).get("module_fqn") == "loss"
        ]
        assert loss
        assert max(loss) < launch


uneven_joint_of = test_bucketing.uneven_joint_of


@pytest.mark.second_tier
def test_ranks_that_pad_launch_it_at_the_same_place(uneven_joint_of, plan):
    """D14: only the last rank's chains have pads, so no node of a chain may mark the place."""
    orders = []
    for rank in (0, 3):
        gm = selective_activation_remat_pass(tag_with_memory_policy_pass(uneven_joint_of(rank).gm))
        joint_pass(gm, bucket_plan=plan)
        orders.append([node.target for node in gm.graph.nodes if is_judged(node)])
    assert orders[0] == orders[1]
    assert orders[0][0] is ALL_GATHER, "it is not before the first product"


@pytest.mark.parametrize("alone", [False, True], ids=["joint", "a backward graph of its own"])
def test_a_chain_that_leads_to_it_marks_no_place(alone):
    """The launch would stand before its own shard's cast; without other compute it stays where it
    was.
    """
    if alone:  # whose nodes need no mark of the backward
        gm = graphtext.parse(CAST_FIRST.replace("bwd", "fwd"))
        separate_pass(gm, bucket_plan=["layers.0", "layers.1"], direction="bwd")
    else:
        gm = graphtext.parse(CAST_FIRST)
        joint_pass(gm, bucket_plan=["layers.0", "layers.1"])
    names = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    assert names == ["cast", "gather", "product", "wait", "use"]


CAST_FIRST = """\
fsdp = group(range(0, 2))
if P:
  P.layers[0].weight: f32[2, 4]
if I:
  I.x: f32[4, 4]
if bwd:
  with layers[0]:
    cast: bf16[2, 4] = aten._to_copy(P.layers[0].weight, dtype=bf16)
  with layers[1]:
    product: f32[4, 4] = aten.mm(I.x, I.x)
  with layers[0]:
    gather: bf16[4, 4] = _c10d_functional.all_gather_into_tensor(cast, 2, fsdp)
    wait: bf16[4, 4] = _c10d_functional.wait_tensor(gather)
    use: bf16[4, 4] = aten.mm(wait, wait)
if out:
  yield bwd.layers[1].product
  yield bwd.layers[0].use
"""


def test_a_write_at_the_place_itself_is_not_crossed():
    """E8, D11: it would send what the parameter was before."""
    gm = graphtext.parse(WRITTEN_FIRST)
    with pytest.raises(
        PlanError, match=r"written writes to layers\.0\.weight, .* between written and gather"
    ):
        joint_pass(gm, bucket_plan=["layers.0", "layers.1"])


WRITTEN_FIRST = """\
fsdp = group(range(0, 2))
if P:
  P.layers[0].weight: f32[2, 4]
if bwd:
  with layers[1]:
    written: f32[2, 4] = aten.mul_.Tensor(P.layers[0].weight, P.layers[0].weight)
  with layers[0]:
    gather: f32[4, 4] = _c10d_functional.all_gather_into_tensor(P.layers[0].weight, 2, fsdp)
    wait: f32[4, 4] = _c10d_functional.wait_tensor(gather)
    use: f32[4, 4] = aten.mm(wait, wait)
if out:
  yield bwd.layers[0].use
"""
