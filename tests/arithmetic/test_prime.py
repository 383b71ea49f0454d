"""Numbers modulo a prime equal exact fractions, for any operands and any order."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_gtrainer.arithmetic.prime import ROOT, P, Prime, Q

field = Prime(P)
elements = st.integers(0, P - 1)
fractions = st.fractions(max_denominator=1000)


def element(fraction):
    return fraction.numerator * pow(fraction.denominator, -1, P) % P


def one(value):
    return torch.tensor([value])


def is_prime(number):
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def test_both_moduli_are_primes_below_two_to_the_31():
    assert P == 2 * Q + 1 < 2**31
    assert is_prime(P)
    assert is_prime(Q)
    assert pow(ROOT, Q, P) == 1 != ROOT, "powers of the root repeat after Q"


@given(fractions, fractions)
def test_sums_products_and_quotients_are_those_of_fractions(left, right):
    operands = one(element(left)), one(element(right))
    assert field.add(*operands) == element(left + right)
    assert field.subtract(*operands) == element(left - right)
    assert field.multiply(*operands) == element(left * right)
    if element(right):
        assert field.divide(*operands) == element(left / right)
    assert field.multiply(*operands) != element(left * right + 1), "the twin"


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.data())
def test_matrix_products_are_exact(rows, inner, columns, data):
    """A product of no numbers is 0."""
    left = [[data.draw(elements) for _ in range(inner)] for _ in range(rows)]
    right = [[data.draw(elements) for _ in range(columns)] for _ in range(inner)]
    expected = [
        [
            sum(row[place] * right[place][column] for place in range(inner)) % P
            for column in range(columns)
        ]
        for row in left
    ]
    of_left = torch.tensor(left, dtype=torch.int64).view(rows, inner)
    of_right = torch.tensor(right, dtype=torch.int64).view(inner, columns)
    assert field.matmul(of_left, of_right).tolist() == expected
    assert field.matmul(of_left, of_right[:, 0]).tolist() == [row[0] for row in expected]


def test_a_long_inner_size_is_split_not_rounded():
    """2 ** 19 products of the largest elements: float64 would round their sum."""
    count = 1 << 19
    left = torch.full((1, count), P - 1)
    assert field.matmul(left, left.t()).item() == count % P


@pytest.mark.parametrize("exponent", [0, 1, 2, 5, P - 2])
def test_powers(exponent):
    base = torch.tensor([0, 1, 2, P - 1, 123456789])
    expected = [pow(int(each), exponent, P) for each in base]
    assert field.power(base, exponent).tolist() == expected


@pytest.mark.parametrize(
    "value",
    [0.0, 1.0, -2.5, 2.0**60, 2.0**-1074, 1.7e308, 0.1, -1 / 3],
)
def test_a_float_is_the_dyadic_fraction_that_it_is(value):
    expected = element(Fraction(value))
    assert field.number(value, as_meant=False) == expected
    assert (
        field.numbers(torch.tensor([value, 1.0], dtype=torch.float64), as_meant=False)[0]
        == expected
    )


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (0.1, Fraction(1, 10)),
        (1e-5, Fraction(1, 100_000)),
        (1 / 6, Fraction(1, 6)),
        (-2 / 7, Fraction(-2, 7)),
    ],
)
def test_a_constant_is_the_number_that_was_rounded_to_it(value, meant):
    """The number is meant in double precision, and as a float32 tensor holds it."""
    assert field.number(value, as_meant=True) == element(meant)
    assert field.numbers(torch.tensor(value), as_meant=True) == element(meant)
    assert field.number(value, as_meant=False) != element(meant)


@pytest.mark.parametrize("step", range(1, 5))
def test_corrections_of_optimisers_are_the_decimals_that_are_meant(step):
    correction = Fraction(1) - Fraction(999, 1000) ** step
    found = field.number(1 - 0.999**step, as_meant=True)
    assert found == element(correction)
    root = torch.tensor(field.number((1 - 0.999**step) ** 0.5, as_meant=True))
    assert root == field.root(torch.tensor(found))
    assert field.number(1 - 0.998**step, as_meant=True) != found, "the twin"


def test_a_random_number_in_single_precision_is_no_root_of_a_fraction():
    drawn = torch.rand(300, generator=torch.Generator().manual_seed(0))
    exact = field.numbers(drawn, as_meant=False)
    meant = torch.tensor([field.number(each, as_meant=True) for each in drawn.tolist()])
    assert int((exact != meant).sum()) < 12


@pytest.mark.parametrize("width", [8, 16, 24, 32, 64, 80, 96, 128])
def test_scales_of_attention_are_roots(width):
    for modulus in (P, Q):
        own = Prime(modulus)
        root = own.number(width**-0.5, as_meant=True)
        assert root * root * width % modulus == 1
        fourth = own.number(width**-0.25, as_meant=True)
        assert fourth * fourth % modulus == root, "the root of a root is the same root"
        divided = own.divide(torch.tensor(1), torch.tensor(own.number(width**0.5, as_meant=True)))
        assert divided == root, "a quotient by a root is a product with its inverse"


INFINITY, NAN = torch.tensor(math.inf), torch.tensor(math.nan)


@pytest.mark.parametrize("left", [0.0, 3.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("right", [0.0, 3.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["add", "subtract"])
def test_infinities_and_nan_are_those_of_floats(name, left, right):
    operands = [torch.tensor([field.number(each, as_meant=False)]) for each in (left, right)]
    real = {"add": left + right, "subtract": left - right}[name]
    assert getattr(field, name)(*operands) == field.number(real, as_meant=False)


def test_a_product_with_an_infinity_is_no_number():
    """Nobody knows the sign of an element, so the result is NaN, never a number."""
    infinity = one(field.infinity)
    assert field.multiply(one(3), infinity) == field.nan
    rows = torch.tensor([[1, 2], [field.infinity, 3]])
    assert field.matmul(rows, rows).tolist() == [[field.nan, 8], [field.nan, field.nan]]


@given(st.integers(-128, 128), st.integers(1, 128))
def test_small_fractions_are_found(numerator, denominator):
    fraction = Fraction(numerator, denominator)
    if fraction:
        assert field.small_fraction(element(fraction)) == fraction


def test_the_order_is_total_and_puts_half_above_zero():
    drawn = torch.randint(1, P, (1000,), generator=torch.Generator().manual_seed(0))
    keys = field.order_key(drawn)
    assert len(keys.unique()) == len(drawn.unique())
    assert 400 < int((keys > field.order_key(one(0))).sum()) < 600
    ends = field.order_key(torch.tensor([field.minus_infinity, field.infinity]))
    assert bool((keys > ends[0]).all())
    assert bool((keys < ends[1]).all())
