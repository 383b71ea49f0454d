"""Each check and each clause holds where it should and fails where it should."""

import pytest

from pytest_gtrainer import assert_graph
from pytest_gtrainer.checks import CheckError, CheckFailure
from pytest_gtrainer.checks.arguments import _fits
from pytest_gtrainer.graphtext import parse


def failure_of(gm, checks):
    with pytest.raises(CheckFailure) as failure:
        assert_graph(gm, checks)
    return str(failure.value)


@pytest.mark.parametrize(
    ("holds", "fails"),
    [
        ("count 3 mm", "count 2 mm"),
        ("count 3 aten.mm.default", "count 2 aten.mm"),
        ("count 3 aten.mm.*", "count 0 aten.mm.*"),
        ("count 3 *.mm.*", "count 0 *.mm.*"),
        ("count 3 aten.mm.def*", "count 0 aten.mm.def*"),
        ("count 1 aten.split.*", "count 0 aten.split.*"),
        ("count 2 _c10d_functional.wait_tensor.*", "count 0 *.wait_tensor.*"),
        ("count 4 _c10d_functional.*", "count 2 *_tensor"),
        ("count 12 *", "count 13 *"),
        ("count 1 output\ncount 3 mm", "count 0 output"),
        ("count 2 mm in layers.0.wo", "count 2 mm in layers.0.wq"),
        ("count 4 * in layers.*", "count 4 * in *.0.wo"),
        ("count 1 mm in bwd", "count 1 mm in fwd"),
        ("count 1 mm in fwd layers.0.wo", "count 1 mm in bwd layers.0.wq"),
        (
            "count 2 wait_tensor in bucket(layers.0)",
            "count 2 wait_tensor in bucket(layers.0, head)",
        ),
        ("count 6 * in bucket()", "count 6 * in fwd bucket(layers.*)"),
        ("count 1 _to_copy -> bf16", "count 1 _to_copy -> f32"),
        ("count 1 mm -> [8, 8]", "count 1 mm -> [3, 8]"),
        ("count 2 mm -> f32[3, _]", "count 2 mm -> f32[_, _]"),
        ("count 3 mm -> [..., 8]", "count 3 mm -> [8, ...]"),
        ("count 1 sum -> bf16[()]", "count 1 sum -> [_]"),
        ("count 1 t -> [8, 8][1, 8]", "count 1 t -> [8, 8][8, 1]"),
        ("count 3 mm from P.layers.0.wq.weight", "count 3 mm from I.x"),
        ("count 1 t used by aten.mm", "count 1 t used by sum"),
        ("count 1 t used only by mm", "count 1 split used only by mm"),
        ("count 1 split used by mm", "count 1 split used by output"),
        ("count 2 * used by output", "count 3 * used by output"),
    ],
)
def test_what_a_node_may_be(gm, holds, fails):
    assert_graph(gm, holds)
    failure_of(gm, fails)


@pytest.mark.parametrize(
    ("holds", "fails"),
    [
        ("mm(I.x, _) as m\nthen mm(m, ...)", "mm(I.x, _) as m\nthen mm(_, m)"),
        ("mm(I.x, _) as m\nthen mm(m, t(_))", "mm(I.x, _) as m\nthen mm(m, mm(...))"),
        ("split as s\nthen mm(_, s[0])", "split as s\nthen mm(_, s[1])"),
        (
            "cat([layers.0.wq.weight, layers.0.wo.weight])",
            "cat([layers.0.wo.weight, layers.0.wq.weight])",
        ),
        ("cat([layers.0.*.weight, ...])", "cat([layers.0.*.weight])"),
        ("all_gather_into_tensor(_, 2, fsdp)", "all_gather_into_tensor(_, 4, fsdp)"),
        ("all_gather_into_tensor(..., range(0, 2))", "all_gather_into_tensor(..., [0, 2])"),
        ('reduce_scatter_tensor(_, "avg", ...)', 'reduce_scatter_tensor(_, "sum", ...)'),
        ("_to_copy(_, dtype=bf16)", "_to_copy(_, dtype=f32)"),
        ("_to_copy(...)", "_to_copy(_)"),
        ("_to_copy(..., _, dtype=bf16)", "_to_copy(..., _)"),
        ("output(_, wait_tensor(...))", "output(wait_tensor(...), _)"),
    ],
)
def test_arguments_are_spelled_as_in_graph_text(gm, holds, fails):
    assert_graph(gm, f"then {holds}")
    failure_of(gm, f"then {fails}")


@pytest.mark.parametrize(
    ("holds", "fails"),
    [
        ("then cat\nthen mm in layers.0.wo", "then mm in layers.0.wo\nthen cat"),
        ("then all_gather_into_tensor as g\nnext wait_tensor(g)", "then mm as m\nnext mm(m, _)"),
        ("next cat", "next split"),
        (
            "then reduce_scatter_tensor\nnext wait_tensor\nnext output",
            "then wait_tensor in bwd\nnext sum",
        ),
        ("then mm\nsame in layers.0.wq", "then mm\nsame in layers.0.wo"),
        ("then mm\nsame -> f32 as m\nthen mm(m, _)", "then t\nsame used by _to_copy"),
        ("then cat\nnever mm\nthen split", "then cat\nnever wait_tensor\nthen split"),
        ("never mm\nthen cat", "never cat\nthen split"),
        ("then _to_copy\nnever mm in fwd", "then _to_copy\nnever mm"),
        ("then sum\ncount 1 cat\nthen mm", "then sum\ncount 1 cat\nthen cat"),
        ("then sum\nstart\nthen cat", "then sum\nthen cat"),
        ("start\nstart\nthen cat", "start\nthen mm in layers.0.wo\nthen cat"),
        ("then mm as m\nstart\nthen mm(m, _)", "then sum\nnever mm\nstart\nthen cat"),
    ],
)
def test_where_a_check_looks(gm, holds, fails):
    """`then` behind the last match, `next` right behind it, `never` up to the next one or to the
    end.
    """
    assert_graph(gm, holds)
    failure_of(gm, fails)


def test_a_then_takes_the_first_match_and_does_not_come_back(gm):
    """Like FileCheck: the first mm is wq's, so `same in layers.0.wo` cannot choose the second."""
    failure_of(gm, "then mm\nsame in layers.0.wo")
    assert_graph(gm, "then mm in layers.0.wo\nsame -> [3, 8]")


def test_empty_lines_and_comments_say_nothing(gm):
    assert_graph(gm, "\n  # the gather\n  then all_gather_into_tensor\n\n  next wait_tensor\n")


TWO_MODULES = """\
if P:
  P.layers[0].wq.weight: f32[4]
  P.norm.weight: f32[4]
if fwd:
  with bucket(layers[0].wq, norm):
    cat: f32[8] = aten.cat([P.layers[0].wq.weight, P.norm.weight])
  with norm:
    sin: f32[8] = aten.sin(bucket(layers[0].wq, norm).cat)
if out:
  yield fwd.norm.sin
"""


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ("layers.0.wq, norm", True),
        ("layers.*.wq, norm", True),
        ("", True),
        ("norm, layers.0.wq", False),
        ("layers.0.wq", False),
        ("norm", False),
        ("layers.0.wq, norm, norm", False),
        ("layers.0, norm", False),
        ("*, *", False),
    ],
)
def test_a_bucket_is_that_of_just_these_modules_in_this_order(asked, holds):
    """D1, D2: the check is of their order; a module inside a named one is another module."""
    gm = parse(TWO_MODULES)
    if holds:
        return assert_graph(gm, f"then cat in bucket({asked})")
    found = failure_of(gm, f"then cat in bucket({asked})")
    assert found.endswith(f"its bucket is layers.0.wq, norm, expected {asked}")


@pytest.mark.parametrize(
    "name", ["layers.0", "layers", "wq.weight", "layers.0.wq", "P.layers.0.wq"]
)
def test_a_part_of_a_name_is_no_input(name):
    """Else a check of an operand would hold of every parameter of a module."""
    assert_graph(
        parse(TWO_MODULES),
        "then cat([layers.0.wq.weight, P.norm.weight])\nstart\nthen cat([*.*.wq.*, _])",
    )
    with pytest.raises(CheckError, match=f"'{name}' is neither a captured node nor a graph input"):
        assert_graph(parse(TWO_MODULES), f"then cat([{name}, _])")


def test_symbolic_extents_are_not_compared():
    """Comparing a size that is known at run time only would add a guard."""
    text = (
        "if I:\n  I.x: f32[4]\nif fwd:\n  nonzero: i64[u0, 1] = aten.nonzero(I.x)\nif out:\n"
        "  yield fwd._.nonzero\n"
    )
    gm = parse(text)
    assert_graph(gm, "then nonzero -> i64[_, 1]")
    assert "its shape is [u0, 1], expected [4, 1]" in failure_of(gm, "then nonzero -> i64[4, 1]")


def test_a_bucket_and_a_mark_that_disagree_are_no_direction(gm):
    """D8: a node of a backward bucket carries the backward's mark."""
    (launch,) = [node for node in gm.graph.nodes if "reduce_scatter" in node.name]
    assert_graph(gm, "count 1 reduce_scatter_tensor in bwd")
    del launch.meta["autograd_backward"]
    for direction in ("fwd", "bwd"):
        text = failure_of(gm, f"then reduce_scatter_tensor in {direction}")
        assert text.endswith(
            f"its direction is bwd by its bucket and fwd by its mark, expected {direction}"
        )


WRITES = {
    "copy_": ["copy_ = aten.copy_(A.0, A.1)", "aten.mm(A.0, A.2)"],
    "add_": ["add_ = aten.add_.Tensor(A.0, A.1)", "aten.mm(A.0, A.2)"],
    "result": ["add_ = aten.add_.Tensor(A.0, A.1)", "aten.mm(add_, A.2)"],
    "view of the target": [
        "slice = aten.slice.Tensor(A.0, 0, 0, 2)",
        "copy_ = aten.copy_(slice, A.1)",
        "aten.mm(A.0, A.2)",
    ],
    "views of both": [
        "slice = aten.slice.Tensor(A.0, 0, 0, 2)",
        "slice_1 = aten.slice.Tensor(A.1, 0, 0, 2)",
        "copy_ = aten.copy_(slice, slice_1)",
        "aten.mm(A.0, A.2)",
    ],
    "view that is read": [
        "t = aten.t(A.0)",
        "copy_ = aten.copy_(A.0, A.1)",
        "aten.mm(t, A.2)",
    ],
    "two views": [
        "t = aten.t(A.0)",
        "t_1 = aten.t(A.0)",
        "copy_ = aten.copy_(t_1, A.1)",
        "aten.mm(A.2, t)",
    ],
    "over another": [
        "copy_ = aten.copy_(A.3, A.1)",
        "copy__1 = aten.copy_(A.0, A.3)",
        "aten.mm(A.0, A.2)",
    ],
    "before a step": [
        "copy_ = aten.copy_(A.0, A.1)",
        "sin = aten.sin(A.0)",
        "aten.mm(sin, A.2)",
    ],
}
NOT = {
    "behind the read": ["aten.mm(A.0, A.2)", "copy_ = aten.copy_(A.0, A.1)"],
    "into another": ["copy_ = aten.copy_(A.3, A.1)", "aten.mm(A.0, A.2)"],
    "behind a step": [
        "sin = aten.sin(A.0)",
        "copy_ = aten.copy_(A.0, A.1)",
        "aten.mm(sin, A.2)",
    ],
}


def written(lines):
    text = "if A:\n" + "".join(f"  A[{place}]: f32[4, 4]\n" for place in range(4)) + "if fwd:\n"
    for line in lines:
        name, _, call = line.rpartition(" = ")
        for place in range(4):
            call = call.replace(f"A.{place}", f"A[{place}]")
        text += f"  {name or 'mm'}: f32[4, 4] = {call}\n"
    return parse(text + "if out:\n  yield fwd._.mm\n")


@pytest.mark.parametrize("case", WRITES)
def test_what_is_written_into_an_operand_is_among_its_sources(case):
    gm = written(WRITES[case])
    assert_graph(gm, "then mm from A.1\nstart\nthen mm from A.2")
    failure_of(gm, "never mm from A.1")


@pytest.mark.parametrize("case", NOT)
def test_what_is_written_elsewhere_is_not(case):
    gm = written(NOT[case])
    assert_graph(gm, "never mm from A.1\nstart\nthen mm from A.0")


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("mm", "aten.mm", True),
        ("m*", "aten.mm", True),
        ("aten.mm", "aten.mm", True),
        ("aten.mm.*", "aten.mm", True),  # the overload "default" is left out
        ("aten.mm.def*", "aten.mm", True),
        ("aten.mm.default", "aten.mm", True),
        ("aten.mm.out", "aten.mm", False),
        ("aten.mm.*.*", "aten.mm", False),
        ("aten.add", "aten.add.Tensor", True),
        ("aten.add.default", "aten.add.Tensor", False),
        ("aten.add.Tensor.*", "aten.add.Tensor", True),
        ("aten.*", "aten.mm", True),
        ("prims.*", "aten.mm", False),
        ("module.leaf", "module.leaf.up", True),
        ("module.leaf.*", "module.leaf.up", True),
        ("module.leaf.*", "module.leaf", False),  # a module has no overloads
        ("module.leaf.default", "module.leaf", False),
    ],
)
def test_which_operators_a_pattern_names(pattern, path, fits):
    parts = path.split(".")
    assert _fits(pattern, parts, parts[1]) == fits
