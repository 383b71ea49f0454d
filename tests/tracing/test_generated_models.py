"""Models made of what makes layers differ, or not: none is stamped into another graph than its full trace."""

import functools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import nn
from torch.utils.checkpoint import checkpoint

from fixtures.repeated import WIDTH, Layer, Net, layer_of, scaled
from pytest_gtrainer import trace_step
from pytest_gtrainer.tracing.stamping import driver
from pytest_gtrainer.tracing.stamping.verdict import first_difference


def frozen():
    layer = Layer()
    layer.w.bias.requires_grad_(False)
    return layer


def hooked():
    layer = Layer()
    layer.register_forward_hook(doubled)
    return layer


def doubled(layer, args, output):
    return output * 2


KINDS = {
    "plain": Layer,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "double": lambda: layer_of(scaled, scale=2.0),
    "half": lambda: layer_of(scaled, scale=0.5),
    "dropout": lambda: nn.Sequential(Layer(), nn.Dropout(0.5)),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "frozen": frozen,
    "hooked": hooked,
}
DEEDS = (
    "one more time", "left out", "doubled", "no gradient", "checkpoint", "remembered", "added", "of the number",
)  # fmt: skip
"""What the model's own code does at one layer."""


@dataclass(frozen=True)
class Description:
    """The kinds of the layers, what is done at which of them, which two share a weight, whether the sum is a mean."""

    layers: tuple[str, ...]
    deeds: tuple[tuple[int, str], ...]
    tied: tuple[int, ...]
    divided: bool


@st.composite
def descriptions(draw):
    palette = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
    count = draw(st.integers(5, 12))
    layers = [palette[index % len(palette)] for index in range(count)]
    for place in draw(st.lists(st.integers(0, count - 1), max_size=1)):
        layers[place] = draw(st.sampled_from(sorted(KINDS)))
    deeds = draw(st.lists(st.tuples(st.integers(0, count - 1), st.sampled_from(DEEDS)), max_size=2))
    plain = [index for index, kind in enumerate(layers) if kind == "plain"]
    tied = ()
    if len(plain) > 1 and draw(st.integers(0, 5)) == 5:
        tied = tuple(draw(st.lists(st.sampled_from(plain), min_size=2, max_size=2, unique=True)))
    return Description(tuple(layers), tuple(sorted(deeds)), tied, draw(st.integers(0, 5)) == 5)


def around(deeds, divided, net, x):
    """The forward of the model over its layers, with the deeds at theirs."""
    kept = None
    for index, layer in enumerate(net.layers):
        own = [deed for place, deed in deeds if place == index]
        if "left out" in own:
            continue
        if "no gradient" in own:
            with torch.no_grad():
                x = layer(x)
        else:
            x = checkpoint(layer, x, use_reentrant=False) if "checkpoint" in own else layer(x)
        if "one more time" in own:
            x = layer(x)
        if "doubled" in own:
            x = x * 2
        if "of the number" in own:
            x = x + index
        if "remembered" in own:
            kept = x
        if "added" in own and kept is not None:
            x = x + kept
    return x / len(net.layers) if divided else x


def built(description):
    torch.manual_seed(0)
    layers = [KINDS[kind]() for kind in description.layers]
    if description.tied:
        one, other = description.tied
        layers[one].w.weight = layers[other].w.weight
    return Net(layers, functools.partial(around, description.deeds, description.divided))


def difference(description):
    """The first node in which the stamped graph is not the full one, None if they are equal; and what was stamped."""
    step, inputs = (lambda model, x: model(x).sum()), (torch.ones(4, WIDTH),)
    stamped = trace_step(built(description), step, inputs, repeat_layers="auto")
    full = trace_step(built(description), step, inputs)
    return first_difference(full.gm.graph, stamped.gm.graph), stamped.repeated.stamped


def settled(examples):
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("examples", [25, pytest.param(300, marks=pytest.mark.long)])
def test_no_model_differs_in_silence(examples):
    stamped = []

    @settled(examples)
    @given(descriptions())
    def check(description):
        found, runs = difference(description)
        assert found is None, f"{description}: {found}"
        stamped.append(bool(runs))

    check()
    assert any(stamped), "nothing was stamped, so nothing was shown"
    assert not all(stamped), "nothing was refused, so the models were all alike"


def test_without_a_part_of_the_proof_a_model_differs(monkeypatch):
    """The models above can tell."""
    monkeypatch.setattr(driver, "check_outline", lambda *given: None)
    quickly = settings(settled(200), phases=[Phase.generate])
    try:
        find(descriptions(), lambda description: difference(description)[0] is not None, settings=quickly)
    except NoSuchExample:
        pytest.fail("without the outline no generated model comes out wrong")
