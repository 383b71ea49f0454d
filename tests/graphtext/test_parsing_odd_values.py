"""Values, names and annotations that are rare, and are read back all the same."""

import enum
import math

import numpy
import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer.graphtext import TextError, constants, parse, render
from tests.graphtext.same import assert_comes_back
from tests.graphtext.toy import small_graph

aten = torch.ops.aten


class Phase(enum.IntEnum):
    FIRST = 1


def one_call(value: object, *, fqn: str = "norm", **custom: object) -> fx.GraphModule:
    """``mul(x, value)`` in a module, with annotations; the value may be of any type."""
    graph = fx.Graph()
    node = graph.call_function(aten.mul.Scalar, (graph.placeholder("x"), 1))
    node.meta["custom"] = {"module_fqn": fqn, **custom}
    graph.output((node,))
    gm = fx.GraphModule({}, graph)
    node.args = (node.args[0], value)
    return gm


def operands(gm: fx.GraphModule) -> tuple[object, ...]:
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.mul.Scalar)
    return node.args[1:]


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "value",
    [
        complex(0.0, -0.0),
        complex(-0.0, -0.0),
        -1j,
        complex(-0.0, -3.0),
        1 - 2j,
        complex(INF, 1),
        complex(1, NAN),
        complex(0, INF),
        complex(0, -INF),
        complex(-INF, NAN),
        {-1: 2, "a": None},
        numpy.float64(0.5),
        Phase.FIRST,
    ],
    ids=repr,
)
def test_operands(value):
    gm = one_call(value)
    (again,) = operands(assert_comes_back(gm))
    assert repr(again) == repr(value)
    assert isinstance(again, type(value))


def test_an_enum_is_no_number():
    assert render(one_call(Phase.FIRST)) != render(one_call(1))


@pytest.mark.parametrize(
    "custom",
    [{"pass": 1}, {"True": 1, "a": 2}, {"a": INF, "b": [-INF]}, {"\ufb01": 1}],
    ids=["keyword", "constant", "infinite", "ligature"],
)
def test_annotations(custom):
    assert_comes_back(one_call(2, **custom))


@pytest.mark.parametrize("value", [NAN, [NAN, -INF], {2: (NAN, 1)}], ids=repr)
def test_an_annotation_that_is_no_number(value):
    """It is no equal of itself, so texts are compared."""
    text = render(one_call(2, stage=value))
    assert "nan" in text
    assert render(parse(text)) == text


@pytest.mark.parametrize(
    ("mark", "tag"), [(False, ""), (True, " | mismarked")], ids=["forward", "marked as backward"]
)
def test_a_node_of_a_bucket_may_carry_the_mark_of_the_other_direction(mark, tag):
    gm = one_call(2)
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.mul.Scalar)
    node.meta = {"fsdp_bucket": {"plan_fqns": ["norm"], "direction": "fwd"}}
    node.meta |= {"autograd_backward": True} if mark else {}
    assert f"mul: _{tag} = aten.mul.Scalar" in render(gm)
    assert_comes_back(gm)


def test_keys_of_several_kinds():
    gm = one_call(2)
    gm.graph.find_nodes(op="call_function", target=aten.mul.Scalar)[0].meta["custom"] |= {
        1: 2,
        "b": 3,
    }
    assert_comes_back(gm)


def test_annotations_that_are_no_literals_are_left_out():
    """Subclasses of numbers, whose ``repr`` is no literal, among them."""
    assert render(one_call(2, phase=Phase.FIRST, rate=numpy.float64(1))) == render(one_call(2))


@pytest.mark.parametrize(
    "fqn", ['a"b.c', "a\\b", 'layers.0.a"\\', "a\nb", "\ufb01.x", "l.\ufb01", "\xe9.x"]
)
def test_names_of_modules(fqn):
    assert_comes_back(one_call(2, fqn=fqn))


def test_layers_of_an_odd_container_are_told_by_another():
    graph = fx.Graph()
    value = graph.placeholder("x")
    for layer in range(3):
        for place in range(12):
            value = graph.call_function(
                aten.sin.default if (layer, place) != (1, 6) else aten.cos.default, (value,)
            )
            value.meta["custom"] = {"module_fqn": f'it\'s "x".{layer}'}
    graph.output((value,))
    gm = fx.GraphModule({}, graph)
    assert "like(" in render(gm)
    assert_comes_back(gm)


def with_constants(*values: torch.Tensor) -> fx.GraphModule:
    graph = fx.Graph()
    getters = [graph.get_attr(f"c{place}") for place in range(len(values))]
    graph.output(tuple([graph.call_function(aten.relu.default, (getter,)) for getter in getters]))
    return fx.GraphModule({f"c{place}": value for place, value in enumerate(values)}, graph)


@pytest.mark.parametrize(
    "one",
    [
        torch.arange(16.0).view(4, 4),
        torch.arange(16.0).view(torch.int32),
        torch.arange(16.0).view(4, 4).t(),
    ],
    ids=["shape", "dtype", "strides"],
)
def test_large_constants_of_equal_bytes_keep_their_types(one):
    """A digest is of the bytes alone."""
    other = torch.arange(16.0) if one.is_contiguous() else one.contiguous()
    assert_comes_back(with_constants(one, other))
    assert_comes_back(with_constants(other, one))


def test_constants_that_are_expanded_sparse_or_of_no_data():
    assert_comes_back(
        with_constants(
            torch.ones(1).expand(4), torch.ones(1).expand(40), torch.ones(3, device="meta")
        )
    )
    sparse = with_constants(torch.eye(4).to_sparse())
    (relu,) = parse(render(sparse), constants=constants(sparse)).graph.find_nodes(
        op="call_function", target=aten.relu.default
    )
    assert relu.args[0].op == "get_attr"


@pytest.mark.parametrize(
    "operand",
    [
        "range(0, 4, 0)",
        "range('a')",
        "range(A[0])",
        "const(f32[2][0], [1.0, 2.0])",
        "const(u64[1], [-1])",
        "const(f32[2][1000000000000000], [1.0, 2.0])",
        "const(f32[2] @ hpu, [1.0, 2.0])",
        "+5",
        "+inf",
        "-infinity",
    ],
)
def test_what_is_no_value_is_refused(operand):
    text = f"if A:\n  A[0]: f32[2]\nif fwd:\n  with _:\n    a: _ = aten.relu({operand})\n"
    with pytest.raises(TextError, match="line 5"):
        parse(text)


def test_a_row_of_a_tensor_has_a_value():
    gm = fx.symbolic_trace(lambda v: v.float()[1])
    gm.graph.find_nodes(op="call_method", target="float")[0].meta["val"] = torch.zeros(2, 3)
    (row,) = assert_comes_back(gm).graph.output_node().args
    assert row.meta["val"].shape == (3,)


def two_branches(v: torch.Tensor) -> torch.Tensor:
    return torch.cond(v.sum() > 0, lambda w: w.sin(), lambda w: w.cos(), (v,))[0]


def test_where_bodies_are_held_does_not_show():
    gm = make_fx(two_branches)(torch.ones(4))
    text = render(gm)
    first, second = gm.graph.find_nodes(op="get_attr")
    first.prepend(second)
    gm.graph.lint()
    assert render(gm) == text


def test_a_body_that_nobody_reads_is_left_out():
    gm = make_fx(two_branches)(torch.ones(4))
    text = render(gm)
    gm.add_module("dead", small_graph(lambda v: v.tanh(), torch.ones(4)))
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.get_attr("dead")
    assert render(gm) == text
    assert_comes_back(gm)
