"""--gt-bisect: a proof that fails for the result of a pipeline names the pass.

Without the flag the failure names the command that does.
"""

import re

import pytest
import torch

from pytest_gtrainer import AnotherFunction, apply_graph_passes, assert_same_function, facts
from pytest_gtrainer.bisect import PassWitness
from tests.numerics.test_bisect import HARMLESS, pipeline, traced_net

pytestmark = pytest.mark.second_tier

TEST = """
    import pytest
    from pytest_gtrainer import apply_graph_passes, assert_same_function
    from tests.numerics.test_bisect import traced_net
    from tests.numerics.test_bisect_of_proofs import twice

    def test_twice():
        traced = traced_net()
        after = apply_graph_passes(traced.gm, traced.example_inputs, twice(2))
        assert_same_function(after, traced.gm)

    def test_twice_on_the_other_side():
        traced = traced_net()
        after = apply_graph_passes(traced.gm, traced.example_inputs, twice(2))
        assert_same_function(traced.gm, traced.with_graph(after))

    def test_without_passes():
        assert_same_function(lambda x: x, lambda x: 2 * x, inputs=(__import__("torch").ones(2),))

    @pytest.mark.gt_world("ranks", size=2)
    def test_on_ranks(gt_world):
        traced = traced_net()
        after = apply_graph_passes(traced.gm, traced.example_inputs, twice(2))
        assert_same_function(after, traced.gm, world=gt_world)
"""


def double_pass(gm, example_inputs):
    """The planted fault: the first product is twice what it was."""
    mul = torch.ops.aten.mul.Tensor
    node = next(iter(gm.graph.find_nodes(op="call_function", target=mul)))
    with gm.graph.inserting_after(node):
        twice = gm.graph.call_function(mul, (node, 2))
    twice.meta = dict(node.meta)
    node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    return gm


def twice(at: int):
    return [*HARMLESS[:at], double_pass, *HARMLESS[at:]]


def failure_of(passes, at_least: str) -> str:
    traced = traced_net()
    with facts.watching(PassWitness().watchers()):
        after = apply_graph_passes(traced.gm, traced.example_inputs, passes)
        with pytest.raises(AnotherFunction) as failure:
            assert_same_function(after, traced.gm, at_least=at_least)
    return str(failure.value)


@pytest.mark.parametrize("at", range(6))
def test_the_pass_that_makes_another_function_is_named(at: int):
    text = failure_of(twice(at), "rounds elsewhere")
    named = rf"^bisection: introduced by pass {at + 1} of 6, double_pass \(\d proofs\)"
    assert re.search(named, text, re.MULTILINE)
    assert int(re.search(r"\((\d) proofs\)", text)[1]) <= 5
    assert text.count("another function: the results differ") == 2


def test_the_pass_that_makes_a_weaker_kind_is_named():
    text = failure_of(pipeline(3), "identical")
    assert "introduced by pass 4 of 6, reassociate_pass (" in text


def test_a_graph_that_was_another_function_before_the_passes_blames_none():
    traced, other = traced_net(), traced_net()
    with facts.watching(PassWitness().watchers()):
        after = apply_graph_passes(traced.gm, traced.example_inputs, HARMLESS)
        doubled = double_pass(other.gm, None)
        with pytest.raises(AnotherFunction) as failure:
            assert_same_function(after, doubled)
    assert "bisection: no pass of 5; the graph before the first one" in str(failure.value)


def test_a_failure_in_a_test_names_the_pass_or_the_command(pytester: pytest.Pytester):
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_inprocess("--gt-gpus=2")
    result.assert_outcomes(failed=4)
    hints = [line for line in result.outlines if line.startswith("which pass")]
    again = "which pass it was: pytest test_it.py::{} --gt-gpus=2 --gt-bisect"
    named = ("test_twice", "test_twice_on_the_other_side", "test_on_ranks")
    assert hints == [again.format(name) for name in named]
    assert "bisection" not in result.stdout.str()

    result = pytester.runpytest_inprocess("--gt-gpus=2", "--gt-bisect")
    result.assert_outcomes(failed=4)
    text = result.stdout.str()
    assert text.count("bisection: introduced by pass 3 of 6, double_pass") >= 3
    assert "which pass it was" not in text
