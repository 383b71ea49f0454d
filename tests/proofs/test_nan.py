"""Results that are NaN: all NaN are equal, so what computes them is not judged, which is said."""

import pytest
import torch
from torch import nn

from pytest_gtrainer import assert_same_function, facts, prove

F = nn.functional
X = torch.randn(4, 6)
IGNORED = torch.full((4,), -100)
NAN, INF = torch.nan, torch.inf


def trained(loss_of, factor):
    """Return a step of a loss of logits, which are multiplied by a factor."""

    def train(model, x, labels):
        loss = loss_of(factor * model(x), labels)
        loss.backward()
        return loss

    return train


def masked_mean(logits, labels):
    kept = labels != -100
    return (F.cross_entropy(logits, labels, reduction="none") * kept).sum() / kept.sum()


@pytest.mark.parametrize("loss_of", [F.cross_entropy, masked_mean])
def test_a_loss_of_ignored_labels_proves_nothing(loss_of):
    """The loss is 0 / 0, and each gradient is 0 or NaN, whatever the model is."""
    inputs = nn.Linear(6, 5), X, IGNORED
    proof = prove(trained(loss_of, 3.0), trained(loss_of, 1.0), inputs=inputs)
    assert proof.kind == "unknown", str(proof)
    assert "NaN" in proof.reason
    one_is_read = nn.Linear(6, 5), X, torch.tensor([-100, 2, -100, -100])
    proof = prove(trained(loss_of, 3.0), trained(loss_of, 1.0), inputs=one_is_read)
    assert proof.kind == "another function"
    proof = prove(trained(loss_of, 1.0), trained(loss_of, 1.0), inputs=one_is_read)
    assert proof.kind == "identical"


@pytest.mark.parametrize("loss_of", [F.cross_entropy, masked_mean])
def test_a_loss_of_ignored_labels_alone_proves_nothing(loss_of):
    """Without a backward, too, and whatever the kernels are."""
    for change in (lambda x: 3 * x, lambda x: x + x, torch.sin):
        made = lambda x, labels, change=change: loss_of(change(x), labels)  # noqa: E731
        proof = prove(made, loss_of, inputs=(X, IGNORED))
        assert proof.kind == "unknown", str(proof)
        assert "NaN" in proof.reason
    for beside in (lambda loss, x: loss + x.sum(), lambda loss, x: (loss, loss * x)):
        made, plain = (
            lambda x, labels, k=k, beside=beside: beside(loss_of(k * x, labels), x) for k in (3, 1)
        )
        assert prove(made, plain, inputs=(X, IGNORED)).kind == "unknown"


@pytest.mark.parametrize("loss_of", [F.cross_entropy, masked_mean])
def test_a_loss_of_ignored_labels_is_counted_beside_numbers(loss_of):
    made, plain = (
        lambda x, labels, k=k: (loss_of(k * x, labels), x.exp() * x.sum()) for k in (3, 1)
    )
    proof = prove(made, plain, inputs=(X, IGNORED))
    assert proof.is_at_least("rounds elsewhere"), str(proof)
    assert "elements that are NaN are equal, whatever computes them: 1 of output 0" in proof.assumes


NOTHING_BUT_NAN = {
    "a factor": (lambda x: 3 * x * NAN, lambda x: x.sin() * NAN),
    "a difference of infinities": (lambda x: 3 * x + INF - INF, lambda x: x + INF - INF),
    "rows that are hidden": (
        lambda x: (x - INF).softmax(-1) @ (2 * x).T,
        lambda x: (x - INF).softmax(-1) @ x.T,
    ),
    "two results": (lambda x: (x * NAN, 2 * x * NAN), lambda x: (x * NAN, x * NAN)),
}


@pytest.mark.parametrize("name", NOTHING_BUT_NAN)
def test_results_that_are_all_nan_prove_nothing(name):
    actual, expected = NOTHING_BUT_NAN[name]
    for one, other in ((actual, expected), (expected, actual)):
        proof = prove(one, other, inputs=(X,))
        assert proof.kind == "unknown", str(proof)
        assert "NaN" in proof.reason


PARTLY_NAN = {
    "a row": (lambda x: torch.stack([x[0] * 3 * NAN, x[1]]), 6),
    "the second result": (lambda x: (x[1], x[0] * 3 * NAN), 6),
    "an element": (lambda x: torch.cat([x[1], (x[0] * 3 * NAN)[:1]]), 1),
}


@pytest.mark.parametrize("name", PARTLY_NAN)
def test_elements_that_are_nan_beside_others_are_counted(name):
    actual, count = PARTLY_NAN[name]
    code = "1" if name == "the second result" else "0"

    def expected(x):
        return actual(torch.cat([x[:1].sin(), x[1:]]))

    with facts.collecting() as seen:
        proof = assert_same_function(actual, expected, inputs=(X,))
    said = f"elements that are NaN are equal, whatever computes them: {count} of output {code}"
    assert said in proof.assumes
    assert said in [fact["what"] for fact in seen if fact["kind"] == "assumed"]
    other = prove(actual, lambda x: expected(torch.cat([x[:1], 2 * x[1:]])), inputs=(X,))
    assert other.kind == "another function"


@pytest.mark.parametrize(
    "given", [torch.full((2, 6), 3e4, dtype=torch.float16), torch.full((2, 6), NAN)], ids=str
)
def test_numbers_that_are_nan_by_chance_stand_for_any(given):
    """As what overflows, or memory that nobody has written yet."""
    square = lambda x: (x * x - x * x * 3).sum()  # noqa: E731
    assert prove(square, square, inputs=(given,)).kind == "identical"
    proof = prove(lambda x: x + x, lambda x: 2 * x, inputs=(given,))
    assert proof.is_at_least("rounds elsewhere"), str(proof)
    assert "NaN" not in str(proof)
    assert prove(lambda x: x + x, lambda x: 3 * x, inputs=(given,)).kind == "another function"


def test_numbers_alone_assume_nothing_of_nan():
    proof = prove(lambda x: x + x, lambda x: 2 * x, inputs=(X,))
    assert proof.is_at_least("rounds elsewhere")
    assert "NaN" not in str(proof)
    infinite = prove(lambda x: torch.log(x - x), lambda x: torch.log(x - x), inputs=(X,))
    assert infinite.kind == "identical"  # -inf for any numbers, and not whatever computes it
