"""A check that cannot match, cannot fail or cannot be read is an error, not a pass and not a
failure.
"""

import pytest
import torch
from torch import fx

from pytest_gtrainer import assert_graph
from pytest_gtrainer.checks import CheckError, CheckFailure
from pytest_gtrainer.graphtext import parse


def error_of(gm, checks):
    with pytest.raises(CheckError) as error:
        assert_graph(gm, checks)
    return str(error.value)


@pytest.mark.parametrize(
    ("checks", "words"),
    [
        ("", "there is no check, so nothing was checked"),
        ("# then mm", "there is no check, so nothing was checked"),
        ("then", "this `then` says nothing of the node"),
        ("then as m", "this `then` says nothing of the node"),
        ("then mm\nsame", "this `same` says nothing of the node"),
        (
            "never all_gater_into_tensor",
            "no operator is called 'all_gater_into_tensor', did you mean `all_gather_",
        ),
        ("count 0 aten.mmm", "no operator is called 'aten.mmm', did you mean `mm`?"),
        ("never aten.mm.out2", "no operator is called 'aten.mm.out2'"),
        ("never mm(reluu(_), _)", "no operator is called 'reluu', did you mean `relu"),
        ("never mm used by relo", "no operator is called 'relo'"),
        (
            "never mm in layers.1",
            "nothing in the graph lies in 'layers.1', did you mean `layers.0`?",
        ),
        ("never cat in bucket(layers.1)", "nothing in the graph lies in 'layers.1'"),
        (
            "never mm(m, _)",
            "'m' is neither a captured node nor a graph input (captures and groups are fsdp): "
            "of any ",
        ),
        (
            "never mm(relu, _)",
            "of any operator relu write `relu(_)`, or capture one with `as relu`",
        ),
        ("never mm from layers.0.wk.weight", "'layers.0.wk.weight' is neither"),
        ("then mm\nnever t\nnext t", "between a match and its next node there is nothing"),
        (
            "then output\nnever mm",
            "nothing follows the graph's output, so this `never` cannot fail",
        ),
        (
            "then output\nnever mm\nstart\nthen mm",
            "nothing follows the graph's output, so this `never` cannot fail",
        ),
        ("then mm\nstart", "nothing is checked after this `start`"),
        ("then output", "any graph has such nodes, so nothing was checked"),
        ("then output(...)", "any graph has such nodes"),
        ("count 1 output", "any graph has such nodes"),
        ("then *", "any graph has such nodes"),
        ("then '?*'", "any graph has such nodes"),
        ("next **(...) as first\nthen * as second\nsame *", "any graph has such nodes"),
        ("then * as first\nthen output(...)", "any graph has such nodes"),
        ("then output\nstart\nthen mm", "any graph has such nodes"),
        ("start", "nothing is checked after this `start`"),
        ("start\nthen output", "any graph has such nodes"),
        ("then mm\nstart\nthen output\nsame output", "any graph has such nodes"),
        ("same mm", "`same` speaks of the last match, and there is none yet"),
        ("then mm\nstart\nsame mm", "`same` speaks of the last match, and there is none yet"),
        ("never mm as m", "`never` finds no one node that could be called 'm'"),
        ("count 3 mm as m", "`count` finds no one node that could be called 'm'"),
    ],
)
def test_what_cannot_match_or_cannot_fail(gm, checks, words):
    assert words in error_of(gm, checks)


@pytest.mark.parametrize(
    "checks",
    [
        "count 12 *",
        "then output(_, _)",
        "then * in fwd",
        "then * -> bf16[...]",
        "then * used by output",
        "then * as a\nthen mm(_, _)\nthen output",
        "never relu\nthen output",
    ],
)
def test_a_check_of_any_node_may_say_something(gm, checks):
    """The twin: its type, place or number, or the nodes beside it."""
    assert_graph(gm, checks)


def test_next_output_says_that_the_graph_computes_nothing(gm):
    assert_graph(parse("if I:\n  I.x: f32[2]\nif out:\n  yield I.x\n"), "next output")
    with pytest.raises(CheckFailure, match="the next node does not match"):
        assert_graph(gm, "next output")


@pytest.mark.parametrize("kind", ["never", "then", "next", "count 0"])
@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("_to_copy(_, dtyp=bf16)", "_to_copy has no argument dtyp=, did you mean `dtype`?"),
        (
            "aten._to_copy.default(_, dtyp=bf16)",
            "_to_copy.default has no argument dtyp=, did you mean `dtype`?",
        ),
        ("_to_copy(..., dtyp=bf16)", "has no argument dtyp="),
        ("_to_copy(_, dtyp=bf16, ...)", "has no argument dtyp="),
        ("_to_copy(_, dtype=bf16, divice=_)", "has no argument divice=, did you mean `device`?"),
        ("_to_copy(_, dtype=bf16, dtype=bf16)", "dtype= is given 2 times"),
        (
            "softmax(_, dimm=1)",
            "softmax has no argument dimm=, did you mean `dim`?",
        ),  # not in this graph
        ("all_gather_into_tensor(_, 2, groop_name=fsdp)", "has no argument groop_name="),
        ("_c10d_functional.*(_, dtyp=bf16)", "_c10d_functional.* has no argument dtyp="),
        ("*(_, dtyp=bf16)", "* has no argument dtyp=, did you mean `dtype`?"),
        ("t(_to_copy(_, dtyp=bf16))", "_to_copy has no argument dtyp="),  # of an operand
        ("cat([t(_, dimm=1)])", "t has no argument dimm=: it has "),
        ("mm(_)", "the operator is aten::mm(Tensor self, Tensor mat2) -> Tensor"),
        (
            "mm(_, _, _, _)",
            "no node can have these arguments, because the operator is aten::mm(Tensor self, "
            "Tensor mat2) -> Tensor",
        ),
        ("t(_, _)", "no node can have these arguments"),
        ("t()", "no node can have these arguments"),
        ("mm(_, _, _, _, ...)", "no node can have these arguments"),
        ("t(_, self=_)", "no node can have these arguments"),
        ("mm(t(_, _), _)", "t(_, _): no node can have these arguments"),
        ("wait_tensor(_, 2, fsdp)", "no node can have these arguments"),
        ("output(_, dtype=bf16)", "the output has results in their order, and no argument dtype="),
        ("mm in fwd in bwd", "a direction (fwd, bwd) is said 2 times"),
        ("mm in head in layers.0", "a module or bucket is said 2 times"),
        ("cat in bucket(layers.0) in head", "a module or bucket is said 2 times"),
        ("mm -> f32 -> bf16", "a dtype or shape is said 2 times"),
        ("mm -> [3, 8] -> [8, 3]", "a dtype or shape is said 2 times"),
        ("t -> [8, 8][8]", "a shape of 2 dimensions has as many strides, not 1"),
        ("t -> [..., 8][..., ..., 8]", "a shape has one `...` at most"),
        ("mm -> f32[]", "a shape without dimensions is written [()]"),
        ('mm("x", 3)', "no node can have these arguments"),
        ("mm(_, 3)", "no node can have these arguments"),
        ("mm(bf16, _)", "no node can have these arguments"),
        ("mm([_], _)", "no node can have these arguments"),
        ("mm(fsdp, _)", "no node can have these arguments"),
        ("mm(self=_, mat2=2.0)", "no node can have these arguments"),
        ("add(_, 'x')", "no node can have these arguments"),
        ("cat(['x'])", "no node can have these arguments"),
        ("cat([_, 2])", "no node can have these arguments"),
        ("sum(_, [0.5])", "no node can have these arguments"),
        ("sum(_, [0], 1)", "no node can have these arguments"),
        ('_to_copy(_, dtype="f64")', "no node can have these arguments"),
        ("_to_copy(_, dtype=contiguous_format)", "no node can have these arguments"),
        ("_to_copy(_, dtype=I.x)", "no node can have these arguments"),
        ('_to_copy(..., device="cuda")', "no node can have these arguments"),
        ('t(_to_copy(..., dtype="f64"))', "no node can have these arguments"),
        ('_to_copy(..., device=device("gpu"))', "torch has no device 'gpu'"),
        ('_to_copy(..., device=device("cuda:1"))', 'compared by its type: device("cuda")'),
        ("_to_copy(..., pin_memory=1)", "no node can have these arguments"),
        ("all_gather_into_tensor(_, 2, I.x)", "no node can have these arguments"),
        ('all_gather_into_tensor(_, 2, "0")', "no node can have these arguments"),
        ("all_gather_into_tensor(_, fsdp, ...)", "no node can have these arguments"),
        ("mm(I.x[0], _)", "I.x is a graph input, and these have no outputs"),
        ("mm(output(_), _)", "nothing can use the output"),
        ("output used by mm", "the output has no module, direction, type or users"),
        ("output -> f32", "the output has no module, direction, type or users"),
        ("output in head", "the output has no module, direction, type or users"),
        ("output in fwd", "the output has no module, direction, type or users"),
        ("output in bucket()", "the output has no module, direction, type or users"),
        ("grad", "no operator is called 'grad'"),
        ("shape", "no operator is called 'shape'"),
        ("__class__", "no operator is called '__class__'"),
        ("__repr__", "no operator is called '__repr__'"),
        ("method.shape", "no operator is called 'method.shape'"),
        ("method.requires_grad", "no operator is called 'method.requires_grad'"),
        ("operator.itemgetter", "no operator is called 'operator.itemgetter'"),
        ("torch.float32", "no operator is called 'torch.float32'"),
        ("torch.nn.functional", "no operator is called 'torch.nn.functional'"),
        ("torch.nn.ReLU", "no operator is called 'torch.nn.ReLU'"),
        ("torch.ops.aten.mm", "no operator is called 'torch.ops.aten.mm'"),
        ("torch.nn.functional.gelu", "no operator is called 'torch.nn.functional.gelu'"),
        ("mm used by shape", "no operator is called 'shape'"),
        ("mm(shape(_), _)", "no operator is called 'shape'"),
        ("getitem", "the graph takes outputs by getitem"),
        ("mm used by operator.getitem", "the graph takes outputs by getitem"),
    ],
)
def test_no_node_of_any_graph_can_match(gm, kind, node, words):
    """A `never` or a `count 0` of such a node would hold of every graph."""
    assert words in error_of(gm, f"{kind} {node}")


@pytest.mark.parametrize(
    "node",
    [
        "_to_copy(_, dtype=f16)",
        "_to_copy(..., layout=_)",
        "softmax(_, dim=1)",
        "softmax(_, 1)",
        "softmax(_, 1, f32)",
        "sum(_, [0], dtype=f32)",
        "add(_, _, alpha=2)",
        "mm(..., out=_)",
        "mm(self=_, mat2=_)",
        "empty_like(...)",
        "hop.cond(_, anything=1)",
        "operator.add(_, _)",
        "method.view(_, 2, 3)",
        "*(_, alpha=2)",
        "add(_, 2)",
        "mul(2.0, _)",
        "sum(_, 0)",
        "cat([I.x, ...])",
        "index(_, [None, _])",
        "view(_, [I.x, -1])",
        "full([2], inf)",
        "full([2], -inf)",
        "dropout(_, 1, True)",
        "_to_copy(..., dtype=None)",
        '_to_copy(..., device=device("cuda"))',
        "empty([2, 3], dtype=f64, layout=strided, memory_format=contiguous_format)",
        "all_gather_into_tensor(_, 2, [0, 1, 2])",
        "all_gather_into_tensor(..., _, fsdp, _)",
        "reduce_scatter_tensor(_, 'sum', ...)",
        "torch.sum",
        "torch.nn.functional.relu",
        "torch._C._nn.gelu",
        "math.ceil",
        "method.add_",
        "output(_)",
    ],
)
def test_what_some_node_could_be_is_no_error(gm, node):
    """The twin: other overloads, arguments in their place and by name, operators without a
    signature.
    """
    if not node.startswith("mm(self"):
        assert_graph(gm, f"never {node}")
    else:
        assert_graph(gm, f"then {node}")


SEVERAL = """\
if I:
  I.x: f32[3, 8]
if fwd:
  topk: (f32[3, 2], i64[3, 2]) = aten.topk(I.x, 2)
  sum: f32[()] = aten.sum(topk[0])
  mm: f32[3, 3] = aten.mm(I.x, I.x)
  add: f32[3, 2] = aten.add.Tensor(topk[1], mm)
if out:
  yield fwd._.sum
  yield fwd._.add
"""


@pytest.mark.parametrize("item", [2, 7])
@pytest.mark.parametrize("kind", ["never", "count 0", "then"])
def test_an_output_that_a_value_does_not_have(kind, item):
    gm = parse(SEVERAL)
    text = error_of(gm, f"then topk as k\n{kind} sum(k[{item}])")
    assert f"k[{item}]: aten.topk has 2 outputs, counted from 0" in text
    text = error_of(gm, f"then mm as m\n{kind} add(_, m[{item - 2}])")
    assert f"m[{item - 2}]: aten.mm has one output, and it is no tuple" in text
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    assert "aten.topk has 2 outputs" in error_of(gm, f"then topk as k\n{kind} sum(k[{item}])")
    assert "has one output" in error_of(gm, f"then mm as m\n{kind} add(_, m[0])")


def test_an_operator_of_several_outputs_stands_for_each_of_them():
    """The same holds for `used by`. Otherwise no operand would ever be one, and a `never` would
    hold for every graph.
    """
    gm = parse(SEVERAL)
    assert_graph(gm, "then topk as k\nthen sum(k)\nthen add(k, mm(...))\nstart\nnever add(k[0], _)")
    assert_graph(
        gm, "then sum(topk(I.x, 2))\nthen add(topk(...), _)\nstart\nnever sum(topk(I.x, 3))"
    )
    for check in (
        "never sum(topk(...), ...)",
        "never add(topk(_, 2), _)",
        "count 0 sum(topk(...))",
    ):
        with pytest.raises(CheckFailure):
            assert_graph(gm, check)
    for check in ("never sum(k)", "never add(k, _)", "never add(k[1], _)"):
        with pytest.raises(CheckFailure):
            assert_graph(gm, f"then topk as k\n{check}")


@pytest.mark.parametrize("kind", ["never", "count 0"])
@pytest.mark.parametrize(
    ("bucket", "words"),
    [
        (
            "norm, layers.0",
            "no bucket is norm, layers.0, in this order; there is bucket(layers.0, norm)",
        ),
        ("layers.0", "no bucket is layers.0, in this order"),
        ("layers", "no bucket is layers, in this order"),
        ("layers.0.w, norm", "nothing in the graph lies in 'layers.0.w'"),
        ("norm, norm", "no bucket is norm, norm, in this order"),
    ],
)
def test_a_bucket_that_the_graph_does_not_have(kind, bucket, words):
    text = (
        "if P:\n  P.layers[0].w: f32[4]\n  P.norm.w: f32[4]\nif fwd:\n"
        "  with bucket(layers[0], norm):\n"
        "    cat: f32[8] = aten.cat([P.layers[0].w, P.norm.w])\n"
        "if out:\n  yield fwd.bucket(layers[0], norm).cat\n"
    )
    gm = parse(text)
    assert words in error_of(gm, f"{kind} sin in bucket({bucket})")
    assert_graph(gm, f"{kind} sin in bucket(layers.0, norm)\n{kind} sin in bucket(*.0, *)")
    assert_graph(gm, f"{kind} sin in bucket()")
    with pytest.raises(CheckFailure if "lies" not in words else CheckError):
        assert_graph(gm, f"then cat in bucket({bucket})")


def test_a_bucket_of_the_graph_before_is_known(gm):
    import copy

    after = copy.deepcopy(gm)
    for node in after.graph.nodes:
        node.meta.pop("fsdp_bucket", None)
    assert "there is no bucket" in error_of(after, "never cat in bucket(layers.0)")
    assert_graph(after, "never cat in bucket(layers.0)", before=gm)


def test_an_argument_in_its_place_is_found_by_its_name(gm):
    """A `never` by the name would have held: the graph gives this argument in its place."""
    assert_graph(
        gm,
        "then split(_, split_size=8)\nstart\nthen all_gather_into_tensor(_, group_name=fsdp, ...)",
    )
    assert_graph(
        gm, 'then reduce_scatter_tensor(_, reduce_op="avg", ...)\nstart\nthen mm(self=I.x, mat2=_)'
    )
    with pytest.raises(CheckFailure):
        assert_graph(gm, "never split(_, split_size=8)")
    with pytest.raises(CheckFailure, match="split_size: it is 8, expected 4"):
        assert_graph(gm, "then split(_, split_size=4)")
    with pytest.raises(CheckFailure, match="group_name: it is fsdp"):
        assert_graph(gm, "then all_gather_into_tensor(_, 2, group_name=[0])")


@pytest.mark.parametrize(
    ("call", "holds", "fails"),
    [
        ("aten.sum.dim_IntList(I.x, [0])", "sum(_, [0], False)", "sum(_, [0], True)"),
        (
            "aten.sum.dim_IntList(I.x, [0])",
            "sum(_, [0], keepdim=False)",
            "sum(_, [0], keepdim=True)",
        ),
        ("aten.sum.dim_IntList(I.x, [0])", "sum(_, [0], dtype=None)", "sum(_, [0], dtype=f32)"),
        ("aten.sum.dim_IntList(I.x, [0])", "sum(_, [0])", "sum(_, [0], _)"),
        ("aten.sum.dim_IntList(I.x, [0])", "sum(_, ...)", "sum(_, keepdim=_, ...)"),
        ("aten.add.Tensor(I.x, I.x)", "add(_, _, alpha=1)", "add(_, _, alpha=2)"),
        ("aten.add.Tensor(I.x, I.x, alpha=2)", "add(_, _, alpha=2)", "add(_, _, alpha=1)"),
        ("aten.add.Tensor(I.x, I.x)", "add(..., alpha=1)", "add(..., alpha=2)"),
        ("aten.slice.Tensor(I.x, 0, 1)", "slice(_, 0, 1, None, 1)", "slice(_, 0, 1, None, 2)"),
        ("aten.slice.Tensor(I.x, 0, 1)", "slice(_, 0, 1, step=1)", "slice(_, 0, 1, step=2)"),
        ("aten.slice.Tensor(I.x, 0, 1)", "slice(_, 0, 1, None, ...)", "slice(_, 0, 1, 2, ...)"),
        ("aten.slice.Tensor(I.x, 0, step=2)", "slice(_, 0, None, None, 2)", "slice(_, 0)"),
        ("aten.sum.dim_IntList(I.x, dim=[0])", "sum(_, [0])", "sum(_)"),
        ("aten.sum.dim_IntList(I.x, dim=[0])", "sum(_, dim=_)", "sum(_, dim=_, keepdim=_)"),
    ],
)
def test_an_argument_that_is_not_given_has_its_default(call, holds, fails):
    name = call.split(".")[1]
    text = (
        f"if I:\n  I.x: f32[4, 4]\nif fwd:\n  {name}: f32[4, 4] = {call}\nif out:\n"
        f"  yield fwd._.{name}\n"
    )
    gm = parse(text)
    assert_graph(gm, f"count 1 {holds}\nnever {fails}")
    with pytest.raises(CheckFailure):
        assert_graph(gm, f"never {holds}")


@pytest.mark.parametrize(
    ("call", "holds", "fails"),
    [
        ("aten.sum.dim_IntList(I.x, [0], False)", "sum(_, [0])", "sum(_)"),
        ("aten.sum.dim_IntList(I.x, [0], True)", "sum(_, [0], ...)", "sum(_, [0])"),
        ("aten.sum.dim_IntList(I.x, [0], False, dtype=None)", "sum(_, [0])", "sum(_, [1])"),
        ("aten.add.Tensor(I.x, I.x, alpha=1)", "add(_, _)", "add(_)"),
        ("aten.add.Tensor(I.x, I.x, alpha=1.0)", "add(_, _)", "add(_, _, alpha=2)"),
        ("aten.add.Tensor(I.x, I.x, alpha=2)", "add(_, _, ...)", "add(_, _)"),
    ],
)
def test_an_argument_that_is_given_as_its_default_may_be_left_out(call, holds, fails):
    gm = graph_of(call)
    assert_graph(gm, f"count 1 {holds}")
    with pytest.raises(CheckFailure):
        assert_graph(gm, f"never {holds}")
    if fails.count("_") > 1:  # else no call has so few arguments
        assert_graph(gm, f"never {fails}")


@pytest.mark.parametrize(
    ("call", "same", "different"),
    [
        ("aten.mul.Scalar(I.x, 2)", ["2", "2.0", "2e0"], ["-2", "3", "2.5", "True"]),
        ("aten.mul.Scalar(I.x, 2.0)", ["2", "2.0"], ["-2", "3"]),
        ("aten.mul.Scalar(I.x, 1)", ["1", "1.0"], ["True", "-1"]),
        ("aten.mul.Scalar(I.x, True)", ["True"], ["1", "1.0", "False"]),
        ("aten.mul.Scalar(I.x, 0)", ["0", "0.0"], ["-0.0", "False"]),
        ("aten.mul.Scalar(I.x, -0.0)", ["-0.0"], ["0", "0.0"]),
        ("aten.mul.Scalar(I.x, inf)", ["inf"], ["-inf", "1e300", "nan"]),
        ("aten.mul.Scalar(I.x, nan)", ["nan"], ["inf", "0"]),
        ("aten.mul.Scalar(I.x, 1e-05)", ["1e-5", "0.00001"], ["1e-6"]),
    ],
)
def test_numbers_are_compared_by_value(call, same, different):
    """True is not 1 and -0.0 not 0.0: an operator gives another dtype or sign for them."""
    gm = graph_of(call)
    for number in same:
        assert_graph(gm, f"count 1 mul(_, {number})\nthen mul(_, {number})")
        with pytest.raises(CheckFailure):
            assert_graph(gm, f"never mul(_, {number})")
    for number in different:
        assert_graph(gm, f"count 0 mul(_, {number})\nnever mul(_, {number})")


@pytest.mark.parametrize(
    ("call", "same", "different"),
    [
        ("aten.softmax.int(I.x, 1)", ["(_, 1)", "(_, -1)", "(_, dim=-1)"], ["(_, 0)", "(_, -2)"]),
        ("aten.softmax.int(I.x, -1)", ["(_, 1)", "(_, -1)"], ["(_, 0)", "(_, -2)", "(_, 2)"]),
        ("aten.sum.dim_IntList(I.x, [1])", ["(_, [-1])", "(_, -1)", "(_, 1)"], ["(_, [-2])"]),
        ("aten.sum.dim_IntList(I.x, [0, 1])", ["(_, [-2, -1])"], ["(_, [-1, -2])"]),
        ("aten.transpose.int(I.x, 0, 1)", ["(_, -2, -1)", "(_, 0, -1)"], ["(_, -1, -1)"]),
        ("aten.unsqueeze(I.x, 2)", ["(_, -1)"], ["(_, -2)", "(_, -3)"]),
        ("aten.stack([I.x, I.x], 0)", ["(_, -3)", "([_, _], 0)", "(_)"], ["(_, -2)", "(_, -1)"]),
        ("aten.cat([I.x, I.x], 1)", ["(_, -1)"], ["(_, -2)", "(_)"]),
        ("aten.view(I.x, [-1])", ["(_, [-1])", "(_, -1)"], ["(_, [16])", "(_, 1)"]),
    ],
)
def test_a_dimension_may_be_counted_from_either_end(call, same, different):
    gm = graph_of(call)
    name = call.split(".")[1].partition("(")[0]
    for arguments in same:
        assert_graph(gm, f"count 1 {name}{arguments}")
        with pytest.raises(CheckFailure):
            assert_graph(gm, f"never {name}{arguments}")
    for arguments in different:
        assert_graph(gm, f"never {name}{arguments}")


@pytest.mark.parametrize("kind", ["never", "count 0", "count 1"])
def test_a_dimension_of_a_tensor_whose_rank_is_not_known(kind):
    gm = graph_of("aten.softmax.int(I.x, 1)")
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    for arguments in ("(_, -1)", "(_, dim=-2)"):
        text = error_of(gm, f"{kind} softmax{arguments}")
        assert "nobody knows how many dimensions it counts" in text
    assert_graph(gm, "count 1 softmax(_, 1)\nnever softmax(_, 0)\nnever softmax(mm(...), -1)")


def graph_of(call):
    name = call.split(".")[1].partition("(")[0]
    return parse(
        f"if I:\n  I.x: f32[4, 4]\nif fwd:\n  {name}: f32[4, 4] = {call}\n"
        f"if out:\n  yield fwd._.{name}\n"
    )


@pytest.mark.parametrize(
    ("results", "same", "different"),
    [
        (lambda a, b: (a, b), ["a, b", "[a, b]", "(a, b)", "[a, ...]"], ["b, a", "[b, a]", "[a]"]),
        (lambda a, b: [b], ["b", "[b]", "[_]", "[...]"], ["a", "[a]", "[b, b]"]),
        (lambda a, b: b, ["b", "[b]"], ["a", "[a]"]),
        (lambda a, b: ((a, b), a), ["a, b, a", "[a, b], a", "[[a, b], a]"], ["a, [b, a]"]),
        (lambda a, b: {"x": a, "y": b}, ["a, b", "[a, b]"], ["b, a", "[a]"]),
        (lambda a, b: (a, [b], None), ["a, b, None", "a, [b], None"], ["a, b", "[a], b, None"]),
    ],
)
def test_the_results_may_be_written_as_a_list(results, same, different):
    """Results may be written like graph text shows them, or with the lists around them that Python
    has.
    """
    graph = fx.Graph()
    x = graph.placeholder("x")
    a, b = (graph.call_function(op, (x,)) for op in (torch.relu, torch.sin))
    graph.output(results(a, b))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    names = "then relu as a\nthen sin as b\n"
    for pattern in same:
        assert_graph(gm, f"{names}count 1 output({pattern})\nthen output({pattern})")
        with pytest.raises(CheckFailure):
            assert_graph(gm, f"{names}never output({pattern})")
    for pattern in different:
        assert_graph(gm, f"{names}never output({pattern})\ncount 0 output({pattern})")


@pytest.mark.parametrize("kind", ["never", "count 0"])
@pytest.mark.parametrize("node", ["mm in bwd", "in bwd", "* in bwd layers.0.wo", "t in bwd -> f32"])
def test_a_direction_that_the_graph_does_not_have(gm, kind, node):
    import copy

    forward = copy.deepcopy(gm)
    for one in forward.graph.nodes:
        one.meta.pop("autograd_backward", None)
        one.meta.get("fsdp_bucket", {}).update(direction="fwd")
    wrong = "the graph has no backward, so no node is in bwd"
    assert wrong in error_of(forward, f"{kind} {node}")
    assert_graph(forward, f"{kind} t in bwd", before=gm)  # a pass may have removed it
    assert_graph(gm, f"{kind} t in bwd")
    backward = copy.deepcopy(gm)
    for one in backward.graph.nodes:
        one.meta["autograd_backward"] = True
        one.meta.get("fsdp_bucket", {}).update(direction="bwd")
    wrong = "the graph has no forward, so no node is in fwd"
    assert wrong in error_of(backward, f"{kind} {node.replace('bwd', 'fwd')}")
    with pytest.raises(CheckFailure):
        assert_graph(forward, "then mm in bwd")


def test_keywords_of_functions_that_dynamo_calls():
    """Its graphs call functions of Python, whose arguments have other names than the operators'."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.nn.functional.softmax, (x,), {"dim": 1, "_stacklevel": 5})
    graph.output(graph.call_function(torch.sum, (y,), {"dim": 0}))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert_graph(
        gm, "then softmax(_, dim=1, ...)\nthen sum(_, dim=0)\nstart\nnever softmax(input=_, ...)"
    )
    for node, words in (
        ("softmax(_, dimm=1, ...)", "no argument dimm=, did you mean `dim`"),
        ("softmax(_, stacklevel=1)", "no argument stacklevel=, did you mean `_stacklevel`"),
        ("sum(_, dimm=0)", "no argument dimm=, did you mean `dim`"),
    ):
        assert words in error_of(gm, f"never {node}")


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (
            "tehn mm",
            "a check begins with then, next, same, never, count, start, not 'tehn', did you "
            "mean `then`?",
        ),
        ("mm", "a check begins with then"),
        ("count mm", "expected how many, a whole number, found 'mm'"),
        ("count -1 mm", "expected how many, a whole number, found '-1'"),
        ("then mm fwd", "expected in, ->, from, used, as or the end, found 'fwd'"),
        ("then mm in", "expected fwd, bwd, a module or bucket(...), found the end"),
        ("then mm in fwd layers.0 wq", "or the end, found 'wq'"),
        ("then mm(_", "expected ',', found the end"),
        ("then mm(_ _)", "expected ',', found '_'"),
        ("then mm(..., ...)", "a list of arguments has one `...` at most"),
        ("then mm -> f31", "there is no dtype 'f31', did you mean `f32`?"),
        ("then mm ->", "expected a dtype or a shape, found the end"),
        ("then mm -> [..., ...]", "a shape has one `...` at most"),
        ("then mm -> [x]", "expected an extent, `_` or `...`"),
        ("then mm used mm", "expected 'by', found 'mm'"),
        ("then mm as layers.0", "a node's name is a plain word, not 'layers.0'"),
        ("then mm as a as b", "a node gets one name, not a and b"),
        ("start mm", "`start` stands alone"),
        ("then mm; never t", "';' at column 8 is not part of a check: write one check a line"),
        ("then mm, in fwd", "found ',': clauses have no comma between them"),
        (
            "then aten::mm",
            "':' at column 10 is not part of a check: write dots in the path of an op",
        ),
        ("then mm in layers/0", "write dots in the path of a module, `layers.0.wq`"),
        ("then mm in layers[0]", "found '[': write dots, in the path of a module `layers.0.wq`"),
        ("never mm from A[1]", "`layers.0.wq`, after `from` also `A.1`"),
        ("then layers[0].wq", "'.' at column 15 is not part of a check: write dots in the path of"),
    ],
)
def test_what_cannot_be_read(gm, check, words):
    message = error_of(gm, f"then cat\n{check}")
    assert message.startswith(
        f"tests/checks/test_checks_that_check_nothing.py, line 2 of the checks: {check}"
    )
    assert words in message


@pytest.mark.parametrize(
    "operator",
    [
        "relu",
        "aten.relu",
        "aten.relu.default",
        "aten.add.Tensor",
        "hop.cond",
        "operator.floordiv",
        "method.view",
        "torch.nn.functional.relu",
        "_c10d_functional.all_*",
        "reduce_scatter_tensor",
    ],
)
def test_operators_that_exist_but_not_in_the_graph_may_be_forbidden(gm, operator):
    assert_graph(gm, f"then split\nnever {operator} in fwd layers.0")


def test_modules_that_a_pass_has_emptied_are_known_from_the_graph_before(gm):
    """With ``before`` a `never` may speak of them."""
    import copy

    after = copy.deepcopy(gm)
    for node in after.graph.nodes:
        if node.meta.get("custom", {}).get("module_fqn") == "head":
            node.meta["custom"] = {"module_fqn": "layers.0.wo"}
    assert "nothing in the graph lies in 'head'" in error_of(after, "never mm in head")
    assert_graph(after, "never mm in head", before=gm)
