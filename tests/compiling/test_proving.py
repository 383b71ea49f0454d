"""Stages of a compilation are proven, each against the one before, and the pass is named."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fixtures.ten_models import MODELS, step, ten_models
from pytest_gtrainer import AnotherFunction, NotRecorded, facts, gt_compile, prove
from pytest_gtrainer.proofs.programs import NamedProgram
from pytest_gtrainer.proofs.prove import prove_programs

aten = torch.ops.aten
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Replace:
    """A pass that calls another operator in the place of one."""

    def __init__(self, old, new, *more):
        self.old, self.new, self.more = old, new, more

    def __call__(self, graph):
        for node in graph.find_nodes(op="call_function", target=self.old):
            node.target = self.new
            node.args = (*node.args, *self.more)


def recorded(*, lower=False, model=None, backward=True, dynamic=False, **options):
    torch.manual_seed(0)
    with gt_compile(lower=lower) as record:
        compiled = torch.compile(model or Small(), options=options, dynamic=dynamic)
        result = compiled(torch.randn(2, 4)).sum()
        if backward:
            result.backward()
    return record


def test_every_stage_is_proven():
    proof = recorded().prove()
    assert proof.kind == "other kernels"  # AOTAutograd takes the backward of relu apart
    stages = [each.stage for each in proof.stages]
    assert stages[0] == "joint"
    assert "forward and backward" in stages
    assert str(proof).startswith("other kernels: ")


@pytest.mark.second_tier
@pytest.mark.parametrize("slot", ["joint_custom_post_pass", "post_grad_custom_post_pass"])
def test_a_pass_that_breaks_the_forward_is_named(slot):
    record = recorded(**{slot: Replace(aten.relu.default, aten.abs.default)})
    proof = record.prove()
    assert (proof.kind, proof.weakest.by) == ("another function", "Replace")
    assert proof.weakest.stage == ("joint" if "joint" in slot else "forward") + "_after_passes"
    for at_least in ("rounds elsewhere", "reordered", "identical"):
        with (
            facts.collecting() as seen,
            pytest.raises(AnotherFunction, match="by Replace: another"),
        ):
            record.assert_same_function(at_least)
        assert facts.of_kind(seen, "verdict")[0]["outcome"] == "another function"


def swap_choices(graph):
    for node in graph.find_nodes(op="call_function", target=aten.where.self):
        node.args = (node.args[0], node.args[2], node.args[1])


def test_a_pass_that_breaks_the_backward_is_named():
    proof = recorded(post_grad_custom_post_pass=swap_choices).prove()
    assert (proof.kind, proof.weakest.by) == ("another function", "swap_choices")
    assert proof.weakest.stage == "backward_after_passes"
    assert proof.weakest.proof.first.result.startswith("gradient of linear.")


def test_a_pass_before_the_joint_graph_is_named():
    record = recorded(pre_grad_custom_pass=Replace(torch.relu, torch.abs))
    assert [run.name for run in record.passes("Replace", changed=True)] == ["Replace"]
    proof = record.prove()
    assert (proof.kind, proof.weakest.by) == ("another function", "Replace")
    assert (proof.weakest.stage, proof.weakest.before) == ("joint", "dynamo")


def test_inference_and_a_backward_that_nobody_called():
    with torch.no_grad():
        assert recorded(backward=False).prove().kind == "identical"
    assert recorded(backward=False).prove().kind == "identical"


@pytest.mark.second_tier
def test_dynamic_sizes_are_those_of_the_first_call():
    assert recorded(dynamic=True).prove().kind == "other kernels"


def test_random_numbers_that_are_drawn_otherwise_are_unknown():
    proof = recorded(model=nn.Sequential(nn.Linear(4, 3), nn.Dropout())).prove()
    assert proof.kind == "unknown"
    assert "random numbers are drawn by functions of torch and aten." in str(proof.weakest)


def average_instead(graph):
    for node in graph.find_nodes(op="call_function", target=ALL_REDUCE):
        node.args = (node.args[0], "avg", node.args[2])


def recorded_in_parallel(mesh, **options):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    return recorded(model=parallelize_module(model, mesh, plan), **options)


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
def test_stages_that_communicate_are_proven_on_all_ranks(gt_mesh):
    """All but the first were unknown, each "by" a pass that had nothing to do with it."""
    first, *others = recorded_in_parallel(gt_mesh).prove().stages
    assert (first.stage, first.kind, first.by) == ("joint", "unknown", "")
    assert "all_reduce communicates, and Dynamo's graph" in first.proof.reason
    assert [each.kind for each in others] == ["identical"] * len(others)
    assert "forward and backward" in [each.stage for each in others]


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=4, mesh={"dp": 2, "tp": 2})
def test_groups_of_a_mesh_need_its_world(gt_world, gt_mesh):
    record = recorded_in_parallel(gt_mesh["tp"])
    _, *others = record.prove(world=gt_world).stages
    assert [each.kind for each in others] == ["identical"] * len(others)
    _, *others = record.prove().stages
    assert {(each.kind, each.by) for each in others} == {("unknown", "")}
    assert "a simulated world has meshes: world=gt_world" in str(others[0])


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
def test_a_pass_that_breaks_a_collective_is_named(gt_mesh):
    proof = recorded_in_parallel(gt_mesh, post_grad_custom_post_pass=average_instead).prove()
    broken = [each for each in proof.stages if each.kind == "another function"]
    assert [(each.stage, each.by) for each in broken] == [
        ("forward_after_passes", "average_instead")
    ]
    assert "1/2 times what is expected" in str(broken[0])


def test_no_joint_graph():
    with gt_compile() as record:
        torch.compile(torch.relu, backend="aot_eager")(torch.ones(2))
    with pytest.raises(NotRecorded, match="its backend is not Inductor"):
        record.prove()


def test_operators_of_inductor_have_the_meaning_of_their_kernel():
    """``prims.fma`` was a function of which nothing is known, and so "another function"."""
    fma = torch.ops.prims.fma
    inputs = torch.randn(3, 4), torch.randn(3, 1), torch.randn(3, 4)
    proof = prove(lambda a, b, c: fma(-a, b, c), lambda a, b, c: c - a * b, inputs=inputs)
    assert proof.kind == "reordered"


@pytest.mark.second_tier
@pytest.mark.parametrize("name", MODELS)
def test_ten_models(name):
    model, inputs = ten_models()[name]
    with gt_compile() as record:
        step(torch.compile(model), inputs)
    proof = record.assert_same_function("reordered")
    assert len(proof.stages) >= 4


@pytest.mark.parametrize(
    ("limit", "kind"), [(0.5, "identical"), (0.51, "unknown"), (-0.5, "another function")]
)
def test_a_stage_runs_again_for_each_order(limit, kind):
    """Its runs are remembered, each for its own order, and for the limits that it lies between."""

    def chosen(limit):
        def call(given):
            return {"y": torch.where(given["x"] > limit, given["x"], given["x"] * 3)}

        return NamedProgram(call, {"x": torch.tensor([-1.0, 0.2, 0.7])})

    assert prove_programs((chosen(limit), chosen(0.5))).kind == kind


def test_a_softmax_that_a_compiler_takes_apart_routes_alike():
    """Neither has the order of its operand then; a mistake in the places is told."""
    rows = torch.randn(4, 8)

    def routed(softmax, turn=0):
        def call(given):
            weights, places = softmax(given["x"]).topk(2)
            return {"y": weights * given["x"].gather(-1, places.roll(turn, -1))}

        return NamedProgram(call, {"x": rows})

    def by_hand(x):
        powers = (x - x.amax(-1, keepdim=True)).exp()
        return powers / powers.sum(-1, keepdim=True)

    def whole(x):
        return x.softmax(-1)

    found = [
        prove_programs((routed(by_hand, turn), routed(whole)), at_least="reordered", at_once=True)
        for turn in (0, 1)
    ]
    assert [proof.kind for proof in found] == ["reordered", "unknown"]
