"""--gt-bisect of proofs: which side has the passes, what the other is, and what hides them."""

import copy

import pytest
import torch
from torch import fx, nn

from pytest_gtrainer import (
    AnotherFunction,
    apply_graph_passes,
    assert_same_function,
    facts,
    gt_compile,
)
from pytest_gtrainer.bisect import PassWitness

X = torch.ones(3, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


def keep_pass(gm, example_inputs):
    return gm


def planted(gm, target, number):
    """Return the graph, in which an operator more runs on what the activation returns."""
    for node in list(gm.graph.nodes):
        if "relu" in str(node.target):
            with gm.graph.inserting_after(node):
                made = gm.graph.call_function(target, (node, number))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(
                made, delete_user_cb=lambda user, made=made: user is not made
            )
    return gm


def triple_pass(gm, example_inputs):
    """The planted fault."""
    return planted(gm, torch.mul, 3)


def add_pass(gm, example_inputs):
    return planted(gm, torch.add, 1)


@pytest.fixture(scope="module")
def gm():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    graph.output((graph.call_function(torch.ops.aten.relu.default, (x,)),))
    return fx.GraphModule({}, graph)


def failure_of(make_sides, **options) -> str:
    """Return what is said of two sides that are made while passes are watched."""
    with facts.watching(PassWitness().watchers()):
        actual, expected = make_sides()
        with pytest.raises(AnotherFunction) as failure:
            assert_same_function(actual, expected, **options)
    text = str(failure.value)
    return "\n".join(text.splitlines()[1:])


def applied(gm, *passes):
    return apply_graph_passes(gm, None, list(passes))


def test_a_graph_of_dynamo_against_its_model():
    """The graph takes the state of the model as inputs, and ``inputs=`` are those of the model."""
    model = Net()
    with gt_compile() as record:
        torch.compile(model)(X)
    gm = record.dynamo
    text = failure_of(lambda: (applied(gm, keep_pass, triple_pass), model), inputs=(X,))
    assert "bisection: introduced by pass 2 of 2, triple_pass" in text
    assert "(3 proofs); the graph after it against the one before it:\nanother function" in text
    text = failure_of(lambda: (model, applied(gm, keep_pass, triple_pass)), inputs=(X,))
    assert "bisection: introduced by pass 2 of 2, triple_pass" in text


@pytest.mark.parametrize("is_actual", [True, False])
def test_both_sides_are_from_passes(gm, is_actual):
    """The one without a mistake is no longer all that is looked at."""

    def sides():
        right = applied(gm, keep_pass)
        wrong = applied(gm, keep_pass, triple_pass, keep_pass)
        return (wrong, right) if is_actual else (right, wrong)

    lines = failure_of(sides).splitlines()
    found = [line.partition(" (")[0] for line in lines if line.startswith("bisection")]
    wrong = "actual" if is_actual else "expected"
    named = f"bisection of {wrong}: introduced by pass 2 of 3, triple_pass"
    right = "bisection of actual: no pass of 1; the graph before the first one is "
    assert found[-1] == named
    assert [line[: len(right)] for line in found[:-1]] == ([] if is_actual else [right])


def test_passes_are_proven_against_what_earlier_ones_returned(gm):
    """Those change the function on purpose: only the passes in between count."""

    def sides():
        before = applied(gm, add_pass, keep_pass)
        return applied(before, keep_pass, triple_pass), before

    assert "bisection of actual: introduced by pass 2 of 2, triple_pass" in failure_of(sides)


def test_a_copy_of_a_result_says_what_to_give(gm):
    text = failure_of(lambda: (copy.deepcopy(applied(gm, triple_pass)), gm))
    assert text.splitlines()[-1] == (
        "bisection: this test has not seen its passes run, or it is a copy: give what "
        "apply_graph_passes returned, itself"
    )


def test_a_graph_without_passes_has_no_hint(gm):
    """An empty list of passes has none that could be at fault."""
    seen = []

    def sides():
        return triple_pass(applied(gm), None), gm

    with facts.watching({"unproven": lambda **objects: seen.append(objects)}):
        assert "bisection" not in failure_of(sides)
    assert not seen
