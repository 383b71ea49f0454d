"""The same checks as methods of ``check_graph``, with conditions that Python can compute."""

import pytest
import torch

from pytest_gtrainer import check_graph
from pytest_gtrainer.checks import CheckError, CheckFailure

FILE = "tests/checks/test_checks_as_methods.py"


def failure_of(gm, run, error=CheckFailure):
    with pytest.raises(error) as failure, check_graph(gm) as check:
        run(check)
    return str(failure.value)


def test_checks_are_chained_and_captures_stay(gm):
    with check_graph(gm) as check:
        check.then("all_gather_into_tensor", bucket=["layers.0"], direction="fwd", name="g").next(
            "wait_tensor(g)"
        )
        check.never("reduce_scatter_tensor", direction="fwd").then(
            "mm", module="layers.0.wo", dtype=torch.float32
        )
        check.same(shape=[None, 8], users="_to_copy").count("all_gather_into_tensor", 1)
        check.start().then("_to_copy", where=lambda node: node.kwargs["dtype"] is torch.bfloat16)


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ({"bucket": "head"}, "its bucket is layers.0, expected head"),
        ({"direction": "bwd"}, "its direction is fwd, expected bwd"),
        ({"dtype": torch.bfloat16}, "its dtype is f32, expected bf16"),
        ({"shape": [..., 7]}, "its shape is [8, 8], expected [..., 7]"),
        ({"shape": ()}, "its shape is [8, 8], expected [()]"),
        ({"users": "mm"}, "it is used by all_gather_into_tensor at 1, expected mm"),
        ({"module": "head"}, "it belongs to the bucket layers.0, expected the module head"),
        ({"where": lambda node: False}, "<lambda> does not hold of it"),
    ],
)
def test_every_condition_can_fail(gm, conditions, words):
    assert words in failure_of(gm, lambda check: check.then("cat", **conditions))


def test_a_failure_names_the_line_of_the_check(gm):
    def run(check):
        check.then("mm", module="head")

    line = run.__code__.co_firstlineno + 1
    assert failure_of(gm, run).startswith(f"{FILE}:{line}: then mm, module='head'\n")


def test_the_end_of_the_block_judges_what_waits(gm):
    """The message names the `never`, not the end of the block."""

    def run(check):
        check.then("mm")
        check.never("sum")

    text = failure_of(gm, run)
    assert text.startswith(f"{FILE}:{run.__code__.co_firstlineno + 2}: never sum\n")
    assert "between the match at 4 and the end" in text


def test_a_block_without_checks_and_a_check_without_a_block(gm):
    assert "there is no check" in failure_of(gm, lambda check: None, CheckError)
    with pytest.raises(CheckError, match="checks stand in a block"):
        check_graph(gm).never("mm")


def test_another_error_in_the_block_is_not_hidden(gm):
    """Also not by what waits for the end."""
    text = failure_of(gm, lambda check: check.never("sum") and 1 / 0, ZeroDivisionError)
    assert text == "division by zero"


@pytest.mark.parametrize(
    ("node", "conditions", "words"),
    [
        ("mm", {"fqn": "head"}, "there is no condition 'fqn'; there are module, bucket,"),
        ("mm as a", {"name": "b"}, "a node gets one name, not a and b"),
        ("mm", {"direction": "backward"}, "a direction is fwd or bwd, not 'backward'"),
        ("mm", {"where": True}, "where= takes a function of a node, not True"),
        ("", {}, "this `then` says nothing of the node"),
    ],
)
def test_conditions_that_make_no_sense(gm, node, conditions, words):
    text = failure_of(gm, lambda check: check.then(node, **conditions), CheckError)
    assert text.startswith(f"{FILE}:")
    assert words in text
