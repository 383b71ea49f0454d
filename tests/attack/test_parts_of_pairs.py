"""When nodes of two versions are one value, a pair, or neither."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx

from pytest_gtrainer import graphtext
from pytest_gtrainer.attack.pairs import (
    CannotCut,
    _may_be_pair,
    _Version,
    _with_own_elements,
    cut_to_pairs,
)


def graph(*lines):
    head = ["# gtrainer graph v2", "if I:", "  I[0]: f32[2]", "if fwd:", "  with _:"]
    text = [*head, *(f"    {line}" for line in lines), "if out:", "  out[0] = a", ""]
    return graphtext.parse("\n".join(text))


NEG = "a: f32[2] = aten.neg(I[0])"


def test_arguments_of_another_type_are_another_value():
    gm = graph(NEG)
    version, node = _Version(gm, gm), gm.graph.output_node()
    values = [1, 1.0, True, "1", None, [1], [1, 1], {"a": 1}, {"a": True}, {"b": 1}]
    spelled = [version._spelled(value, node) for value in values]
    assert len(set(spelled)) == len(values)
    orders = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert len({version._spelled(order, node) for order in orders}) == 1


@pytest.mark.parametrize("sides", [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_a_draw_that_came_or_went_is_no_pair(sides):
    draws = [f"r{number}: f32[2] = aten.rand_like(I[0])" for number in range(2)]
    after, before = (graph(*draws[:count], NEG) for count in sides)
    with pytest.raises(CannotCut):
        cut_to_pairs(after, before)
    assert cut_to_pairs(after, after) is None


@pytest.mark.parametrize(
    ("value", "other", "is_pair"),
    [
        (torch.empty(2), torch.empty(2), True),
        (torch.empty(2), torch.empty(3), False),
        (torch.empty(2), torch.empty(2, 1), False),
        (torch.empty(2), torch.empty(2, dtype=torch.float64), False),
        (torch.empty(2), None, False),
        (3, 3, False),
    ],
)
def test_a_pair_has_one_shape_and_dtype(value, other, is_pair):
    nodes = []
    for each in (value, other):
        nodes.append(fx.Graph().placeholder("x"))
        nodes[-1].meta["val"] = each
    version = SimpleNamespace(stateful={}, created={}, shows=set())
    assert _may_be_pair(*nodes, version, version) == is_pair
    drawn = SimpleNamespace(stateful={nodes[1]: 0}, created={}, shows=set())
    assert not _may_be_pair(*nodes, version, drawn)


@pytest.mark.parametrize(
    ("shape", "expanded", "is_other"),
    [((1, 3), (2, 3), True), ((2, 1), (2, 3), True), ((1, 3), (1, 3), False), ((), (1,), False)],
)
def test_elements_of_an_input_lie_apart(shape, expanded, is_other):
    given = torch.empty(shape, dtype=torch.float64).expand(expanded)
    made = _with_own_elements(given)
    assert (made is not given) == is_other
    assert (made.shape, made.dtype) == (given.shape, given.dtype)
    assert all(stride or size == 1 for size, stride in zip(made.shape, made.stride(), strict=True))
