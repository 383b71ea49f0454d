"""A pipeline's stage as one graph, and cut into parts: in this order they give the same bits as the
whole.
"""

import copy

import pytest
import torch
from torch import nn

from fixtures.models import llama3
from fixtures.models.init import init_parameters
from fixtures.models.moe import MoE, MoEConfig
from fixtures.models.stages import DecoderStage
from fixtures.models.tensor_parallel import apply_tensor_parallel
from fixtures.training import PRECISIONS
from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    data_parallel,
    split_stage_graph,
    trace_stage,
)
from pytest_gtrainer.graph.collectives import PlanError, group_of, kind_of, launches
from pytest_gtrainer.graph.nodes import is_random
from pytest_gtrainer.passes.stages import PARTS
from pytest_gtrainer.tracing.model import ModelState, local

aten = torch.ops.aten
WIDTH = 64


def stage_of(mesh, index, precision="fp32", tp=None):
    whole = llama3.Llama3(llama3.FLAVORS["debug"])
    whole.init_weights(seed=0)
    if tp is not None:
        apply_tensor_parallel(whole, tp)
    return data_parallel(DecoderStage(whole, index, 2), mesh, mp_policy=PRECISIONS[precision])


def flat(module, *inputs):
    return [*(local(tensor).detach() for tensor in ModelState.of(module).tensors), *inputs]


def collectives(parts, of=None):
    """The kinds of collectives of each part, in the groups of a mesh."""
    nodes = {
        name: [n for n in part.gm.graph.nodes if launches(n.target)] for name, part in parts.items()
    }
    return {
        name: {kind_of(n) for n in them if of is None or group_of(n) == of}
        for name, them in nodes.items()
    }


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 2})
def test_the_parts_of_a_stage_give_the_bits_of_the_whole(gt_mesh, gt_world):
    """N7: output, gradient of the input, gradients of parameters; microbatches whose sum is not
    reduced once differ.
    """
    module = stage_of(gt_mesh, 1)
    generator = torch.Generator().manual_seed(gt_world.rank)
    given = [torch.randn(2, 16, WIDTH, generator=generator) for _ in range(4)]
    traced = trace_stage(module, (given[0].clone().requires_grad_(),))
    tangents = [torch.randn(2, 16, 256, generator=generator) for _ in range(2)]
    graphs = split_stage_graph(traced.gm)
    names = traced.gm.graph.output_node().meta["gt_outputs"]
    every = []
    for x, tangent in zip(given, tangents, strict=False):
        values = dict(zip(graphs.inputs, flat(module, x, tangent), strict=True))
        graphs.run(values, *PARTS)
        with torch.no_grad():
            whole = traced.gm(*flat(module, x, tangent))
        assert_bitwise_equal(
            {n: values[r] for n, r in zip(names, graphs.results, strict=True)},
            dict(zip(names, whole, strict=True)),
        )
        every.append(values)
    summed = {**every[0], **{name: every[0][name] + every[1][name] for name in graphs.accumulates}}
    graphs.run(summed, "reduce")
    gradients = dict(zip(names[2:], graphs.results[2:], strict=True))
    assert_bitwise_different(
        {fqn: every[0][name] + every[1][name] for fqn, name in gradients.items()},
        {fqn: summed[name] for fqn, name in gradients.items()},
    )


@pytest.mark.gt_world("fake", size=8, mesh={"dp": 4, "tp": 2})
def test_each_part_has_the_collectives_that_belong_there(gt_mesh):
    """Parameters are gathered in the first part, gradients reduced in the last; the model's own
    stand between.
    """
    module = stage_of(gt_mesh["dp"], 1, "bf16_fp32", gt_mesh["tp"])
    parts = split_stage_graph(
        trace_stage(module, (torch.zeros(2, 16, WIDTH, requires_grad=True),)).gm
    ).parts
    data, tensor = (gt_mesh[name].get_group().group_name for name in ("dp", "tp"))
    assert list(collectives(parts, data).values()) == [
        {"all_gather"},
        set(),
        set(),
        set(),
        {"reduce_scatter"},
    ]
    own = collectives(parts, tensor)
    assert own["unshard"] == own["backward_weight"] == own["reduce"] == set()
    assert "all_reduce" in own["forward"] & own["backward_input"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Pair(nn.Module):
    """Two outputs, of which one has no gradient; scale is an input of no gradient, and the skip its
    own tangent.
    """

    def __init__(self):
        super().__init__()
        self.net, self.shift = net(), nn.Parameter(torch.ones(2, 4))

    def forward(self, x, scale):
        return {"y": self.net(x) * scale + self.shift, "count": (x > 0).sum()}


class Counting(nn.Module):
    """Gives what its buffer was before the forward wrote to it."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        before = self.seen.clone()
        self.seen.add_(1)
        return self.net(x), before


class Noisy(nn.Module):
    """Gives what it has drawn first, and draws again."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        first = torch.rand_like(x)
        return self.net(x) + torch.rand_like(x), first


class Shrinking(nn.Module):
    """Halves its bias, and nothing but that, before it is used."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        with torch.no_grad():
            self.net[0].bias.mul_(0.5)
        return self.net(x)


class Filling(nn.Module):
    """Adds its inputs up in memory that reads nothing when it is made."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        total = torch.zeros(2, 4)
        total.add_(x.detach())
        return self.net(x) + total


@pytest.mark.second_tier
def test_a_stage_of_experts_whose_rows_data_counts():
    """N7: sizes that only data decides cross from part to part; what experts have counted is as
    eagerly.
    """
    torch.manual_seed(0)
    module, x = MoE(WIDTH, MoEConfig(n_experts=4, ffn_dim=8)), torch.randn(2, 16, WIDTH)
    init_parameters(module, 0)
    eager, given = copy.deepcopy(module), x.clone().requires_grad_()
    graphs = split_stage_graph(trace_stage(module, (x.clone().requires_grad_(),)).gm)
    values = dict(zip(graphs.inputs, flat(module, x, torch.ones(2, 16, WIDTH)), strict=True))
    graphs.run(values, *PARTS)
    output = eager(given)
    output.backward(torch.ones_like(output))
    expected = [output, given.grad, *(parameter.grad for parameter in eager.parameters())]
    assert_bitwise_equal(
        [values[name] for name in graphs.results], [tensor.detach() for tensor in expected]
    )
    assert_bitwise_equal([module.tokens_per_expert], [eager.tokens_per_expert])
    eager(given)
    assert_bitwise_different([module.tokens_per_expert], [eager.tokens_per_expert])


@pytest.mark.parametrize(
    ("stage", "runs"), [(Shrinking, "aten.mul_.Tensor"), (Filling, "aten.zeros.default")]
)
def test_what_changes_memory_is_of_the_forward_and_runs_for_every_microbatch(stage, runs):
    """Not of what gathers parameters, which runs once a step: a write to one, and memory that is
    written to.
    """
    module, inputs = stage(), torch.randn(2, 2, 4)
    eager = copy.deepcopy(module)
    graphs = split_stage_graph(trace_stage(module, (inputs[0],)).gm)
    parts = [name for name, part in graphs.parts.items() if runs in part.gm.code]
    assert parts == ["forward"], f"{runs} runs in {parts}, and not once for each microbatch"
    values = dict(zip(graphs.inputs, flat(module, inputs[0], torch.zeros(2, 4)), strict=True))
    graphs.run(values, "unshard")
    for microbatch in inputs:
        values[graphs.inputs[-2]] = microbatch
        graphs.run(values, "forward")
        assert torch.equal(values[graphs.results[0]], eager(microbatch)), (
            "another microbatch has changed the memory"
        )


class Drawing(nn.Module):
    """Draws random numbers for its parameter, and for nothing else."""

    def __init__(self, draw):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.draw = draw

    def forward(self, x):
        return x @ self.draw(self.weight)


@pytest.mark.parametrize(
    "draw",
    [
        lambda weight: nn.functional.dropout(weight, 0.5),
        lambda weight: weight + torch.rand_like(weight),
        lambda weight: weight * torch.bernoulli(weight.detach() / 2),
    ],
    ids=["dropout", "noise", "a mask by its numbers"],
)
def test_what_is_drawn_for_a_parameter_is_drawn_for_every_microbatch(draw):
    """It is computed of parameters alone, and yet not once a step as gathers are."""
    graphs = split_stage_graph(trace_stage(Drawing(draw), (torch.randn(2, 4),)).gm)
    found = [
        name for name, part in graphs.parts.items() if any(map(is_random, part.gm.graph.nodes))
    ]
    assert found == ["forward"]


def test_a_stage_computes_what_autograd_does():
    """Also without inputs that require a gradient, and with outputs that have none."""
    module, scale = Pair(), torch.tensor(3.0)
    x, tangent = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    traced = trace_stage(module, (x, scale))
    assert (traced.differentiated, traced.tangents) == ((0,), (0,))
    outputs = module(x, scale)
    outputs["y"].backward(tangent)
    expected = [outputs["y"], outputs["count"], x.grad, *(p.grad for p in module.parameters())]
    assert_bitwise_equal(
        traced.gm(*flat(module, x, scale, tangent)), [value.detach() for value in expected]
    )
    graphs = split_stage_graph(traced.gm)
    assert len(graphs.accumulates) == 5  # that of the shift is the tangent itself
    swapped = trace_stage(Pair(), (scale, x), step=lambda stage, scale, x: stage(x, scale))
    named = swapped.gm.graph.output_node().meta["gt_outputs"]
    assert named[:3] == ("output0", "output1", "gradient_of_input1"), (
        "the gradient of x, the second input"
    )
    first = trace_stage(net(), (x.detach(),))
    assert first.differentiated == ()
    assert not split_stage_graph(first.gm).parts["backward_input"].gives


def test_a_tangent_is_named_after_its_output():
    """The first output takes none."""
    inputs = torch.randn(2, 4), torch.tensor(3.0)
    traced = trace_stage(Pair(), inputs, step=lambda pair, *given: [*pair(*given).values()][::-1])
    given = [node.meta["gt_input"]["fqn"] for node in traced.gm.graph.find_nodes(op="placeholder")]
    assert (traced.tangents, given[-1]) == ((1,), "tangent1")


def test_what_is_gathered_once_is_not_summed_over_microbatches():
    """N8: though the last part reads it, which reads sums of everything else that microbatches
    give.
    """
    gm = trace_stage(net(), (torch.zeros(2, 4, requires_grad=True),)).gm
    of_input = gm.graph.output_node().args[0][1]
    graphs = split_stage_graph(gm, moved={of_input: "reduce"})
    taken, once = set(graphs.parts["reduce"].takes), set(graphs.parts["unshard"].gives)
    assert taken & once
    assert not once & {*graphs.accumulates}, (
        "a parameter would be added to itself, once for each microbatch"
    )
    assert taken - once <= {*graphs.accumulates}


def test_what_is_no_stage_is_refused():
    x = torch.zeros(2, 4, requires_grad=True)
    for inputs, words in {
        (): "has no inputs: give example tensors",
        (3,): "the stage Sequential has no inputs",
    }.items():
        with pytest.raises(ValueError, match=words):
            trace_stage(net(), inputs)
    with pytest.raises(
        TypeError, match=r"give a sequence of the stage's inputs, \(tensor,\) for one"
    ):
        trace_stage(net(), x)
    with pytest.raises(
        TypeError, match="output 1 of the stage is a int: stages hand plain tensors to each other"
    ):
        trace_stage(net(), (x,), step=lambda stage, x: (stage(x), 1))
    with pytest.raises(
        ValueError, match="no output of the stage depends on a parameter or an input that requires"
    ):
        trace_stage(net(), (x,), step=lambda stage, x: stage(x).detach())
    with pytest.raises(
        ValueError, match="neither a parameter nor an input of the stage requires a gradient"
    ):
        trace_stage(net().requires_grad_(False), (x.detach(),))


def test_what_cannot_be_cut_is_refused_by_name():
    """A node before what it reads; a write, or a random number, that would change places."""
    gm = trace_stage(net(), (torch.zeros(2, 4, requires_grad=True),)).gm
    threshold = gm.graph.find_nodes(op="call_function", target=aten.threshold_backward.default)[0]
    words = (
        r"mm_2 of 0 \(backward_input\) needs threshold_backward of 1 \(backward_weight\), "
        r"which runs later"
    )
    with pytest.raises(PlanError, match=words):
        split_stage_graph(gm, moved={threshold: "backward_weight"})
    with pytest.raises(
        ValueError, match="a stage has no part 'dW'; it has unshard, forward, backward_input"
    ):
        split_stage_graph(gm, moved={threshold: "dW"})
    other = trace_stage(net(), (torch.zeros(2, 4, requires_grad=True),)).gm.graph
    for node in (other.output_node().prev, gm.graph.output_node(), next(iter(gm.graph.nodes))):
        with pytest.raises(ValueError, match=f"moved has {node}, which computes nothing in this"):
            split_stage_graph(gm, moved={node: "forward"})
    with pytest.raises(
        ValueError, match="the graph is not of a pipeline's stage: trace it by trace_stage"
    ):
        split_stage_graph(torch.fx.symbolic_trace(net()))
    gm = trace_stage(Counting(), (torch.zeros(2, 4, requires_grad=True),)).gm
    split_stage_graph(gm)
    read = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    with pytest.raises(
        PlanError,
        match=r"clone of .*\(backward_weight\) comes before add_.* \(forward\) in the stage",
    ):
        split_stage_graph(gm, moved=dict.fromkeys([*read, *read[0].users], "backward_weight"))
    gm = trace_stage(Noisy(), (torch.zeros(2, 4, requires_grad=True),)).gm
    split_stage_graph(gm)
    first, *_ = gm.graph.find_nodes(op="call_function", target=aten.rand_like.default)
    with pytest.raises(
        PlanError, match=r"rand_like of .*weight\) comes before rand_like_1 of .*\(forward\)"
    ):
        split_stage_graph(gm, moved=dict.fromkeys([first, *first.users], "backward_weight"))


def test_parts_that_cannot_run_are_refused_with_what_to_run_before():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.ones(2, 4, requires_grad=True)
    graphs = split_stage_graph(trace_stage(model, (x,)).gm)
    values = dict(zip(graphs.inputs, flat(model, x.detach(), torch.ones(2, 4)), strict=True))
    with pytest.raises(ValueError, match="a stage has no part 'nonsense'; it has unshard, forward"):
        graphs.run(values, "unshard", "nonsense")
    with pytest.raises(ValueError, match=r"a stage has no part \['unshard', 'forward'\]; it has"):
        graphs.run(values, ["unshard", "forward"])
    with pytest.raises(ValueError, match=r"the part backward_input takes .*: run forward before"):
        graphs.run(values, "unshard", "backward_input")
    missing = {name: value for name, value in values.items() if name != graphs.inputs[0]}
    with pytest.raises(ValueError, match=r"does not hold: give it, as an input of the whole graph"):
        graphs.run(missing, "unshard", "forward")
    graphs.run(values, *PARTS)
    assert all(name in values for name in graphs.results if name is not None)
