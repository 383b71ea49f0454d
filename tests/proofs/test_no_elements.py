"""Tensors without elements: what a program makes of them is compared with nothing, which is said.

The sum of no elements is 0, and twice that is 0, too.
"""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import assert_same_function, assert_same_model, facts, prove

NONE, ROWS, X = torch.empty(0), torch.empty(3, 0), torch.randn(3)

NOTHING_DECIDES = {
    "twice a sum": (lambda x: 2 * x.sum(), lambda x: x.sum(), [NONE]),
    "a product and a sum": (lambda x: x.prod(), lambda x: 5 * x.sum() + 1, [NONE]),
    "rows without columns": (lambda x: 2 * x.sum(1), lambda x: x.sum(1), [ROWS]),
    "columns without rows": (lambda x: 2 * x.sum(0), lambda x: x.sum(0), [ROWS.T]),
    "means": (lambda x: -x.mean(1), lambda x: x.mean(1), [ROWS]),
    "a matrix product": (lambda x: 2 * (x @ x.T), lambda x: x @ x.T, [ROWS]),
    "no rows are chosen": (
        lambda x, i: 2 * x[i].sum(),
        lambda x, i: x[i].sum(),
        [X, torch.empty(0, dtype=torch.int64)],
    ),
    "a slice": (lambda x: 2 * x[3:].sum(), lambda x: x[3:].sum(), [X]),
    "a sum in place": (
        lambda x: torch.zeros(3).index_add_(0, torch.arange(0), 2 * x),
        lambda x: torch.zeros(3).index_add_(0, torch.arange(0), x),
        [NONE],
    ),
    "no result has elements": (lambda x: 2 * x, lambda x: x, [NONE]),
}


@pytest.mark.parametrize("case", NOTHING_DECIDES)
@pytest.mark.parametrize("made", ["function", "graph"])
def test_equal_results_of_no_elements_prove_nothing(case, made):
    actual, expected, inputs = NOTHING_DECIDES[case]
    if made == "graph":
        actual, expected = make_fx(actual)(*inputs), make_fx(expected)(*inputs)
    proof = prove(actual, expected, inputs=inputs)
    assert proof.kind == "unknown", str(proof)
    assert "elements" in proof.reason


NOT_COMPARED = {
    "one of two inputs and results": (
        lambda x, y: (2 * x, y + 1),
        lambda x, y: (x, y + 1),
        [NONE, X],
        ["input 0, output 0 have no elements", "aten.mul.Tensor got tensors without elements"],
    ),
    "an input that is joined": (
        lambda x, y: torch.cat([2 * x, y]),
        lambda x, y: torch.cat([x, y]),
        [NONE, X],
        ["input 0 has no elements"],
    ),
    "one of two terms": (
        lambda x: x.sum() + 2 * x[3:].sum(),
        lambda x: x.sum() + x[3:].sum(),
        [X],
        ["aten.sum.default got tensors without elements"],
    ),
    "a part that is joined": (
        lambda x: torch.cat([x, 2 * x[3:]]),
        lambda x: torch.cat([x, x[3:]]),
        [X],
        ["aten.mul.Tensor got tensors without elements"],
    ),
}


@pytest.mark.parametrize("case", NOT_COMPARED)
def test_a_proof_names_what_has_no_elements(case):
    actual, expected, inputs, says = NOT_COMPARED[case]
    with facts.collecting() as seen:
        proof = assert_same_function(actual, expected, inputs=inputs)
    assumed = [fact["what"] for fact in seen if fact["kind"] == "assumed"]
    assert list(proof.unchecked) == assumed
    assert {type(each) for each in assumed} == {str}
    for words in says:
        assert any(words in each for each in assumed), str(proof)


def test_programs_whose_elements_cancel_are_proven():
    """``x - x`` is 0 for any numbers, as no element decides either, and nothing is empty."""
    proof = prove(lambda x: 2 * (x - x), lambda x: x - x, inputs=[X])
    assert (proof.kind, proof.assumes) == ("reordered", ())


def test_a_graph_that_only_moves_no_elements_assumes_nothing():
    """Rotary frequencies leave a part of a head as it is, which may have no columns."""

    def run(x):
        return torch.cat([2 * x[:, :3], x[:, 3:]], 1)

    proof = prove(run, run, inputs=[torch.randn(2, 3)])
    assert (proof.kind, proof.assumes) == ("identical", ())


class _OfNoRows(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.randn(3, 3)), factor

    def forward(self, x):
        return (x @ self.weight).sum() + self.factor * (x[2:] @ self.weight).sum()


def test_a_model_that_computes_with_no_rows_is_named():
    proof = assert_same_model(
        lambda: _OfNoRows(1),
        lambda: _OfNoRows(2),
        lambda model, x: model(x),
        lambda coordinate: (torch.randn(2, 3),),
    )
    assert any("aten.mm.default" in each for each in proof.unchecked), str(proof)
