"""Infinities, NaN, absolute values, choices and roots of abstract elements."""

import importlib.util
import sys

import pytest
import torch

from pytest_gtrainer import prove
from pytest_gtrainer.arithmetic import hashing
from pytest_gtrainer.arithmetic.field import Field, FieldWithExponents
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.arithmetic.prime import P, Prime
from pytest_gtrainer.proofs.prove import AGAIN, Chances, runs_again

F = torch.nn.functional
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(4, 6, dtype=torch.bool).triu(1)
INF = float("inf")


def kind(actual, expected, *inputs):
    return prove(actual, expected, inputs=inputs or (X,)).kind


def masked(x, value=-INF):
    return x.masked_fill(MASK, value)


SCALED = {
    "times": lambda x, c: masked(x) * c,
    "times on the left": lambda x, c: c * masked(x),
    "times a tensor": lambda x, c: masked(x) * torch.full((6,), c),
    "divided": lambda x, c: masked(x) / c,
    "negative": lambda x, c: masked(x, INF) * -c,
}


@pytest.mark.parametrize("name", SCALED)
def test_a_mask_that_is_scaled_by_a_known_number_stays_a_mask(name):
    """Two scales differ, and a softmax of it is a softmax of numbers."""
    scaled = SCALED[name]
    assert kind(lambda x: scaled(x, 0.5), lambda x: scaled(x, 0.5)) == "identical"
    assert kind(lambda x: scaled(x, 0.5), lambda x: scaled(x, -0.5)) == "another function"
    assert kind(lambda x: scaled(x, 0.5), lambda x: scaled(x, 0.25)) == "another function"
    probabilities = [lambda x, c=c: F.softmax(scaled(x, c), -1) for c in (0.5, 0.25)]
    assert kind(*probabilities) == "another function"


def test_a_mask_that_is_scaled_by_an_unknown_number_proves_nothing():
    """Whether -inf times w is an infinity, and which, depends on w."""
    proof = prove(
        lambda x, w: masked(x) * (w + x), lambda x, w: masked(x) * (x + 2 * w - w), inputs=(X, X)
    )
    assert proof.kind == "unknown"
    assert "NaN in exact arithmetic alone" in proof.reason


def test_state_that_becomes_nan_proves_nothing():
    def write(factor):
        def step(x, w, out):
            out.copy_(factor * F.softmax(masked(x) * w, -1))

        return step

    proof = prove(write(1), write(3), inputs=(X, X.abs(), X))
    assert proof.kind == "unknown"
    assert "NaN in exact arithmetic alone" in proof.reason


ADDED = {
    "index_put": lambda x, y: x.index_put((torch.tensor([0, 0]),), y[:2], accumulate=True),
    "index_add": lambda x, y: x.index_add(0, torch.tensor([0, 0]), y[:2]),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(2, 6, dtype=torch.long), y[:2]),
    "cumsum": lambda x, y: (x + y).cumsum(0),
    "embedding's gradient": lambda x, y: torch.ops.aten.embedding_dense_backward(
        x + y, torch.zeros(4, dtype=torch.long), 3, -1, False
    ),
}


@pytest.mark.parametrize("value", [-INF, INF, float("nan")])
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_an_infinity_is_none_of_the_numbers(name, value):
    """An infinity is an element behind the numbers, and must not be added as one of them."""
    adds = ADDED[name]
    special = torch.where(MASK, value, 0.0)
    plain = torch.where(MASK, {-INF: 0.0, INF: 1.0}.get(value, 2.0), 0.0)
    assert kind(lambda x: adds(x, special), lambda x: adds(x, plain)) == "another function"
    assert kind(lambda x: adds(x, special), lambda x: adds(x * 1, special)) == "identical"
    reordered = kind(lambda x: adds(x + x.cos(), special), lambda x: adds(x.cos() + x, special))
    assert reordered == "identical"  # an addition commutes


QUESTIONS = ("isfinite", "isinf", "isneginf", "isposinf", "isnan")


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("value", [-INF, INF, float("nan"), 1.0])
def test_what_is_not_finite_says_so(question, value):
    asks = getattr(torch, question)
    answer = bool(asks(torch.tensor(value)))
    others = bool(asks(torch.tensor(1.0)))
    expected = torch.where(MASK, answer, others)
    proof = prove(
        lambda x: torch.where(asks(masked(x, value)), x, 2 * x),
        lambda x: torch.where(expected, x, 2 * x),
        inputs=(X,),
    )
    assert proof.is_at_least("reordered"), str(proof)


@pytest.mark.parametrize("count", [1, 2, 24])
def test_absolute_values(count):
    x = X.flatten()[:count]
    assert kind(torch.abs, lambda x: (-x).abs(), x) in ("reordered", "other kernels")
    assert kind(torch.abs, lambda x: torch.maximum(x, -x), x) == "reordered"
    assert kind(torch.abs, lambda x: x * 1, x) == "another function"
    assert kind(torch.abs, lambda x: -x, x) == "another function"
    assert kind(lambda x: x.clone().amax(), lambda x: -(-x).amin(), x) == "reordered"


CHOICES = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "maximum": lambda x: torch.maximum(x[:, 0], x[:, -1]),
    "minimum": lambda x: torch.minimum(x[:, -1], x[:, 0]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_chooses_among_numbers_and_a_nan_is_nan(name):
    """Not the largest or the smallest of the others."""
    chooses = CHOICES[name]
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[:2, -1] = True

    def with_nan(x):
        return chooses(x.masked_fill(mask, float("nan")))

    def without(x):
        return torch.where(mask[:, -1], float("nan"), chooses(x))

    proof = prove(with_nan, without, inputs=(X,))
    assert proof.is_at_least("reordered"), str(proof)
    assert kind(with_nan, chooses) == "another function"


def test_the_order_of_negatives_is_turned_round():
    prime = Prime(P)
    elements = torch.randint(0, P, (1000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(prime.order_key(prime.negative(elements)), -prime.order_key(elements))


def test_what_chooses_does_not_round_again():
    x = X.bfloat16()
    two = kind(lambda x: x.amax(), lambda x: torch.maximum(x[:2].amax(), x[2:].amax()), x)
    assert two == "reordered"
    assert kind(lambda x: x.abs(), lambda x: x.abs().abs(), x) != "another function"
    assert kind(lambda x: x.amax(), lambda x: x[:1, :1].amax(), x) == "another function"


def test_a_product_of_few_numbers_decides_nothing():
    """Else the real numbers would not be compared."""

    def hidden(x):
        with torch.no_grad():
            x.detach().numpy()[:] *= 2  # no dispatch mode sees it
        return x.prod()

    assert kind(hidden, torch.prod) == "unknown"


def test_a_fold_does_not_depend_on_what_was_folded_before():
    spec = importlib.util.spec_from_file_location("fresh_hashing", hashing.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert spec.name not in sys.modules
    one = torch.tensor([5])
    before = fresh.fold(one, [0])
    fresh.fold(torch.arange(100), [0])
    assert torch.equal(fresh.fold(one, [0]), before)
    assert torch.equal(hashing.fold(one, [0]), before)


@pytest.mark.parametrize("size", [8, 600])
def test_a_convolution_that_adds_more_products_than_float64_can_is_unknown(size):
    """The gradient of a weight adds one product for each pixel."""
    x, weight = torch.ones(1, 1, size, size), torch.ones(1, 1, 1, 1)

    def gradient(x, weight, factor=1):
        _, found, _ = torch.ops.aten.convolution_backward(
            factor * x,
            x,
            weight,
            [0],
            [1, 1],
            [0, 0],
            [1, 1],
            False,
            [0, 0],
            1,
            [False, True, False],
        )
        return found / factor

    proof = prove(gradient, lambda x, weight: gradient(x, weight, 2), inputs=(x, weight))
    if size == 8:
        assert proof.kind == "reordered"
    else:
        assert proof.kind == "unknown"
        assert "a convolution that adds 360000 products" in proof.reason


ROOTS = {
    "a product": (lambda x, y: (x * y).sqrt(), lambda x, y: x.sqrt() * y.sqrt()),
    "a quotient": (lambda x, y: (x / y).sqrt(), lambda x, y: x.sqrt() / y.sqrt()),
    "a quotient by a number": (lambda x, y: (x / 2).sqrt(), lambda x, y: x.sqrt() / 2**0.5),
    "an inverse": (lambda x, y: x.rsqrt(), lambda x, y: (1 / x).sqrt()),
}


@pytest.mark.parametrize("name", ROOTS)
def test_the_root_of_a_product_is_the_product_of_the_roots(name):
    """As optimisers divide the root, or what is below it."""
    inputs = X.abs() + 1, X.flip(0).abs() + 1
    proof = prove(*ROOTS[name], inputs=inputs)
    assert proof.is_at_least("rounds elsewhere"), str(proof)
    assert (
        kind(lambda x, y: (x * y).sqrt(), lambda x, y: x.sqrt() * y, *inputs) == "another function"
    )
    assert kind(lambda x, y: (x + y).sqrt(), lambda x, y: x.sqrt() + y.sqrt(), *inputs) == (
        "another function"
    )
    assert kind(lambda x, y: x.sqrt(), lambda x, y: (-x).sqrt(), *inputs) == "another function"


LEFT_TO_CHANCE = {
    "softmax": (lambda x: x.softmax(-1), Chances()),
    "log_softmax": (lambda x: x.log_softmax(-1), Chances()),
    "logsumexp": (lambda x: x.logsumexp(-1), Chances()),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), Chances()),
    "amax": (lambda x: x.flatten()[:6].amax(), Chances(decides=True, decides_few=True)),
    "sort": (lambda x: x.sort(-1).values, Chances(decides=True)),
    "roots of many": (lambda x: x.sqrt(), Chances()),
    "roots of few": (lambda x: x.flatten()[:3].expand(8, 3).sqrt(), Chances(fewest_roots=3)),
    "roots of none": (lambda x: x[:0].sqrt(), Chances()),
}


@pytest.mark.parametrize("exact", [Field, FieldWithExponents])
@pytest.mark.parametrize("name", LEFT_TO_CHANCE)
def test_what_may_be_equal_by_chance_is_noted(name, exact):
    """The largest number that softmax subtracts may be any: it changes no real number."""
    function, chances = LEFT_TO_CHANCE[name]
    mode = ArithmeticMode(exact(casts="opaque"))
    x = X.expand(2, 4, 6).clone()
    with mode:
        mode.make_abstract(x, "x")
        function(x)
    assert Chances.of(mode.arithmetic) == chances


def test_signs_of_few_roots_run_until_they_hardly_agree_by_chance():
    assert len(runs_again(Chances())) == 0
    runs = [len(runs_again(Chances(fewest_roots=count))) for count in (1, 2, 3, 5, 8, 15)]
    assert runs == [7, 7, 5, 3, 1, 1]
    assert runs_again(Chances(fewest_roots=1), Chances(decides=True)) == AGAIN
    assert len(runs_again(Chances(decides=True, decides_few=True))) == 16
