"""The weight of each batch in a gradient is found from the elements alone."""

from fractions import Fraction

import pytest
import torch

from pytest_gtrainer.arithmetic.prime import P, Prime
from pytest_gtrainer.references.weights import spell_weights, weights_of


def elements(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, P, (count, 3, 4), generator=generator).unbind(0)


def added(batches, weights):
    field, total = Prime(P), torch.zeros_like(batches[0])
    for batch, weight in zip(batches, weights, strict=True):
        over = field.divide(torch.tensor(weight.numerator % P), torch.tensor(weight.denominator))
        total = field.add(total, field.multiply(batch, over))
    return total


@pytest.mark.parametrize(
    "weights",
    [(Fraction(1, 2), Fraction(1, 2)), (1, 0), (Fraction(7, 15), Fraction(-8, 15)), (2, 0, 1)],
)
def test_weights_are_found(weights):
    weights = list(map(Fraction, weights))
    batches = elements(len(weights))
    assert weights_of(added(batches, weights), batches) == weights


def test_rows_of_an_embedding_that_one_batch_reads():
    batches = [each.clone() for each in elements(2)]
    batches[0][0], batches[1][2] = 0, 0
    weights = [Fraction(1, 3), Fraction(2, 3)]
    assert weights_of(added(batches, weights), batches) == weights


def test_what_nobody_knows():
    first, second, other = elements(3)
    assert weights_of(other, (first, second)) is None  # no sum of them
    assert weights_of(first, (first, first)) is None  # any share of the two
    assert weights_of(torch.full_like(first, P), (first, second)) is None  # infinite
    nothing = torch.zeros_like(first)
    assert weights_of(nothing, (nothing, nothing)) is None


def test_both_sides_in_words():
    batches, half = elements(2), Fraction(1, 2)
    found, wanted = added(batches, [half, half]), added(batches, [Fraction(1, 3), Fraction(2, 3)])
    words = "the gradients of the 2 batches count 1/2, 1/2, expected 1/3, 2/3"
    assert spell_weights(found, wanted, batches) == words
    assert spell_weights(wanted, wanted, batches) == ""
