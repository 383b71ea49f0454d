"""Numbers modulo a prime, as int64, and three that are not finite.

Sums, products and quotients are exact, so the order of additions does not matter. Equal results for
random operands mean equal rational functions, but for a chance of degree / P in each element
(Schwartz and Zippel; Mirage, OSDI 2025, checks kernels in this way).

``P`` is 2 Q + 1 for a prime Q, so ``ROOT`` to the power of x depends on x modulo Q. 2, 3, 5, 7, 11
and 13 are squares modulo both, so the scales of attention, such as 1 / sqrt(24), are numbers of
both.
"""

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from pytest_gtrainer.arithmetic.hashing import scramble

P, Q = 2147024879, 1073512439
# A square, so its powers are Q different numbers. Not a small one, since exp(1) is none.
ROOT = 1618033989**2 % P
_FLOATS = torch.tensor([-math.inf, math.inf, math.nan], dtype=torch.float64)
INNER = 1 << 18  # float64 adds up so many products of 16 bits without rounding
_MOST_VALUES = 1 << 16
_SMALL = 128  # of a fraction that a person may have written


class Prime:
    """Arithmetic modulo a prime below 2 ** 31, on tensors of its elements.

    Attributes:
        modulus: elements are 0 .. modulus - 1.
        minus_infinity, infinity, nan: elements that stand for what is no number.
    """

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus
        self.minus_infinity, self.infinity, self.nan = modulus, modulus + 1, modulus + 2

    def has_special(self, elements: Tensor) -> bool:
        """Return whether an element is infinite or NaN."""
        return elements.numel() > 0 and int(elements.max()) >= self.modulus

    def _as_floats(self, elements: Tensor) -> Tensor:
        """Return infinities and NaN as floats; 0.0 stands for any number."""
        special = elements - self.modulus
        return torch.where(special >= 0, _FLOATS[special.clamp(min=0)], 0.0)

    def _from_floats(self, floats: Tensor, numbers: Tensor) -> Tensor:
        """Return ``numbers`` where the floats are finite, else the infinity or NaN there."""
        found = torch.where(floats.isneginf(), self.minus_infinity, numbers)
        found = torch.where(floats.isposinf(), self.infinity, found)
        return torch.where(floats.isnan(), self.nan, found)

    def _combine(
        self,
        numbers: Callable[..., Tensor],
        floats: Callable[..., Tensor] | None,
        *operands: Tensor,
    ) -> Tensor:
        """Return ``numbers(*operands)``.

        Args:
            floats: computes where an operand is infinite or NaN. Without it the result is NaN
                there.
        """
        result = numbers(*operands).remainder(self.modulus)
        if not any(map(self.has_special, operands)):
            return result
        if floats is not None:
            return self._from_floats(floats(*map(self._as_floats, operands)), result)
        is_special = torch.zeros((), dtype=torch.bool)
        for operand in operands:
            is_special = is_special | (operand >= self.modulus)
        return torch.where(is_special, self.nan, result)

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        return self._combine(torch.add, torch.add, left, right)

    def subtract(self, left: Tensor, right: Tensor) -> Tensor:
        return self._combine(torch.sub, torch.sub, left, right)

    def negative(self, elements: Tensor) -> Tensor:
        return self._combine(torch.neg, torch.neg, elements)

    def multiply(self, left: Tensor, right: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return products.

        Args:
            numbers: the real numbers of ``right``, if they are known: their signs decide which
                infinity an infinity becomes. Without them it becomes NaN.
        """
        if numbers is None:
            return self._combine(torch.mul, None, left, right)
        wide = numbers.double()
        return self._combine(torch.mul, lambda first, second: first * wide, left, right)

    def accumulate(self, function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        """Return sums: ``function`` of torch adds elements, in whatever order."""
        return self._combine(function, function, *operands)

    def total(self, elements: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
        def summed(operand: Tensor) -> Tensor:
            return operand.sum(dims, keepdim=keepdim) if operand.ndim else operand

        return self._combine(summed, summed, elements)

    def power(self, elements: Tensor, exponent: int) -> Tensor:
        """Return a power of a whole number, 0 or more; NaN of what is infinite or NaN."""
        result, base = torch.ones_like(elements), elements.remainder(self.modulus)
        left = exponent
        while left:
            if left & 1:
                result = (result * base).remainder(self.modulus)
            base, left = (base * base).remainder(self.modulus), left >> 1
        if self.has_special(elements):
            return torch.where(elements >= self.modulus, self.nan, result)
        return result

    def inverse(self, elements: Tensor) -> Tensor:
        """Return 1 / x; infinity for 0, and 0 for an infinity."""
        result = self.power(elements, self.modulus - 2)
        result = torch.where(elements == 0, self.infinity, result)
        is_infinite = (elements == self.infinity) | (elements == self.minus_infinity)
        return torch.where(is_infinite, 0, result)

    def divide(self, left: Tensor, right: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return quotients; ``numbers`` as in ``multiply``."""
        inverse = None if numbers is None else 1 / numbers.double()
        return self.multiply(left, self.inverse(right), inverse)

    def bilinear(
        self, function: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor
    ) -> Tensor:
        """Return sums of products of two operands, exactly.

        Args:
            function: computes them on float64, at most ``INNER`` products for an element.

        Both are cut into halves of 16 bits, whose products float64 adds without rounding.
        """
        if self.has_special(left) or self.has_special(right):
            # 0 times an infinity is NaN, so no element that such a product goes into is a number.
            floats = function(self._nan_or_one(left), self._nan_or_one(right))
            left = torch.where(left < self.modulus, left, 0)
            right = torch.where(right < self.modulus, right, 0)
            return torch.where(floats.isnan(), self.nan, self.bilinear(function, left, right))
        low_left, high_left = (left & 0xFFFF).double(), (left >> 16).double()
        low_right, high_right = (right & 0xFFFF).double(), (right >> 16).double()

        def product(first: Tensor, second: Tensor) -> Tensor:
            return function(first, second).long().remainder(self.modulus)

        low, high = product(low_left, low_right), product(high_left, high_right)
        both = product(low_left + high_left, low_right + high_right)
        middle = (both - low - high).remainder(self.modulus)
        shifted = high * pow(2, 32, self.modulus) + middle * 65536 + low
        return shifted.remainder(self.modulus)

    def _nan_or_one(self, elements: Tensor) -> Tensor:
        return torch.where(elements >= self.modulus, math.nan, 1.0).double()

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the product of matrices, or of batches of them; long inner sizes are split."""
        inner = left.shape[-1]
        result = None
        for start in range(0, max(inner, 1), INNER):
            width = min(INNER, inner - start)
            rows = left.narrow(-1, start, width)
            columns = right.narrow(-2 if right.ndim > 1 else 0, start, width)
            part = self.bilinear(torch.matmul, rows, columns)
            result = part if result is None else self.add(result, part)
        return result

    def order_key(self, elements: Tensor, salt: int = 0) -> Tensor:
        """Return numbers by which elements are compared and sorted.

        Numbers modulo a prime have no order. This order is arbitrary, the same for equal elements,
        with half of them above 0: the squares. So a product of two numbers above 0 is above 0, and
        -x is as far below 0 as x is above it, or the other way round. Another salt gives another
        order.
        """
        limits = torch.iinfo(torch.int64)
        distance = torch.minimum(elements, self.modulus - elements)
        salted = scramble(distance ^ salt) & (limits.max >> 1)
        key = torch.where(self.is_square(elements), salted, -salted)
        key = torch.where(elements == 0, 0, key)
        key = torch.where(elements == self.minus_infinity, limits.min, key)
        return torch.where(elements >= self.infinity, limits.max, key)

    def is_square(self, elements: Tensor) -> Tensor:
        """Return which elements are squares of others; -x is none where x is one."""
        return self.power(elements, (self.modulus - 1) // 2) == 1

    def root(self, elements: Tensor) -> Tensor:
        """Return the root that is a square, and of what is none the negative of the root of -x."""
        root = self.power(elements, (self.modulus + 1) // 4)
        # Powers of infinities are NaN already.
        is_other = (self.power(root, 2) != elements) & (elements < self.modulus)
        return torch.where(is_other, self.modulus - root, root)

    # --- numbers of programs

    def number(self, value: float, *, as_meant: bool) -> int:
        """Return a constant of a program as an element.

        Args:
            as_meant: take the number that was rounded to this one, if it is recognised: a decimal
                with at most 10 digits, or a fraction, or a square or fourth root of one; of a
                number in single precision only of few digits. Otherwise a float is the fraction
                with a power of two that it is.
        """
        if math.isnan(value):
            return self.nan
        if math.isinf(value):
            return self.infinity if value > 0 else self.minus_infinity
        if as_meant:
            meant = _meant_fraction(value)
            if meant is not None:
                return self._fraction(meant)
            root = self._meant_root(abs(value))
            if root is not None:
                return root if value > 0 else self.modulus - root
        return self._fraction(Fraction(value))

    def _meant_root(self, value: float) -> int | None:
        """Return the square root, or the fourth root, of a fraction that was rounded."""
        for degree in (2, 4):
            radicand = _meant_radicand(value, degree)
            if radicand:
                root = torch.tensor(self._fraction(radicand))
                while degree > 1:
                    root, degree = self.root(root), degree // 2
                return int(root)
        return None

    def _fraction(self, value: Fraction) -> int:
        inverse = pow(value.denominator, self.modulus - 2, self.modulus)
        return value.numerator * inverse % self.modulus

    def numbers(self, values: Tensor, *, as_meant: bool) -> Tensor:
        """Return the elements of a real tensor; ``as_meant`` as in ``number``, if few occur."""
        if not values.is_floating_point():
            return values.long().remainder(self.modulus)
        wide = values.double()
        if as_meant and 0 < values.numel() <= _MOST_VALUES:
            different, places = wide.unique(return_inverse=True)
            if len(different) <= 16:
                table = [self.number(value, as_meant=True) for value in different.tolist()]
                return torch.tensor(table)[places]
        is_finite = wide.isfinite()
        mantissa, exponent = torch.frexp(wide.where(is_finite, 0.0))
        whole = (mantissa * 2.0**53).long().remainder(self.modulus)
        shift = exponent.long() - 53
        lowest, highest = (int(shift.min()), int(shift.max())) if shift.numel() else (0, 0)
        powers = [pow(2, each, self.modulus) for each in range(lowest, highest + 1)]
        result = (whole * torch.tensor(powers)[shift - lowest]).remainder(self.modulus)
        return self._from_floats(wide.where(~is_finite, 0.0), result)

    def small_fraction(self, element: int) -> Fraction | None:
        """Return the fraction with numerator and denominator up to ``_SMALL`` that this is."""
        for denominator in range(1, _SMALL + 1):
            numerator = element * denominator % self.modulus
            for candidate in (numerator, numerator - self.modulus):
                if 0 < abs(candidate) <= _SMALL:
                    return Fraction(candidate, denominator)
        return None


def meant_numbers(values: Tensor) -> Tensor:
    """Return numbers in float64, where they are roundings of a decimal or fraction: those."""
    found = []
    for value in values.flatten().tolist():
        meant = _meant_fraction(value) if math.isfinite(value) else None
        found.append(value if meant is None else float(meant))
    return torch.tensor(found, dtype=torch.float64).view(values.shape)


def key_of_real(numbers: Tensor | float) -> Tensor:
    """Return keys as ``Prime.order_key`` gives them, in the order of finite real numbers.

    Half of the elements that are above 0 are above 1, and a third is above 2.
    """
    wide = torch.as_tensor(numbers, dtype=torch.float64)
    wide = wide.where(wide.isfinite(), 0.0)
    size = wide.abs()
    # The bits of a float keep large numbers apart.
    key = (size / (1 + size) * 2.0**62).long() + (size.view(torch.int64) >> 10)
    return torch.where(wide < 0, -key, key)


def _is_near(near: float, value: float) -> bool:
    """Return whether ``near`` is the value but for a last digit."""
    # 1 - 0.999**3 has the last digit of 1.
    allowed = 2**-52 if 1e-4 < abs(value) < 1 else 2**-51 * abs(value)
    return abs(near - value) <= allowed


def is_near_in_single(near: float, value: float) -> bool:
    """Return whether a value in single precision is ``near``, rounded."""
    try:
        return bool(struct.unpack("f", struct.pack("f", near))[0] == value)
    except OverflowError:
        return False


@cache
def _meant_fraction(value: float) -> Fraction | None:
    """Return the fraction or decimal that was rounded to a float; None if there is none.

    Few are sought in single precision, where most numbers are near one of many by chance.
    """
    near = Fraction(value).limit_denominator(1 << 20)
    if abs(float(near) - value) <= 2**-51 * abs(value):
        return near
    for digits in range(1, 11):
        text = f"{value:.{digits}g}"
        if _is_near(float(text), value):
            return Fraction(text)

    near = Fraction(value).limit_denominator(64)
    if is_near_in_single(float(near), value):
        return near
    for digits in range(1, 6):
        text = f"{value:.{digits}g}"
        if is_near_in_single(float(text), value):
            return Fraction(text)
    return None


def _meant_radicand(value: float, degree: int) -> Fraction | None:
    """Return the fraction of which a root was rounded to a float; None if there is none."""
    power = value**degree
    near = Fraction(power).limit_denominator(4096)
    if abs(float(near) ** (1 / degree) - value) <= 2**-51 * value:
        return near
    for digits in range(1, 11):
        text = f"{power:.{digits}g}"
        if _is_near(float(text), power):
            return Fraction(text)

    near = Fraction(power).limit_denominator(128)
    is_small = near.numerator <= 128
    return near if is_small and is_near_in_single(float(near) ** (1 / degree), value) else None
