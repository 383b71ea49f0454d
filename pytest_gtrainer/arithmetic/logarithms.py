"""Discrete logarithms modulo ``P``, by which ``log`` is the inverse of ``exp``.

Every number modulo P is a quotient of two numbers up to the root of P (Thue's lemma), which half of
Euclid's algorithm finds. So a table of the logarithms of these is enough. It is made once: baby
steps and giant steps find those of small primes (Shanks, 1971), and a number has a multiple that is
a quotient of numbers without other factors.
"""

import math
from functools import cache

import torch
from torch import Tensor

from pytest_gtrainer.arithmetic.prime import ROOT, P, Q, is_near_in_single

_MOST = math.isqrt(P) + 1
_SMALL = 1000
_BABY_STEPS = 1 << 20


def exponents_of(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return exponents modulo Q, and signs, 0 or 1: a number is (-1) ** sign * ROOT ** exponent.

    Args:
        numbers: 1 .. P - 1.
    """
    exponents, signs = _table()
    return _looked_up(numbers, exponents, signs)


def exponent_of_logarithm(value: float) -> int | None:
    """Return the exponent of a constant such as log(2), the logarithm of a whole number up to 1096.

    Also of a negative one, and of one in single precision; None of other constants.
    """
    size = abs(value)
    if not 0.5 < size < 7:
        return None
    number = round(math.exp(size))
    logarithm = math.log(number)
    if abs(logarithm - size) > 2**-52 * size and not is_near_in_single(logarithm, size):
        return None
    exponent, sign = exponents_of(torch.tensor([number]))
    if int(sign):
        return None  # the number is minus a power
    return int(exponent) if value > 0 else Q - int(exponent)


def _looked_up(numbers: Tensor, exponents: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    numerator, denominator = _as_quotients(numbers)
    size = denominator.abs()
    sign = signs[numerator] ^ signs[size] ^ (denominator < 0).long()
    return (exponents[numerator] - exponents[size]).remainder(Q), sign


def _as_quotients(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return numerators, and denominators that may be negative, up to ``_MOST``."""
    above, numerator = torch.full_like(numbers, P), numbers
    before, denominator = torch.zeros_like(numbers), torch.ones_like(numbers)
    while True:
        goes_on = numerator >= _MOST
        if not bool(goes_on.any()):
            return numerator, denominator
        # 1 where it has ended, as nobody reads that quotient.
        quotient = above // numerator.where(goes_on, 1)
        rest, factor = above - quotient * numerator, before - quotient * denominator
        above, numerator = numerator, torch.where(goes_on, rest, numerator)
        before, denominator = denominator, torch.where(goes_on, factor, denominator)


@cache
def _table() -> tuple[Tensor, Tensor]:
    """Return exponents and signs of 0 .. _MOST; those of 0 mean nothing."""
    factor = _largest_factors()
    primes = [number for number in range(2, _SMALL) if factor[number] == number]
    # -1 is no square, so one of a number and its negative is.
    is_negative = [int(pow(prime, Q, P) != 1) for prime in primes]
    squares = torch.tensor(primes)
    squares = torch.where(torch.tensor(is_negative) == 1, P - squares, squares)
    found = _search(squares)

    exponents, signs, is_known = [0] * (_MOST + 1), [0] * (_MOST + 1), [False] * (_MOST + 1)
    is_known[1] = True
    for prime, exponent, sign in zip(primes, found.tolist(), is_negative, strict=True):
        exponents[prime], signs[prime], is_known[prime] = exponent, sign, True
    for number in range(2, _MOST + 1):
        other = number // factor[number]
        if other > 1 and factor[number] < _SMALL:
            exponents[number] = (exponents[factor[number]] + exponents[other]) % Q
            signs[number] = signs[factor[number]] ^ signs[other]
            is_known[number] = True

    exponent, sign, known = map(torch.tensor, (exponents, signs, is_known))
    left = (~known).nonzero().squeeze(1)[1:]
    multiples, steps = left, 0
    while len(left):
        numerator, denominator = _as_quotients(multiples)
        is_found = known[numerator] & known[denominator.abs()]
        own, own_sign = _looked_up(multiples[is_found], exponent, sign)
        exponent[left[is_found]] = (own - steps).remainder(Q)
        sign[left[is_found]] = own_sign
        left, multiples = left[~is_found], multiples[~is_found] * ROOT % P
        steps += 1
    return exponent, sign


def _largest_factors() -> list[int]:
    """Return by number its largest prime factor."""
    factor = list(range(_MOST + 1))
    for number in range(2, _MOST + 1):
        if factor[number] == number:
            for multiple in range(2 * number, _MOST + 1, number):
                factor[multiple] = number
    return factor


def _search(squares: Tensor) -> Tensor:
    """Return exponents of few squares."""
    powers = torch.ones(1, dtype=torch.int64)
    while len(powers) < _BABY_STEPS:
        powers = torch.cat([powers, powers * pow(ROOT, len(powers), P) % P])
    powers, steps = powers.sort()
    back = pow(ROOT, Q - _BABY_STEPS, P)
    found = torch.zeros_like(squares)
    left, places, done = squares, torch.arange(len(squares)), 0
    while len(left):
        nearest = torch.searchsorted(powers, left).clamp(max=len(powers) - 1)
        is_found = powers[nearest] == left
        found[places[is_found]] = steps[nearest[is_found]] + done
        left, places = left[~is_found] * back % P, places[~is_found]
        done += _BABY_STEPS
    return found.remainder(Q)
