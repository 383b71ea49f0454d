"""log is the inverse of exp: losses, online and ring softmax are equal to those of one piece."""

import math

import pytest
import torch

from pytest_gtrainer import prove
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.logarithms import exponent_of_logarithm, exponents_of
from pytest_gtrainer.arithmetic.prime import ROOT, P, Q

F = torch.nn.functional
INF = float("inf")


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


X, Y = drawn(4, 6), drawn(4, 6) + 1
ROWS = (drawn(4, 6), drawn(5, 6), drawn(5, 3))


def kind(actual, expected):
    return prove(actual, expected, inputs=(X,)).kind


def test_a_number_is_a_power_of_the_root_with_a_sign():
    numbers = torch.cat([torch.arange(1, 3000), torch.tensor([P - 1, P - 2, 123456789])])
    exponents, signs = exponents_of(numbers)
    for number, exponent, sign in zip(
        numbers.tolist(), exponents.tolist(), signs.tolist(), strict=True
    ):
        assert pow(ROOT, exponent, P) * (-1) ** sign % P == number


def test_ends_of_the_logarithm_are_those_of_floats():
    """log of 1 is 0, of 0 it is -inf, and of what is below 0, or no number, NaN."""
    field = Field(casts="opaque")
    prime = field.prime
    ends = [1, 0, prime.minus_infinity, prime.infinity, prime.nan, 7]
    found = field._with_ends_of_log(torch.tensor(ends), torch.full((6,), 99)).tolist()
    assert found == [0, prime.minus_infinity, prime.nan, prime.infinity, prime.nan, 99]


def online(x):
    left, right = x[:, :3], x[:, 3:]
    of_left, of_right = left.amax(-1), right.amax(-1)
    largest = torch.maximum(of_left, of_right)
    total = torch.exp(left - of_left[:, None]).sum(-1) * torch.exp(of_left - largest)
    total += torch.exp(right - of_right[:, None]).sum(-1) * torch.exp(of_right - largest)
    return largest + total.log()


def whole_attention(q, k, v):
    return torch.softmax(q @ k.T, -1) @ v


def ring_attention(q, k, v):
    """Merge parts by the logarithms of their sums, as ring attention does."""
    out = lse = None
    for start in (0, 3):
        scores = q @ k[start : start + 3].T
        part = torch.softmax(scores, -1) @ v[start : start + 3]
        own = torch.logsumexp(scores, -1, keepdim=True)
        if out is None:
            out, lse = part, own
        else:
            out = out - torch.sigmoid(own - lse) * (out - part)
            lse = lse - F.logsigmoid(lse - own)
    return out, lse[:, 0]


def attention_with_lse(q, k, v):
    return whole_attention(q, k, v), torch.logsumexp(q @ k.T, -1)


def attention_by_products(q, k, v):
    """Compute scores by elementwise products, in parts, as a decoding kernel does."""
    out = total = 0.0
    largest = torch.full((len(q), 1), -INF)
    for start in (0, 3):
        scores = (q[:, None] * k[None, start : start + 3]).sum(-1)
        larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, scale = torch.exp(scores - larger), torch.exp(largest - larger)
        out = out * scale + weights @ v[start : start + 3]
        total = total * scale + weights.sum(-1, keepdim=True)
        largest = larger
    return out / total


def with_gradient(function):
    def step(x):
        x = x.clone().requires_grad_()
        loss = function(x).sum()
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    return step


EQUAL = {
    "log(softmax)": (lambda x: x.softmax(-1).log(), lambda x: x.log_softmax(-1)),
    "logaddexp": (
        lambda x: torch.logaddexp(x[:, :3].logsumexp(-1), x[:, 3:].logsumexp(-1)),
        lambda x: x.logsumexp(-1),
    ),
    "online": (online, lambda x: x.logsumexp(-1)),
    "without the largest": (lambda x: x.exp().sum(-1).log(), lambda x: x.logsumexp(-1)),
    "a mean": (lambda x: x.softmax(-1).log().mean(), lambda x: x.log_softmax(-1).mean()),
    "masked": (
        lambda x: x.where(X > 0, -INF).softmax(-1).log(),
        lambda x: x.where(X > 0, -INF).log_softmax(-1),
    ),
    "softplus": (F.softplus, lambda x: torch.log1p(torch.exp(x))),
    "expm1": (torch.expm1, lambda x: torch.exp(x) - 1),
    "logsigmoid": (lambda x: -F.logsigmoid(x), lambda x: F.softplus(-x)),
    "cross-entropy of two classes": (
        lambda x: F.binary_cross_entropy_with_logits(x, Y),
        lambda x: (F.softplus(x) - x * Y).mean(),
    ),
    "with a gradient": (
        with_gradient(lambda x: x.softmax(-1).log()),
        with_gradient(lambda x: x.log_softmax(-1)),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_logarithm_of_exponentials_is_a_sum(name):
    actual, expected = EQUAL[name]
    proof = prove(actual, expected, inputs=(X,))
    assert proof.kind == "reordered", str(proof)


WRONG = {
    "twice": (lambda x: 2 * x.softmax(-1).log(), EQUAL["log(softmax)"][1]),
    "a sum that is too large": (lambda x: (x.exp().sum(-1) * 2).log(), lambda x: x.logsumexp(-1)),
    "a row": (lambda x: x.softmax(0).log(), EQUAL["log(softmax)"][1]),
    "a sign": (lambda x: (-x.softmax(-1)).log(), lambda x: x.softmax(-1).log()),
    "a sign in a mean": (lambda x: (x - Y).log().mean(), lambda x: (Y - x).log().mean()),
    "a logarithm of a sum": (lambda x: (x + Y).log(), lambda x: x.log() + Y.log()),
    "a softplus without 1": (F.softplus, lambda x: torch.log(torch.exp(x))),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_logarithm_differs(name):
    actual, expected = WRONG[name]
    proof = prove(actual, expected, inputs=(X,))
    assert proof.kind in ("another function", "unknown"), str(proof)


def wide(function):
    return lambda x: function(x.float()).to(x.dtype)


HYPERBOLIC = {
    "tanh": (torch.tanh, lambda x: 2 * torch.sigmoid(2 * x) - 1, lambda x: torch.sigmoid(2 * x)),
    "a quotient": (lambda x: x.sinh() / x.cosh(), torch.tanh, torch.sin),
    "asinh": (torch.asinh, lambda x: (x + (x * x + 1).sqrt()).log(), torch.acosh),
    "acosh": (torch.acosh, lambda x: (x + (x * x - 1).sqrt()).log(), torch.asinh),
    "atanh": (torch.atanh, lambda x: (torch.log1p(x) - torch.log1p(-x)) / 2, torch.tanh),
    "in place": (lambda x: x.clone().tanh_(), lambda x: -torch.tanh(-x), lambda x: torch.tanh(-x)),
    "a gradient": (
        with_gradient(torch.tanh),
        with_gradient(lambda x: 1 - 2 / (1 + torch.exp(2 * x))),
        with_gradient(torch.atan),
    ),
    "a narrow dtype": (
        lambda x: wide(torch.tanh)(x.bfloat16()),
        lambda x: (2 * torch.sigmoid(2 * x.bfloat16().float()) - 1).bfloat16(),
        lambda x: 2 * torch.sigmoid(2 * x.bfloat16()) - 1,
    ),
}


@pytest.mark.parametrize("name", HYPERBOLIC)
def test_hyperbolic_functions_are_made_of_exponentials(name):
    actual, expected, twin = HYPERBOLIC[name]
    assert kind(actual, expected) == "reordered"
    assert kind(twin, expected) not in ("identical", "other kernels", "reordered")


def test_narrow_dtypes_round_a_hyperbolic_function_once():
    for function in (torch.tanh, torch.expm1):
        sides = [lambda x, f=each: f(x.bfloat16()) for each in (wide(function), function)]
        assert kind(*sides) in ("other kernels", "reordered")


def entropy_of_squashed(x, two=2):
    return two * (math.log(two) - x - F.softplus(-2 * x))


def test_the_logarithm_of_a_constant_is_one():
    """Actions that tanh squashes: for large numbers float64 has no digits of the first form."""
    assert kind(lambda x: (1 - torch.tanh(x) ** 2).log(), entropy_of_squashed) == "rounds elsewhere"
    other = kind(lambda x: (1 - torch.tanh(x) ** 2).log(), lambda x: entropy_of_squashed(-x) + 1)
    assert other == "another function"
    for number in (2, 10, 999):
        for value in (math.log(number), torch.tensor(math.log(number)).item()):
            exponent, sign = exponents_of(torch.tensor([number]))
            assert exponent_of_logarithm(value) == (None if int(sign) else int(exponent))
            assert exponent_of_logarithm(-value) == (None if int(sign) else Q - int(exponent))
    for value in (0.0, math.log(2) + 1e-12, 0.7, 12.0, INF, float("nan")):
        assert exponent_of_logarithm(value) is None


def test_attention_in_parts_is_that_of_one_piece():
    assert prove(ring_attention, attention_with_lse, inputs=ROWS).kind == "reordered"
    assert prove(attention_by_products, whole_attention, inputs=ROWS).kind == "reordered"
    twice = prove(ring_attention, lambda q, k, v: attention_with_lse(2 * q, k, v), inputs=ROWS)
    assert twice.kind == "another function"
    assert (
        prove(attention_by_products, lambda q, k, v: whole_attention(q, k, v) / 2, inputs=ROWS).kind
        == "another function"
    )


def test_a_product_with_zero_is_a_known_zero():
    actual, expected = lambda x: (2 * x, 0 * x), lambda x: (2 * x, torch.zeros_like(x))
    assert prove(actual, expected, inputs=(X,)).kind == "reordered"
    ones = prove(actual, lambda x: (2 * x, torch.ones_like(x)), inputs=(X,))
    assert ones.kind == "another function"
