"""``parse(render(gm))`` is ``gm``, whatever the graph."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from pytest_gtrainer.graphtext import constants, lines_of, parse, render, unfold
from tests.graphtext.generated import graphs
from tests.graphtext.same import assert_same_graph

pytestmark = pytest.mark.second_tier


def assert_comes_back(gm, inputs):
    text = render(gm)
    again = parse(text, constants=constants(gm))
    again.graph.lint()
    assert_same_graph(again, gm)
    assert render(again) == text
    assert unfold(text) == lines_of(gm)
    expected, got = (module(*copy.deepcopy(inputs)) for module in (gm, again))
    for one, other in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
        assert bits(one) == bits(other)


def bits(value):
    return value if value is None else (value.dtype, value.contiguous().view(torch.uint8).tolist())


@settings(max_examples=80)
@given(graphs())
def test_a_generated_graph_comes_back(drawn):
    assert_comes_back(*drawn)


@pytest.mark.long
@pytest.mark.parametrize("steps", [15, 20, 25, 30, 35, 40])
@settings(max_examples=100)
@given(data=st.data())
def test_many_generated_graphs_come_back(data, steps):
    """A hundred of each length: half of the time goes into tracing what was drawn with fake
    values.
    """
    assert_comes_back(*data.draw(graphs(steps=steps)))


@settings(max_examples=60)
@given(graphs(), st.randoms(use_true_random=False))
def test_names_of_nodes_and_places_of_constants_do_not_show(drawn, random):
    """Renaming every node, with gaps, and moving constants and bodies to the front gives the same
    text.
    """
    gm, _ = drawn
    text = render(gm)
    for node in list(gm.graph.nodes):
        node.name = f"n{random.randrange(10**9)}_{node.name}"
        if node.op == "get_attr" and random.random() < 0.5:
            next(iter(gm.graph.nodes)).prepend(node)
    gm.graph.lint()
    assert render(gm) == text


@settings(max_examples=60)
@given(graphs())
def test_one_changed_operator_shows(drawn):
    """The twin: the comparison above can fail."""
    gm, _ = drawn
    text = render(gm)
    node = next(node for node in reversed(gm.graph.nodes) if node.op == "call_function")
    node.target = torch.ops.aten.cos.default
    assert render(gm) != text
    with pytest.raises(AssertionError):
        assert_same_graph(parse(text, constants=constants(gm)), gm)
