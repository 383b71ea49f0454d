"""Bucketing of collectives, and graphs and plans that it refuses."""

import copy
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from pytest_gtrainer import (
    bucket_layout,
    canonicalize_graph_pass,
    data_parallel,
    get_default_transformer_block_buckets,
    trace_step,
)
from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as joint_pass
from pytest_gtrainer._torch.fake_groups import fake_group_beside
from pytest_gtrainer._torch.passes import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from pytest_gtrainer.graph.collectives import PlanError
from pytest_gtrainer.graph.same_on_ranks import collective_lines
from pytest_gtrainer.testing import run_pass_file

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


@pytest.fixture
def uneven_joint_of(make_net):
    """The joint graph as ``rank`` of 4 traces it, for a width that 4 does not divide."""

    def trace(rank):
        with fake_group_beside(rank, 4):
            model = data_parallel(make_net(3, 10), init_device_mesh("cpu", (4,)))
            traced = trace_step(
                model, lambda m, t: m(t).sum(), (torch.zeros(2, 3, dtype=torch.int64),)
            )
            return traced.with_graph(
                canonicalize_graph_pass(traced.gm)
            )  # since torch 2.15 all ranks pad, by nothing

    return trace


def found(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


def payload_of(layout, collective, label):
    """The one payload of a bucket."""
    of_bucket = [payload for payload in layout.of(collective) if payload.label == label]
    assert len(of_bucket) == 1, (
        f"{len(of_bucket)} {collective}s of bucket {label!r}, expected 1, in\n{layout}"
    )
    return of_bucket[0]


def code_of(gm):
    gm.recompile()
    return gm.code


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (["norm", "lm_head"], ("norm.weight", "norm.bias", "lm_head.weight")),
        (["lm_head", "norm"], ("lm_head.weight", "norm.weight", "norm.bias")),
    ],
)
def test_modules_that_share_a_bucket_are_packed_as_they_are_listed(joint, plan, entry, names):
    """D2: as ``fully_shard([a, b])`` walks them, whichever the model registers first."""
    layout = bucket_layout(joint_pass(joint.gm, bucket_plan=[*plan[:-1], entry]))
    for collective in ("all_gather", "reduce_scatter"):
        assert payload_of(layout, collective, "+".join(entry)).parameters == names


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("registration", "scale"),
        ("execution", "norm.weight"),
        (["layers.1.w3.weight"], "w3.weight"),
    ],
)
def test_other_orders_are_other_payloads(joint, plan, order, first):
    """The twins of D2: named_parameters order, execution order, an order by hand."""
    layout = bucket_layout(joint_pass(joint.gm, bucket_plan=plan, payload_order=order))
    payload = payload_of(layout, "all_gather", "layers.1")
    assert payload.parameters[0] == f"layers.1.{first}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers.1.w3.weigth", "no parameter 'layers.1.w3.weigth'; did you mean 'layers.1.w3.wei"),
        ("zz", "the graph has no parameter 'zz'$"),
    ],
)
def test_an_order_by_hand_names_parameters_of_the_graph(joint, plan, name, words):
    before = code_of(joint.gm)
    with pytest.raises(PlanError, match=words):
        joint_pass(joint.gm, bucket_plan=plan, payload_order=["layers.1.w3.weight", name])
    assert code_of(joint.gm) == before


def test_the_ranks_compare_how_long_a_bucket_is(joint, plan):
    """D14: of a single collective uneven shards may differ; buckets of two lengths would wait for
    each other.
    """
    lines = [line.text for line in collective_lines(joint_pass(joint.gm, bucket_plan=plan))]
    assert lines
    assert not [line for line in lines if " any shape of " in line], (
        "a bucket is compared without its shape"
    )


def test_all_reduces_of_ddp_stay(gt_mesh, make_net):
    """D10: a graph without sharded parameters is returned as it is (E6)."""
    model = data_parallel(make_net(1, 8), gt_mesh, mode="replicate")
    traced = trace_step(model, lambda m, t: m(t).sum(), (torch.zeros(2, 3, dtype=torch.int64),))
    before = code_of(traced.gm)
    gm = joint_pass(traced.gm, bucket_plan=["tok_embeddings", "layers.0", ["norm", "lm_head"]])
    assert gm.code == before
    assert found(gm, ALL_REDUCE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda plan: plan.remove("layers.1"),
            'no all-gather of layers.1.norm.weight.*: add "layers.1" to the plan',
        ),
        (lambda plan: plan.append("layers.7"), "names 'layers.7', which the model does not have"),
        (lambda plan: plan.__setitem__(4, ["norm", "head"]), "names 'head'"),
        (lambda plan: plan.__setitem__(4, "norm"), "covers no all-gather of lm_head.weight"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_the_graph_is_untouched(joint, plan, change, words):
    """B5, B6, D11: the message names module or parameters."""
    before = code_of(joint.gm)
    change(plan)
    with pytest.raises(PlanError, match=words):
        joint_pass(joint.gm, bucket_plan=plan)
    assert code_of(joint.gm) == before


@pytest.mark.second_tier
def test_a_parameter_gathered_twice_is_refused_with_advice(make_joint, plan):
    """B6: a graph traced without reuse."""

    def reading_twice(model, tokens):
        return model(tokens).sum() + model(tokens).sum()

    traced = make_joint(step=reading_twice, reuse_gathers=False)
    with pytest.raises(
        PlanError, match="more than one all-gather in the fwd direction: trace with reuse_"
    ):
        joint_pass(traced.gm, bucket_plan=plan)


def test_graphs_traced_elsewhere_need_the_conventions_only(joint, plan):
    """Without our tracer's names the buckets and payload orders are the same: they follow from
    modules and positions.
    """
    for node in joint.gm.graph.nodes:
        for key in ("gt_input", "gt_outputs", "gt_managed_order"):
            node.meta.pop(key, None)
    layout = bucket_layout(joint_pass(joint.gm, bucket_plan=plan))
    names = ["w1.weight", "w1.bias", "w2.weight", "w3.weight", "norm.weight", "norm.bias", "scale"]
    wanted = [joint.parameter_fqns.index(f"layers.1.{name}") for name in names]
    gather, scatter = (
        payload_of(layout, kind, "layers.1") for kind in ("all_gather", "reduce_scatter")
    )
    assert [int(name.rpartition(".input")[2]) for name in gather.parameters] == wanted
    assert [int(name.rpartition(".output")[2]) - 1 for name in scatter.parameters] == wanted


def collective_sequence(gm):
    return [
        (str(node.target), tuple(node.meta["val"].shape), node.meta["fsdp_bucket"]["plan_fqns"])
        for node in gm.graph.nodes
        if node.target in (ALL_GATHER, REDUCE_SCATTER, WAIT)
    ]


@pytest.mark.second_tier
@pytest.mark.parametrize("reorder", [True, False])
def test_uneven_shards_do_not_change_the_sequence_of_collectives(uneven_joint_of, plan, reorder):
    """D14: the last rank pads (10 rows over 4 ranks), the first does not; both issue the same, in
    the same order.
    """
    first, last = uneven_joint_of(rank=0), uneven_joint_of(rank=3)
    pads = [len(found(gm.gm, torch.ops.aten.constant_pad_nd.default)) for gm in (first, last)]
    assert pads[0] < pads[1]
    first, last = (
        joint_pass(traced.gm, bucket_plan=plan, reorder=reorder) for traced in (first, last)
    )
    assert collective_sequence(first) == collective_sequence(last)


@pytest.mark.second_tier
def test_chunked_loss_decides_where_the_head_belongs(gt_mesh):
    """B2 on our own trace: the head runs inside the loss, so without "loss" in the plan it is in no
    bucket.
    """
    from fixtures.models.chunked_loss import chunked_ce_step
    from fixtures.training import llama3_training
    from pytest_gtrainer.references.graph import rewrite, shard_traceably, trace_config

    def config(chunked):
        plan = get_default_transformer_block_buckets(2, chunked_loss_enabled=chunked)
        return llama3_training(gt_mesh, "bf16_fp32", step=chunked_ce_step(2), bucket_plan=plan)

    model = shard_traceably(config(True).model(), config(True))
    rewritten = rewrite(trace_config(config(True), model), config(True))
    (last,) = [
        p
        for p in bucket_layout(rewritten.gm).of("reduce_scatter")
        if "lm_head.weight" in p.parameters
    ]
    assert last.parameters == ("norm.weight", "lm_head.weight")
    with pytest.raises(PlanError, match=r"covers no all-gather of lm_head.weight \(read in loss\)"):
        rewrite(trace_config(config(False), model), config(False))


def test_what_is_gathered_but_no_parameter_is_left_alone(gt_mesh):
    """D6: a buffer that was written to, and a user input; moving their all-gathers would change
    values.
    """
    import torch.distributed._functional_collectives as funcol

    class Gathering(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
            self.register_buffer("seen", torch.ones(4))

        def forward(self, x):
            before = self.seen * 2
            self.seen.add_(1)
            gathered = [
                funcol.all_gather_single(tensor, 0, gt_mesh).sum() for tensor in (self.seen, x[0])
            ]
            return self.layers[0](x).sum() * before.sum() * sum(gathered)

    model = data_parallel(Gathering(), gt_mesh)
    traced = trace_step(model, lambda m, x: m(x), (torch.ones(3, 4),))
    inputs = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(0))
        for t in traced.example_inputs
    ]
    before = [value.clone() for value in copy.deepcopy(traced.gm)(*[t.clone() for t in inputs])]
    gm = joint_pass(traced.gm, bucket_plan=["layers.0"])
    bucketed = [node for node in found(gm, ALL_GATHER) if "fsdp_bucket" in node.meta]
    assert len(bucketed) == 1
    assert len(found(gm, ALL_GATHER)) == 3
    torch.testing.assert_close(list(gm(*[t.clone() for t in inputs])), before, rtol=0, atol=0)


def test_reduce_scatters_that_are_added_are_told_one_by_one(gt_mesh, make_net):
    """D6, C4, D17: traced without reuse, a head read in every chunk of the loss has one reduction a
    chunk.
    """
    from fixtures.models.chunked_loss import chunked_ce_step
    from fixtures.training import llama3_training
    from pytest_gtrainer.references.graph import shard_traceably

    plan = get_default_transformer_block_buckets(2, chunked_loss_enabled=True)
    config = llama3_training(
        gt_mesh, "fp32", step=chunked_ce_step(2, read_per_chunk=True), bucket_plan=plan
    )
    model = shard_traceably(config.model(), config)
    traced = trace_step(model, config.step, config.batch(0, 0), reuse_gathers=False)
    scatters = bucket_layout(traced.gm).of("reduce_scatter")
    assert [payload.parameters for payload in scatters].count(("lm_head.weight",)) == 2
    assert len(found(traced.gm, REDUCE_SCATTER)) == len(scatters)


@pytest.mark.second_tier
def test_a_bucket_of_two_modules_is_packed_in_the_order_that_the_plan_lists_them(gt_mesh):
    """D2: as ``fully_shard([lm_head, norm])`` packs it, whatever the registration and the
    execution; FSDP2 is asked.
    """
    from fixtures.training import llama3_training
    from pytest_gtrainer.references.eager import eager_bucket_layout, shard_eagerly
    from pytest_gtrainer.references.graph import rewrite, shard_traceably, trace_config

    for last in (["lm_head", "norm"], ["norm", "lm_head"]):
        config = llama3_training(
            gt_mesh, "fp32", bucket_plan=["tok_embeddings", "layers.0", "layers.1", last]
        )
        graph = rewrite(trace_config(config, shard_traceably(config.model(), config)), config)
        model = config.model()
        shard_eagerly(model, config)
        config.step(model, *config.batch(0, 0)).backward()
        layouts = {"graph": bucket_layout(graph.gm), "eager": eager_bucket_layout(model)}
        for side, layout in layouts.items():
            found = [p.parameters for p in layout.payloads if "norm.weight" in p.parameters]
            assert found == [tuple(f"{fqn}.weight" for fqn in last)] * 2, side


def test_a_tie_between_a_module_and_its_child_has_fsdp2s_place(gt_mesh):
    """D2: the walk comes to the child first, under the name that the parent registered."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.nn.Parameter(torch.ones(4, 4))
            self.first, self.second = (
                torch.nn.Linear(4, 4, bias=False),
                torch.nn.Linear(4, 4, bias=False),
            )
            self.first.weight = self.own

        def forward(self, x):
            return self.second(self.first(x)) @ self.own

    model = data_parallel(torch.nn.ModuleDict({"block": Tied()}), gt_mesh)
    traced = trace_step(model, lambda m, x: m["block"](x).sum(), (torch.ones(2, 4),))
    (payload,) = bucket_layout(joint_pass(traced.gm, bucket_plan=["block"])).of("all_gather")
    assert payload.parameters == ("block.own", "block.second.weight")


def test_parameters_of_the_root_have_an_entry_of_their_own(gt_mesh, make_net, plan):
    """The root's FQN is ""; without it the message says so."""
    net = make_net(3, 8)
    net.position = torch.nn.Parameter(torch.ones(8))
    model = data_parallel(net, gt_mesh)
    forward = model.forward
    model.forward = lambda tokens: forward(tokens) * model.position.sum()
    traced = trace_step(model, lambda m, t: m(t).sum(), (torch.zeros(2, 3, dtype=torch.int64),))
    with pytest.raises(
        PlanError,
        match=r'covers no all-gather of position \(read in the root\): add "" to the plan',
    ):
        joint_pass(traced.gm, bucket_plan=plan)
    layout = bucket_layout(joint_pass(traced.gm, bucket_plan=[*plan, ""]))
    assert ("position",) in [payload.parameters for payload in layout.of("all_gather")]


@pytest.mark.gt_world("fake", size=4, mesh={"replicate": 2, "shard": 2})
def test_the_layout_tells_what_replicas_reduce(gt_world):
    """D16: behind each reduce-scatter the all-reduce of what it leaves, over other ranks, with the
    same slots.
    """
    path = Path(__file__).parents[2] / "fixtures" / "graphs" / "hsdp" / "both_are_bucketed.fxgraph"
    layout = bucket_layout(run_pass_file(path))
    found = {
        collective: [
            (p.ranks, [(s.parameter, s.offset, s.nbytes) for s in p.slots])
            for p in layout.of(collective)
        ]
        for collective in ("reduce_scatter", "all_reduce")
    }
    packed = [[(f"layers.{layer}.a", 0, 8), (f"layers.{layer}.b", 8, 8)] for layer in (1, 0)]
    alone = [("layers.0.c", 0, 8)]
    assert found["reduce_scatter"] == [((0, 1), slots) for slots in (*packed, alone)]
    assert found["all_reduce"] == [((0, 2), slots) for slots in packed]
