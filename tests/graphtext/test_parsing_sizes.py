"""Sizes of a text: symbols, what is computed from them, and symbolic operands."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from pytest_gtrainer.graphtext import parse, render
from tests.graphtext.same import assert_comes_back
from tests.graphtext.toy import at

OPERAND = """\
# gtrainer graph v2
s0 = size({example})
returns = value
if A:
  A[0]: f32[s0]
if fwd:
  with _:
    relu: f32[s0] = aten.relu({operand})
if out:
  yield fwd._.relu
"""


def test_a_size_that_no_layer_brings_in_is_the_same_in_all_layers():
    def step(v, w):
        with at("router"):
            rows = v.nonzero()
        with at("layers.0.mlp"):
            own, shared = w.nonzero(), rows + 1
        with at("layers.1.mlp"):
            return torch.cat([rows, own]), own + 1, shared

    with preserve_node_meta():
        gm = make_fx(step, tracing_mode="symbolic")(torch.ones(4), torch.ones(5))
    text = render(gm)
    assert "cat: i64[layers[i-1].u0 + u0, 1]" in text
    assert "add: i64[layers[i-1].u0, 1]" in text, "layer 0 calls it u0, and layer 1 by that layer"
    again = assert_comes_back(gm)
    extents = {
        node.meta["val"].shape[0].node.expr
        for node in again.graph.nodes
        if node.name in ("nonzero", "add")
    }
    assert len(extents) == 1


@pytest.mark.parametrize(
    "step",
    [
        lambda v: v * v.shape[0] ** 0.5,
        lambda v: v * 2 ** v.shape[0],
        lambda v: v * round(v.shape[0] / 4),
        lambda v: v * (v.shape[0] / 3),
    ],
    ids=["root", "power", "round", "quotient"],
)
def test_numbers_computed_from_sizes(step):
    torch.manual_seed(0)
    assert_comes_back(make_fx(step, tracing_mode="symbolic")(torch.zeros(6)), torch.randn(6))


@pytest.mark.parametrize(
    ("operand", "kind"),
    [
        ("sym(s0 + u0)", torch.SymInt),
        ("sym(zuf0)", torch.SymFloat),
        ("sym(IntTrueDiv(s0, 3))", torch.SymFloat),
        ("sym(u0 > 1)", torch.SymBool),
    ],
)
def test_a_symbolic_operand_is_of_the_kind_of_its_expression(operand, kind):
    text = OPERAND.format(example=4, operand=operand)
    gm = parse(text)
    (relu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert type(relu.args[0]) is kind
    assert render(gm) == text


def test_a_number_may_be_larger_than_any_size():
    text = OPERAND.format(example=4, operand="A[0]").replace(
        "relu: f32[s0]", "relu: int[9223372036854775807]"
    )
    assert render(parse(text)) == text


def test_strides_of_no_elements_are_those_of_torch():
    gm = parse("if I:\n  I.x: f32[2, 0, 4]\nif out:\n  yield I.x\n")
    assert (
        next(iter(gm.graph.nodes)).meta["val"].stride()
        == torch.empty(2, 0, 4).stride()
        == (4, 4, 1)
    )
