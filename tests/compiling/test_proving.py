"""Stages of a compilation are proven, each against the one before, and the pass is named."""

import operator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fixtures.ten_models import MODELS, step, ten_models
from pytest_gtrainer import AnotherFunction, NotRecorded, facts, graphtext, gt_compile, prove
from pytest_gtrainer.compiling.proving import _Layout
from pytest_gtrainer.graph.nodes import short_name
from pytest_gtrainer.proofs.programs import NamedProgram
from pytest_gtrainer.proofs.prove import prove_programs
from pytest_gtrainer.tracing.model import local
from pytest_gtrainer.tracing.sharding import data_parallel

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


def chain(*more):
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), *more, nn.Tanh(), nn.Linear(8, 4))


PLAN = {"1": ColwiseParallel(), "3": RowwiseParallel()}


def recorded_in_parallel(mesh, model=None, plan=PLAN, x=None, backward=True, **options):
    torch.manual_seed(0)
    model = model or chain()
    model = parallelize_module(model, mesh, plan)
    with gt_compile() as record:
        outputs = torch.compile(model, options=options)(torch.randn(2, 4) if x is None else x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if backward:
            sum(local(each).sum() for each in outputs).backward()
    return record


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
def test_stages_that_communicate_are_proven_on_all_ranks(gt_mesh):
    """All but the first were unknown, each "by" a pass that had nothing to do with it."""
    first, *others = recorded_in_parallel(gt_mesh).prove().stages
    assert (first.stage, first.kind, first.by) == ("joint", "other kernels", "")
    assert [each.kind for each in others] == ["identical"] * len(others)
    assert "forward and backward" in [each.stage for each in others]


COMMUNICATES = """
# gtrainer graph v2
world = group(range(0, 2))
if I:
  I.x: f32[4]
if fwd:
  with _:
    all_reduce: f32[4] = _c10d_functional.all_reduce(I.x, 'sum', world)
    wait: f32[4] = _c10d_functional.wait_tensor(all_reduce)
if out:
  yield fwd._.wait
"""
ALONE = """
# gtrainer graph v2
if I:
  I.x: f32[4]
if fwd:
  with _:
    sin: f32[4] = aten.sin(I.x)
if out:
  yield fwd._.sin
"""


@pytest.mark.parametrize("texts", [(COMMUNICATES, ALONE), (ALONE, COMMUNICATES)])
def test_a_collective_on_either_side_needs_the_ranks(texts):
    """A pass may add the only one, or drop it."""
    layout = object.__new__(_Layout)  # of a compilation whose world is gone
    layout._world, layout._are_recorded = None, False
    sides = [{"forward": graphtext.parse(text.lstrip())} for text in texts]
    proof = layout._prove(*sides, "identical")
    assert proof.kind == "unknown"
    assert proof.reason.startswith("all_reduce")
    assert proof.reason.endswith("the world of its ranks is gone: give world=")


class TwoOutputs(nn.Module):
    """The second is a DTensor, and a buffer is written to."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.add_(x.mean(0))
        hidden = self.up(x + self.seen)
        return self.down(hidden.tanh()), hidden


class Tied(nn.Module):
    """A vocabulary in parts, whose graph holds tensors of its own; one parameter, twice."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class Frozen(nn.Sequential):
    """A DTensor without a gradient is one result of AOTAutograd, and others are two."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self[0].requires_grad_(False)


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


UP = ColwiseParallel(use_local_output=False)  # 7 columns on 2 ranks
SEQUENCE = {
    "0": SequenceParallel(sequence_dim=0),
    "1": ColwiseParallel(input_layouts=Shard(0)),
    "3": RowwiseParallel(output_layouts=Shard(0)),
}
RIGHT = {
    "two outputs": (TwoOutputs, {"up": UP, "down": RowwiseParallel()}),
    "a sum that is pending": (
        chain,
        {"1": UP, "3": RowwiseParallel(output_layouts=Partial(), use_local_output=False)},
    ),
    "tied": (
        Tied,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    ),
    "frozen": (Frozen, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
    "recomputed": (lambda: Recomputed(*chain()), PLAN),
    "sequence": (lambda: nn.Sequential(nn.LayerNorm(4), *chain()[1:]), SEQUENCE),
    "nobody calls backward": (chain, PLAN),
    "nothing is sent": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh()), {"0": UP}),
}


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
@pytest.mark.parametrize("name", RIGHT)
def test_parallel_models_are_the_same_before_aotautograd(name, gt_mesh):
    build, plan = RIGHT[name]
    x = torch.randint(16, (2, 4)) if name == "tied" else None
    proof = recorded_in_parallel(gt_mesh, build(), plan, x, name != "nobody calls backward").prove()
    assert {each.kind for each in proof.stages} <= {"identical", "other kernels"}, str(proof)


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"dp": 2})
def test_data_parallelism_is_the_same_before_aotautograd(gt_mesh):
    model = data_parallel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)), gt_mesh)
    proof = recorded(model=model).prove()
    assert {each.kind for each in proof.stages} <= {"identical", "other kernels"}, str(proof)


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
def test_inference_in_parallel_and_dynamic_sizes(gt_mesh):
    with torch.no_grad():
        assert recorded_in_parallel(gt_mesh, backward=False).prove().kind == "identical"
    x = torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    assert recorded_in_parallel(gt_mesh, x=x).prove().kind == "other kernels"


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"tp": 2})
def test_each_real_rank_proves_its_own_graphs(gt_mesh):
    """Nothing is sent: here one rank alone proves."""
    record = recorded_in_parallel(gt_mesh)
    if gt_mesh.get_local_rank() == 1:
        assert record.prove().kind == "other kernels"


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=1, mesh={"tp": 1})
def test_dtensors_of_one_rank(gt_mesh):
    assert recorded_in_parallel(gt_mesh).prove().kind == "other kernels"


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
def test_numbers_that_ranks_draw_otherwise_are_unknown(gt_mesh):
    """They were another function, as on one rank they are not."""
    plan = {"1": ColwiseParallel(), "4": RowwiseParallel()}
    proof = recorded_in_parallel(gt_mesh, chain(nn.Dropout()), plan).prove()
    assert proof.kind == "unknown"
    assert "random numbers are drawn by functions of torch and aten." in str(proof.weakest)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=4, mesh={"dp": 2, "tp": 2})
def test_groups_of_a_mesh_need_its_world(gt_world, gt_mesh):
    record = recorded_in_parallel(gt_mesh["tp"])
    first, *others = record.prove(world=gt_world).stages
    assert first.kind == "other kernels"
    assert [each.kind for each in others] == ["identical"] * len(others)
    stages = record.prove().stages
    assert {(each.kind, each.by) for each in stages} == {("unknown", "")}
    assert "a simulated world has meshes: world=gt_world" in str(stages[0])


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
def test_a_pass_that_breaks_a_collective_is_named(gt_mesh):
    proof = recorded_in_parallel(gt_mesh, post_grad_custom_post_pass=average_instead).prove()
    broken = [each for each in proof.stages if each.kind != "identical"][1:]
    assert [(each.stage, each.by) for each in broken] == [
        ("forward_after_passes", "average_instead"),
        ("backward_after_passes", "average_instead"),
    ]
    assert {each.kind for each in broken} == {"another function"}
    assert "1/2 times what is expected" in str(broken[0])


def leave_out_the_sum(graph):
    node = graph.find_nodes(op="call_method", target="redistribute")[-1]
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def sum_twice(graph):
    node = graph.find_nodes(op="call_method", target="redistribute")[-1]
    insert_behind(graph, node, torch.mul, 2)


def leave_gradients_pending(graph):
    (first, *_) = [node for node in graph.nodes if short_name(node) == "from_local"]
    first.kwargs = {**first.kwargs, "grad_placements": (Partial(),)}


def cut_off(graph):
    (node,) = graph.find_nodes(op="call_function", target=torch.tanh)
    insert_behind(graph, node, torch.detach)


def insert_behind(graph, node, function, *more):
    with graph.inserting_after(node):
        new = graph.call_function(function, (node, *more))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


MISTAKES = {
    leave_out_the_sum: "output 0",
    sum_twice: "output 0",
    leave_gradients_pending: "gradient of 0.weight",
    cut_off: "gradient of 0.weight",
}


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_before_aotautograd_is_named(mistake, gt_mesh):
    proof = recorded_in_parallel(gt_mesh, pre_grad_custom_pass=mistake).prove()
    broken = [each for each in proof.stages if each.kind not in ("identical", "other kernels")]
    assert [(each.stage, each.by) for each in broken] == [("joint", mistake.__name__)]
    assert broken[0].kind == "another function"
    assert broken[0].proof.first.result == MISTAKES[mistake]


def test_a_gradient_that_a_pass_cuts_off_is_told():
    """Only gradients that AOTAutograd has were compared."""
    proof = recorded(model=chain(), pre_grad_custom_pass=cut_off).prove()
    assert (proof.kind, proof.weakest.by) == ("another function", "cut_off")
    assert proof.weakest.proof.first.result == "gradient of 0.weight"


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


def add_one_more(graph):
    for node in graph.nodes:
        if node.op == "call_function" and node.target is operator.add:
            node.args = (node.args[0], node.args[1] + 1)


def test_a_number_that_a_graph_returns_is_compared():
    with gt_compile() as record:
        torch.compile(
            lambda x: (x * 2, x.shape[0] + 1),
            dynamic=True,
            options={"post_grad_custom_post_pass": add_one_more},
        )(torch.ones(5, 3))
    proof = record.prove()
    assert (proof.kind, proof.weakest.by) == ("another function", "add_one_more")
    assert proof.weakest.proof.first.result == "output 1"


@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
@pytest.mark.parametrize("mistake", [None, add_one_more], ids=["right", "one more"])
def test_a_number_that_a_graph_with_a_collective_returns_is_compared(mistake, gt_mesh, gt_world):
    def reduce(x):
        total = torch.distributed._functional_collectives.all_reduce(x * 2, "sum", gt_mesh)
        return total, x.shape[0] + 1

    with gt_compile() as record:
        options = {"post_grad_custom_post_pass": mistake} if mistake else {}
        torch.compile(reduce, dynamic=True, options=options)(torch.ones(5, 3))
    if mistake is None:
        # By two numbers, and in the world of the test, it is the same.
        assert record.assert_same_function(world=2).kind != "another function"
        return
    proof = record.prove()
    assert (proof.kind, proof.weakest.by) == ("another function", "add_one_more"), str(proof)
    assert proof.weakest.proof.first.result == "output 1"
    with pytest.raises(AnotherFunction):
        record.assert_same_function(world=2)
