"""A check that cannot match, cannot fail or cannot be read is an error, not a pass and not a failure."""

import pytest

from pytest_gtrainer import assert_graph
from pytest_gtrainer.checks import CheckError


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
        ("never all_gater_into_tensor", "no operator is called 'all_gater_into_tensor', did you mean `all_gather_"),
        ("count 0 aten.mmm", "no operator is called 'aten.mmm', did you mean `mm`?"),
        ("never aten.mm.out2", "no operator is called 'aten.mm.out2'"),
        ("never mm(relo(_), _)", "no operator is called 'relo', did you mean `relu"),
        ("never mm used by relo", "no operator is called 'relo'"),
        ("never mm in layers.1", "nothing in the graph lies in 'layers.1', did you mean `layers.0`?"),
        ("never cat in bucket(layers.1)", "nothing in the graph lies in 'layers.1'"),
        ("never mm(m, _)", "'m' is neither a captured node nor a graph input (captures and groups are fsdp): of any "),
        ("never mm(relu, _)", "of any operator relu write `relu(_)`, or capture one with `as relu`"),
        ("never mm from layers.0.wk.weight", "'layers.0.wk.weight' is neither"),
        ("then mm\nnever t\nnext t", "between a match and its next node there is nothing"),
        ("then output\nnever mm", "nothing follows the graph's output, so this `never` cannot fail"),
        ("then output\nnever mm\nstart\nthen mm", "nothing follows the graph's output, so this `never` cannot fail"),
        ("then mm\nstart", "nothing is checked after this `start`"),
        ("same mm", "`same` speaks of the last match, and there is none yet"),
        ("then mm\nstart\nsame mm", "`same` speaks of the last match, and there is none yet"),
        ("never mm as m", "`never` finds no one node that could be called 'm'"),
        ("count 3 mm as m", "`count` finds no one node that could be called 'm'"),
    ],
)
def test_what_cannot_match_or_cannot_fail(gm, checks, words):
    assert words in error_of(gm, checks)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("tehn mm", "a check begins with then, next, same, never, count, start, not 'tehn', did you mean `then`?"),
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
        ("then mm; never t", "';' at column 8 is not part of a check"),
        ("then layers[0].wq", "'.' at column"),
    ],
)
def test_what_cannot_be_read(gm, check, words):
    message = error_of(gm, f"then cat\n{check}")
    assert message.startswith(f"tests/checks/test_checks_that_check_nothing.py, line 2 of the checks: {check}")
    assert words in message


@pytest.mark.parametrize(
    "operator",
    ["relu", "aten.relu", "aten.relu.default", "aten.add.Tensor", "hop.cond", "operator.floordiv", "method.view",
     "torch.nn.functional.relu", "_c10d_functional.all_*", "reduce_scatter_tensor"],
)  # fmt: skip
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
