"""A graph draws random numbers where its nodes stand: what sets a random state is refused."""

import copy
import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, trace_stage, trace_step

STATE = torch.get_rng_state()


def trace_as_stage(model, step, inputs):
    return trace_stage(model, inputs, step=step)


class Recomputed(nn.Module):
    """A linear layer and dropout inside a checkpoint."""

    def __init__(self, dropout=0.5, **options):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropout, self.options = dropout, {"use_reentrant": False} | options

    def region(self, x):
        return nn.functional.dropout(self.inside(x), self.dropout).tanh()

    def forward(self, x):
        return self.outside(checkpointing.checkpoint(self.region, x, **self.options))


class Attending(Recomputed):
    """Attention drops out inside of one operator."""

    def region(self, x):
        q = self.inside(x)[None]
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout)[0]


def keeping(operator):
    """Selective checkpointing that keeps what ``operator`` gives."""
    policy = checkpointing.CheckpointPolicy

    def choose(context, func, *args, **kwargs):
        return policy.MUST_SAVE if func is operator else policy.PREFER_RECOMPUTE

    return lambda: checkpointing.create_selective_checkpoint_contexts(choose)


class Plain(nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(4, 4)


def loss_of(model, x):
    return model(x).square().mean()


def seeded(model, x):
    torch.manual_seed(1)
    return loss_of(model, nn.functional.dropout(x))


def seeded_behind_all_draws(model, x):
    loss = loss_of(model, nn.functional.dropout(x))
    torch.manual_seed(1)
    return loss


def forked(model, x):
    with torch.random.fork_rng():
        x = nn.functional.dropout(x)
    return loss_of(model, nn.functional.dropout(x))


def forked_last(model, x):
    with torch.random.fork_rng():
        return loss_of(model, nn.functional.dropout(x))


def set_back(model, x):
    state = torch.get_rng_state()
    x = nn.functional.dropout(x)
    torch.set_rng_state(state)
    return loss_of(model, nn.functional.dropout(x))


def set_to_a_state(model, x):
    torch.set_rng_state(STATE)
    return loss_of(model, torch.rand_like(x) + x)


def of_a_generator(model, x):
    generator = torch.Generator().manual_seed(1)
    return loss_of(model, x + torch.rand(3, 4, generator=generator))


def of_a_generator_in_place(model, x):
    return loss_of(model, x + torch.empty(3, 4).normal_(generator=torch.Generator()))


def of_python(model, x):
    return loss_of(model, x) * random.random()


def of_numpy(model, x):
    return loss_of(model, x) * float(numpy.random.rand())


SETS, OWN = "after code of the step that sets the random state", "draws from a torch.Generator"
BESIDE = "the step draws from, or sets, the random numbers of "
REFUSED = {
    "checkpoint": (Recomputed, loss_of, SETS),
    "checkpoint of attention": (Attending, loss_of, SETS),
    "checkpoint that keeps others": (
        lambda: Recomputed(context_fn=keeping(torch.ops.aten.addmm.default)), loss_of, SETS,
    ),
    **{
        step.__name__: (Plain, step, words)
        for words, steps in {
            SETS: [seeded, seeded_behind_all_draws, forked, forked_last, set_back, set_to_a_state],
            OWN: [of_a_generator, of_a_generator_in_place],
            BESIDE + "python": [of_python],
            BESIDE + "numpy": [of_numpy],
        }.items()
        for step in steps
    },
}  # fmt: skip


@pytest.mark.parametrize("trace", [trace_step, trace_as_stage], ids=["step", "stage"])
@pytest.mark.parametrize(("make", "step", "words"), REFUSED.values(), ids=list(REFUSED))
def test_what_sets_a_random_state_is_refused(make, step, words, trace):
    """V5: the graph drew twice where eager code restores the state, and no error said so."""
    model, x = make(), torch.ones(3, 4)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[2]
    with pytest.raises(ValueError, match=words):
        trace(model, step, (x,))
    assert torch.equal(torch.get_rng_state(), before[0]), "the trace leaves the random state alone"
    assert (random.getstate(), numpy.random.get_state()[2]) == before[1:]


def drawing(model, x):
    x = nn.functional.dropout(x) + torch.rand_like(x) + torch.empty_like(x).uniform_()
    return loss_of(model, nn.functional.dropout(x, 0.2))


def forked_without_draws(model, x):
    with torch.random.fork_rng():
        x = x.sin()
    return loss_of(model, nn.functional.dropout(x))


def on_another_default_device(model, x):
    with torch.device("meta"):
        return loss_of(model, nn.functional.dropout(x))


TRACED = {
    "another default device": (Plain, on_another_default_device),
    "draws": (Plain, drawing),
    "a fork that draws nothing": (Plain, forked_without_draws),
    "a checkpoint that restores nothing": (lambda: Recomputed(preserve_rng_state=False), loss_of),
    "a checkpoint that draws nothing": (lambda: Recomputed(dropout=0.0), loss_of),
    "attention that draws nothing": (lambda: Attending(dropout=0.0), loss_of),
    "draws around a checkpoint": (lambda: Recomputed(dropout=0.0), drawing),
}


@pytest.mark.parametrize(("make", "step"), TRACED.values(), ids=list(TRACED))
def test_what_draws_without_setting_a_state_is_traced(make, step):
    """V5: two steps equal eager's in loss, gradients, and the random state that they leave."""
    graph, x = make(), torch.ones(3, 4)
    eager = copy.deepcopy(graph)
    traced = trace_step(graph, step, (x,))
    torch.manual_seed(3)
    losses = [traced.replay(graph, x) for _ in range(2)]
    left = torch.get_rng_state()
    torch.manual_seed(3)
    for loss in losses:
        expected = step(eager, x)
        expected.backward()
        assert_bitwise_equal(loss, expected.detach())
    assert torch.equal(torch.get_rng_state(), left)
    assert_bitwise_equal(
        {name: parameter.grad for name, parameter in graph.named_parameters()},
        {name: parameter.grad for name, parameter in eager.named_parameters()},
    )


def test_a_checkpoint_that_restores_the_state_has_other_gradients():
    """V5: the control: why such a trace is refused."""
    x, eager, graph = torch.ones(3, 4), Recomputed(), Recomputed(preserve_rng_state=False)
    traced = trace_step(graph, loss_of, (x,))
    torch.manual_seed(3)
    results = traced.results(graph, x)
    torch.manual_seed(3)
    loss = loss_of(eager, x)
    loss.backward()
    assert_bitwise_equal(results["loss"], loss.detach())
    assert_bitwise_different(results["gradient of inside.weight"], eager.inside.weight.grad)
