"""A failure names the check, where the search stood, and the nearest node with what it
differs in.
"""

import pytest

from pytest_gtrainer import assert_graph
from pytest_gtrainer.checks import CheckFailure
from pytest_gtrainer.checks.predicates import _modules_text

FILE = "tests/checks/test_failures_in_words.py"


def failure_of(gm, checks):
    with pytest.raises(CheckFailure) as failure:
        assert_graph(gm, checks, mesh={"fsdp": 2})
    lines = str(failure.value).splitlines()
    assert lines[0].startswith(f"{FILE}, line "), "the check comes first, with its place"
    return [lines[0].removeprefix(f"{FILE}, "), *lines[1:]]


def test_where_the_search_stood_and_the_nearest(gm):
    assert failure_of(
        gm, "then all_gather_into_tensor as g\nthen wait_tensor(g) in bwd -> f32[16, _]"
    ) == [
        "line 2 of the checks: then wait_tensor(g) in bwd -> f32[16, _]",
        "no node matches after the last match, which is",
        "     1  fwd.layers[0] | bucket(L) | "
        "all_gather_into_tensor: f32[16, 8] = _c10d_functional.all_gather_into_tensor(cat, 2, "
        "fsdp)",
        "the nearest is",
        "     2  fwd.layers[0] | bucket(L) | "
        "wait_tensor: f32[16, 8] = _c10d_functional.wait_tensor(all_gather_into_tensor)",
        "        its direction is fwd, expected bwd",
        "g is",
        "     1  fwd.layers[0] | bucket(L) | "
        "all_gather_into_tensor: f32[16, 8] = _c10d_functional.all_gather_into_tensor(cat, 2, "
        "fsdp)",
    ]


def test_a_match_that_stands_too_early_is_told(gm):
    assert failure_of(gm, "then sum\nthen split")[3:] == [
        "a node that matches is before that",
        "     3  fwd.layers[0] | bucket(L) | split: (f32[8, 8], f32[8, 8]) = "
        "aten.split.Tensor(wait_tensor, 8)",
    ]


def test_the_nearest_differs_least_and_of_equals_stands_behind(gm):
    """Three mm: two of them differ in more; then two that differ in as much."""
    assert failure_of(gm, "then mm in bwd layers.0.wo -> [1, 8]")[3].startswith(
        "     9  bwd.layers[0] | L.wo | mm:"
    )
    assert failure_of(gm, "then t\nthen mm -> f32[1]")[4].startswith(
        "     6  fwd.layers[0] | L.wo | mm:"
    )


def test_an_operator_that_the_graph_does_not_have(gm):
    assert failure_of(gm, "then aten.relu")[1:] == [
        "no node matches; the search began at the graph's first node",
        "no node of the graph has that operator",
    ]


def test_the_next_node_and_where_a_match_stands(gm):
    assert failure_of(gm, "then cat\nnext split")[1:] == [
        "the next node does not match",
        "     1  fwd.layers[0] | bucket(L) | "
        "all_gather_into_tensor: f32[16, 8] = _c10d_functional.all_gather_into_tensor(cat, 2, "
        "fsdp)",
        "        its operator is _c10d_functional.all_gather_into_tensor, expected split",
        "a node that matches is at",
        "     3  fwd.layers[0] | bucket(L) | split: (f32[8, 8], f32[8, 8]) = "
        "aten.split.Tensor(wait_tensor, 8)",
    ]
    assert failure_of(gm, "then output\nnext split")[1:] == ["nothing follows the graph's output"]
    before = failure_of(gm, "then sum\nnext cat")
    assert before[-2] == "a node that matches is at", "before the match"
    assert before[-1].startswith("     0  fwd.layers[0] | bucket(L) | cat: ")
    first = failure_of(gm, "then cat\nnext mm")
    assert first[-1].startswith("     4  fwd.layers[0] | L.wq | mm: "), "the first of three"
    assert "a node that matches is at" not in failure_of(gm, "then cat\nnext relu")


def test_what_was_forbidden_and_between_what(gm):
    text = failure_of(gm, "then mm\nnever t\nthen sum")
    assert text[0] == "line 2 of the checks: never t"
    assert text[1] == "it matches between the match at 4 and the match at 8"
    assert (
        text[2] == "     5  fwd.layers[0] | L.wo | t: f32[8, 8][1, 8] = aten.t(bucket(L).split[1])"
    )
    assert failure_of(gm, "never sum")[1] == "it matches between the start and the end"


def test_what_was_counted_and_what_almost_counts(gm):
    assert failure_of(gm, "count 2 mm -> f32[8, 8]")[1:] == [
        "the graph has 1",
        "     9  bwd.layers[0] | L.wo | mm: f32[8, 8] = aten.mm(saved.L.wo.t, saved.L.wo.t)",
        "the nearest is",
        "     4  fwd.layers[0] | L.wq | mm: f32[3, 8] = aten.mm(I.x, bucket(L).split[0])",
        "        its shape is [3, 8], expected [8, 8]",
    ]
    assert failure_of(gm, "count 1 *")[-1] == "and 4 more"


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("cat in head", "it belongs to the bucket layers.0, expected the module head"),
        ("mm in head", "its module is layers.0.wq, expected head"),
        (
            "mm in bucket(layers.0)",
            "it belongs to no bucket but to layers.0.wq, expected the bucket layers.0",
        ),
        ("cat in bucket(layers.0, head)", "its bucket is layers.0, expected layers.0, head"),
        ("sum -> f32", "its dtype is bf16, expected f32"),
        ("split -> f32", "its value is of type tuple, expected one tensor"),
        ("t -> [8, 8][8, 1]", "its strides are [1, 8], expected [8, 1]"),
        ("t used only by sum", "it is used by mm at 6, mm at 9, expected only sum"),
        (
            "mm(layers.0.wq.weight, _)",
            "its arguments: number 1: it is I.x, expected layers.0.wq.weight",
        ),
        ("mm(_, t(I.x))", "its arguments: number 2: it is split[0] at 3, expected t(I.x)"),
        ("t(mm(...))", "its arguments: number 1: it is split[1] at 3, expected mm(...)"),
        ("_to_copy(_, dtype=f32)", "its arguments: dtype: it is bf16, expected f32"),
        ("_to_copy(_)", "its arguments: it has dtype= too (`...` at the end would leave it open)"),
        (
            "_to_copy(_, device=_, ...)",
            "its arguments: it has no argument device=, expected device=_",
        ),
        ("cat([_])", "its arguments: number 1: there are 2, expected 1: (_)"),
        ("cat(I.x)", "it is [P.layers.0.wq.weight, P.layers.0.wo.weight], expected I.x"),
        ("output([_], _)", "its arguments: number 1: it is sum at 8, expected the list [_]"),
        (
            "all_gather_into_tensor(..., [0, 2])",
            "number 3: it is fsdp = group(range(0, 2)), expected the ranks [0, 2]",
        ),
    ],
)
def test_every_difference_is_told(gm, check, words):
    assert failure_of(gm, f"then {check}")[-1].endswith(words)


def test_a_never_is_named_by_its_own_line(gm):
    """A waiting check is judged at the end, and the message names the `never`."""
    text = failure_of(gm, "then mm\nnever sum\n\n")
    assert text[0] == "line 2 of the checks: never sum"
    assert text[1] == "it matches between the match at 4 and the end"


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ((), "none"),
        (("",), "the root"),
        (("norm",), "norm"),
        (("norm", ""), "norm, the root"),
        (("layers.0", "layers.1"), "layers.0, layers.1"),
    ],
)
def test_modules_in_words(modules, text):
    assert _modules_text(modules) == text
