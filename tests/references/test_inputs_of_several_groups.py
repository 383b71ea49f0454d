"""An activation that several groups read: its gradients are added group by group, as eager FSDP2
adds them.
"""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_gtrainer import TrainConfig, assert_parity, trace_step
from pytest_gtrainer.graph.nodes import HANDED_ON, node_fqn
from pytest_gtrainer.tracing.groups import hand_on_inputs

THREE = pytest.mark.gt_world("ranks", size=3)
WIDTH = 7


@dataclasses.dataclass
class Memory:
    """A container by which some models hand on their encoder's output."""

    states: torch.Tensor


class Attend(nn.Module):
    """Cross-attention reads ``memory`` twice.

    With ``scale`` a rank has 73 elements of this bucket.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, memory):
        states = memory.states if isinstance(memory, Memory) else memory
        query, key, value = self.query(x), self.key(states), self.value(states)
        return x + (query @ key.transpose(-1, -2)).softmax(-1) @ value * self.scale


class Translator(nn.Module):
    """An encoder, and five layers that attend to its output.

    Each layer is called by a function of ``calls``, as ``call(layer, x, memory)``.
    """

    def __init__(self, calls):
        super().__init__()
        torch.manual_seed(0)
        self.calls, self.encoder = calls, nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Attend() for _ in range(3))
        self.first, self.second = Attend(), Attend()

    def forward(self, x, y):
        memory = self.encoder(x).sin()
        layers = (self.first, self.second, *self.layers)
        for call, layer in zip(self.calls, layers, strict=True):
            y = call(layer, y, memory)
        return y.square().mean()


CALLS = {
    "positional": lambda layer, x, memory: layer(x, memory),
    "keyword": lambda layer, x, memory: layer(x, memory=memory),
    "dataclass": lambda layer, x, memory: layer(x, memory=Memory(memory)),
    "checkpoint": lambda layer, x, memory: checkpoint(layer, x, memory, use_reentrant=False),
    "twice": lambda layer, x, memory: layer(layer(x, memory), memory),
}


@pytest.fixture
def training(gt_mesh):
    """``training(calls, **changes)``"""

    def batch(step, rank):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return tuple(torch.randn(4, 5, WIDTH, generator=generator) for _ in range(2))

    def make(calls, **changes):
        plan = ["encoder", "first", "second", "layers.0", "layers.1", "layers.2"]
        fields = {
            "model": lambda: Translator(calls),
            "step": lambda model, *inputs: model(*inputs),
            "batch": batch,
        }
        return TrainConfig(
            **{**fields, "bucket_plan": plan, "mesh": gt_mesh, "steps": 1, **changes}
        )

    return make


@THREE
def test_cross_attention_equals_fully_shard(training, gt_world):
    """A13: FSDP2's order of additions to the gradient of the encoder's output.

    Each of the five layers gets the output in another way. The parity check names the gradient
    that differs, and the encoder's is a sum over all layers.
    """
    assert_parity(training(CALLS.values()), gt_world)


LAYERS = ["layers.0", "layers.1", "layers.2"]
PARTS = [f"layers.0.{part}" for part in ("query", "key", "value")]


@pytest.mark.second_tier
@THREE
@pytest.mark.parametrize(
    "plan",
    [
        ["encoder", *PARTS, *LAYERS, ""],
        ["encoder", *LAYERS, ["first", "second"]],
        ["encoder", *LAYERS, ""],
    ],
    ids=["groups in a group", "two modules in one", "the root"],
)
def test_other_groups_add_otherwise_and_equal_fully_shard(training, gt_world, plan):
    """A13: of a group of two modules only the one that runs first hands its inputs on."""
    assert_parity(training([CALLS["keyword"]] * 5, bucket_plan=plan), gt_world, invisible="report")


class Scaled(nn.Module):
    """Its input has two gradients, each the weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, x, unused=None):
        return (x * self.weight).sum() + (x * self.weight).sum()


class Readers(nn.Module):
    """Three modules read what ``source`` gives; half an ULP of 1 is lost if it is added to 1 by
    itself.

    Gradients arrive from the last reader on: twice 0.5, then twice the half ULP, then zeros.
    """

    def __init__(self):
        super().__init__()
        self.source = nn.Parameter(torch.ones(1))
        self.first, self.second, self.third = Scaled(0.0), Scaled(2.0**-24), Scaled(0.5)

    def forward(self):
        x = self.source * 1
        return self.first(x) + self.second(x) + self.third(x)


def gradient_of_source(modules, run=lambda model: model()):
    model = Readers()
    hand_on_inputs(model, modules(model))
    traced = trace_step(model, lambda model, unused: run(model), (0,))
    assert not [node for node in traced.gm.graph.nodes if HANDED_ON in node.meta.get("custom", {})]
    result = traced.results(model, 0)["gradient of source"].item()
    run(model).backward()
    assert model.source.grad.item() == result
    return result


def under_no_grad(model):
    with torch.no_grad():
        model()
    return model()


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (lambda model: [], 1.0),
        (lambda model: [[model.second]], 1.0 + 2.0**-23),
        (lambda model: [[model.first], [model.second], [model.third]], 1.0 + 2.0**-23),
        (lambda model: [[model.first], [model.third]], 1.0),
        (lambda model: [[model.second, model.third]], 1.0 + 2.0**-23),
        (lambda model: [[model.third, model.second]], 1.0 + 2.0**-23),
        (lambda model: [[model.first, model.second]], 1.0),
        (lambda model: [[model]], 1.0),
    ],
    ids=[
        "no group",
        "the second",
        "each",
        "the others",
        "it runs first",
        "in any order",
        "it runs second",
        "the root",
    ],
)
@pytest.mark.parametrize(
    "run", [lambda model: model(), under_no_grad], ids=["once", "after a run under no_grad"]
)
def test_gradients_meet_where_a_group_begins(modules, expected, run):
    """A13: without groups ``((0.5 + 0.5) + tiny) + tiny`` is 1.

    In the graph, and by autograd, which has the views.
    """
    assert gradient_of_source(modules, run) == expected


def test_a_module_of_a_group_that_did_not_run_is_forgotten():
    """A13: the next forward of the root begins anew, as FSDP2 ends incomplete groups there."""

    def run(model):
        model.second(torch.ones(1))  # of a group of two, whose other module does not run
        return model()

    assert gradient_of_source(lambda model: [[model.second, model.third]], run) == 1.0 + 2.0**-23


def test_a_trace_of_groups_has_the_nodes_of_one_without():
    """A13: the views of the hooks are gone, so goldens stay; only the order of sums is another."""
    texts = []
    for grouped in (False, True):
        model = Readers()
        if grouped:
            hand_on_inputs(model, [[model.second]])
        gm = trace_step(model, lambda model, unused: model(), (0,)).gm
        texts.append([(node.op, node.target, node_fqn(node)) for node in gm.graph.nodes])
    assert sorted(map(str, texts[0])) == sorted(map(str, texts[1]))
    assert texts[0] != texts[1]
