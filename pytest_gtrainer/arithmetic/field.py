"""Field: an element is a number modulo a prime, so sums may be in any order.

What is no sum, product or quotient is a pseudo-random function of its argument: equal arguments
give equal values, and nothing else is known of it. Backward formulas must be linear in the incoming
gradient, so operators are made of others by torch's decompositions.

``Field(casts="opaque")`` rounds where a program does: a cast to a narrower dtype, and the result of
an operator in bfloat16 or float16, is a pseudo-random function of the exact number. In float32 and
wider, operators count as exact. ``Field(casts="identity")`` never rounds, and takes constants as
the numbers that were rounded to them, such as 1/6 and 1e-5.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer.arithmetic import hashing
from pytest_gtrainer.arithmetic.base import (
    FEW_NUMBERS,
    NO_LIMIT,
    Arithmetic,
    Call,
    Elements,
    count_different,
    dims_of,
    mapped,
    values_in,
)
from pytest_gtrainer.arithmetic.logarithms import exponent_of_logarithm, exponents_of
from pytest_gtrainer.arithmetic.operators import BITS, names
from pytest_gtrainer.arithmetic.prime import INNER, ROOT, P, Prime, Q, key_of_real
from pytest_gtrainer.arithmetic.values import NoMeaning, Value


class Field(Arithmetic):
    """Numbers modulo a prime.

    Attributes:
        orders_softmax: whether the rows of a softmax have the order of its operand. One that is
            written by hand, or taken apart by a compiler, has an order of its own.
        has_softmax: whether there is a row to which that applies.
    """

    is_exact = True
    joins_roots = False

    def __init__(
        self, *, casts: str, seed: int = 0, modulus: int = P, orders_softmax: bool = True
    ) -> None:
        super().__init__(seed)
        self.prime = Prime(modulus)
        self.orders_softmax, self.has_softmax = orders_softmax, False
        self._written: dict[int, int] = {}  # elements of numbers that the program has, and keys
        self._far = _FarBelow()
        self._softmaxes: list[tuple[Elements, Elements, bool]] = []  # not yet in the table
        self._of_softmax = self._keys_of_softmax = torch.empty(0, dtype=torch.int64)
        # Of what is no square, without signs, and what they are roots of.
        self._odd_roots = self._radicands = torch.empty(0, dtype=torch.int64)
        if casts not in ("opaque", "identity"):
            raise ValueError(f'casts={casts!r}: take "opaque" or "identity"')
        self.rounds = casts == "opaque"
        self.kind = "reordered" if self.rounds else "rounds elsewhere"

    def settings(self) -> tuple[Any, ...]:
        return (*super().settings(), self.orders_softmax)

    def narrow(self, hashes: Tensor) -> Elements:
        return hashes.remainder(self.prime.modulus)

    def lift(self, value: Any) -> Elements:
        if isinstance(value, Value):
            return value.elements
        if isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex()):
            raise NoMeaning("complex numbers")
        if isinstance(value, Tensor):
            elements = self.prime.numbers(value, as_meant=not self.rounds)
        else:
            elements = torch.tensor(self.prime.number(value, as_meant=not self.rounds))
        self._note_far(elements, value)
        if elements.numel() <= FEW_NUMBERS and len(self._written) < _MOST_NUMBERS:
            keys = key_of_real(value)
            for element, key in zip(
                elements.flatten().tolist(), keys.flatten().tolist(), strict=True
            ):
                self._written.setdefault(element, key)
        return elements

    def leaf(self, name: Any, shape: Sequence[int]) -> Elements:
        """Return the elements of an input; by bias or sign all are above 0, or below."""
        elements = super().leaf(name, shape)
        sign = self.bias or self.sign
        if not sign:
            return elements
        # Squares are above 0 in every order, and to square is cheaper than to ask.
        squares = self.prime.multiply(elements, elements)
        return squares if sign > 0 else self._negative(squares)

    def _note_far(self, elements: Elements, value: Any) -> None:
        """Note known numbers that are far below all others, or whose negatives are."""
        numbers = torch.as_tensor(value).double()
        size = numbers.abs()
        if not bool((size >= -FAR_BELOW).any()):
            return
        below = torch.where(numbers < 0, elements, self.prime.negative(elements))
        is_number = below < self.prime.modulus
        self._far.note(below[is_number & (size >= -FAR_BELOW)])
        self._far.note_least(below[is_number & (size >= NO_LIMIT)])

    def _keep_far(self, result: Elements, elements: Elements, where: Tensor | bool) -> None:
        """Note results that are as far below as elements are."""
        is_masked = self._is_masked(elements) & where & (result < self.prime.modulus)
        self._far.note(result[is_masked])
        self._far.note_least(result[is_masked & self._far.is_least(elements)])

    @property
    def has_masks(self) -> bool:
        return bool(self._far)

    def _is_masked(self, numbers: Tensor) -> Tensor:
        """Return where a number is far below all others, as what a mask was added to."""
        return self._far.has(numbers)

    def order(self, elements: Elements) -> Tensor:
        numbers = self.number_of(elements)
        is_masked = self._is_masked(numbers)
        written, _ = self._find_written(numbers)
        if self._softmaxes and not self.stabilises:
            self._order_softmaxes()
        self.lowest = self.lowest or bool((is_masked & ~written).any())
        return self._order(elements, is_masked)

    def order_by_limits(self, elements: Elements) -> Tensor:
        numbers = self.number_of(elements)
        # What a mask was added to may be above a limit, where the number is as large.
        if self.bias > 0:
            return self._order(elements, self._far.is_least(numbers))
        return self._order(elements, self._is_masked(numbers))

    def _order(self, elements: Elements, is_masked: Tensor) -> Tensor:
        numbers = self.number_of(elements)
        keys = self.prime.order_key(numbers, hashing.of_name("order", self.seed))
        written, places = self._find_written(numbers)
        is_end = numbers >= self.prime.modulus
        keys = self.aim(keys, elements, written | is_masked | is_end | (numbers == 0))
        keys = self._in_order_of_softmax(keys, numbers)
        keys = torch.where(is_masked, -(1 << 62) - (keys.abs() >> 1), keys)
        return torch.where(written, self._keys_of_written()[places], keys)

    def note_softmax(self, call: Call, found: Value) -> None:
        """Note that the rows of a softmax, or of its logarithm, have the order of its operand."""
        operand = call.args[0]
        count = found.elements.numel()
        is_rounded = self.rounds and BITS.get(found.dtype, 53) < BITS[torch.float32]
        if not isinstance(operand, Value) or is_rounded or not 0 < count <= _LARGEST_SOFTMAX:
            return
        self.has_softmax = True
        if not self.orders_softmax:
            return
        dim = call.named["dim"]
        pair = (found.elements.movedim(dim, -1), operand.elements.movedim(dim, -1))
        if found.elements.ndim:
            self._softmaxes.append((*pair, "log" in call.base))

    def _order_softmaxes(self) -> None:
        """Give the elements of softmaxes keys above 0, in each row in the order of the operand.

        They are the keys that these elements have by themselves, so nothing else is ordered.
        """
        pending, self._softmaxes = self._softmaxes, []
        for found, operand, is_logarithm in pending:
            numbers = self.number_of(found)
            own = self.prime.order_key(numbers, hashing.of_name("order", self.seed))
            own = self.aim(own, found, numbers == 0).abs()
            places = self.order(operand).argsort(-1).argsort(-1)
            keys = (-own if is_logarithm else own).sort(-1)[0].gather(-1, places)
            is_number = (numbers > 0) & (numbers < self.prime.modulus)
            known = torch.cat([self._of_softmax, numbers[is_number]])
            of_known = torch.cat([self._keys_of_softmax, keys[is_number]])
            self._of_softmax, order = known.unique(return_inverse=True)
            self._keys_of_softmax = torch.empty_like(self._of_softmax).scatter(0, order, of_known)

    def _in_order_of_softmax(self, keys: Tensor, numbers: Tensor) -> Tensor:
        if not len(self._of_softmax):
            return keys
        for sign, sought in ((1, numbers), (-1, self.prime.negative(numbers))):
            places = torch.searchsorted(self._of_softmax, sought.contiguous())
            places = places.clamp(max=len(self._of_softmax) - 1)
            is_known = self._of_softmax[places] == sought
            keys = torch.where(is_known, sign * self._keys_of_softmax[places], keys)
        return keys

    def _unsigned(self, elements: Elements) -> Tensor:
        return self._distance(self.number_of(elements))

    def _find_written(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return which numbers the program has written, and their places among these."""
        elements = torch.tensor(sorted(self._written) or [-1])
        places = torch.searchsorted(elements, numbers.contiguous()).clamp(max=len(elements) - 1)
        return (elements[places] == numbers) & (numbers < self.prime.modulus), places

    def _keys_of_written(self) -> Tensor:
        return torch.tensor([key for _, key in sorted(self._written.items())] or [0])

    def order_of_known(self, operand: Any) -> Tensor:
        numbers = self.number_of(self.lift(operand))
        keys = key_of_real(operand)
        written, _ = self._find_written(numbers)
        is_end = numbers >= self.prime.modulus
        return torch.where(written | is_end, self.order(numbers), keys)

    def has_order(self, elements: Elements) -> Tensor:
        numbers = self.number_of(elements)
        is_special = (numbers == 0) | (numbers >= self.prime.modulus)
        is_far = self._far.is_least(numbers) if self.bias > 0 else self._is_masked(numbers)
        return is_special | is_far | self._find_written(numbers)[0]

    def may_be_biased(self, known: Any) -> Tensor:
        # Else x and -x would both be above 0, where inputs and their products are.
        numbers = torch.as_tensor(known)
        return (numbers != 0) & (numbers > -NO_LIMIT)

    @staticmethod
    def number_of(elements: Elements) -> Tensor:
        """Return the number of each element."""
        return elements

    def not_finite(self, elements: Elements) -> tuple[Tensor, Tensor, Tensor]:
        prime = self.prime
        return elements == prime.minus_infinity, elements == prime.infinity, elements == prime.nan

    def rounded(self, value: Value, dtype: torch.dtype) -> Elements:
        if not (value.dtype.is_floating_point and dtype.is_floating_point):
            seed = hashing.of_name("convert", str(value.dtype), str(dtype))
            return self.narrow(hashing.mix(seed, [value.elements]))
        if not self.rounds:
            return value.elements
        return self._round(value.elements, dtype)

    def _round(self, elements: Elements, dtype: torch.dtype) -> Elements:
        seed = hashing.of_name("round", str(dtype))
        hashed = self.narrow(hashing.mix(seed, [elements]))
        if self._far:
            self._keep_far(hashed, elements, True)
        # Zero, infinities and NaN are themselves in every dtype.
        return torch.where((elements == 0) | (elements >= self.prime.modulus), elements, hashed)

    def stored(self, elements: Elements, dtype: torch.dtype) -> Elements:
        """Return an exact result as it is in memory: narrow dtypes round it once."""
        if self.rounds and BITS.get(dtype, 53) < BITS[torch.float32]:
            return self._round(elements, dtype)
        return elements

    def compute(self, call: Call) -> Any:
        method = getattr(self, f"_{call.base.strip('_')}", None)
        if call.base not in RING or method is None:
            return NotImplemented
        found = method(call)
        if found is NotImplemented:
            return NotImplemented
        results = found if isinstance(found, list) else [found]
        stored = []
        for elements, result in zip(results, call.results, strict=True):
            if not _chooses(call) and not _scales_exactly(call):
                elements = self.stored(elements, result.dtype)
            stored.append(elements)
        return stored

    # --- sums, products and quotients

    def _operands(self, call: Call) -> tuple[Elements, Elements]:
        left, right = list(call.named.values())[:2]
        scaled = self.lift(right)
        alpha = call.named.get("alpha", 1)
        if alpha not in (1, None):
            scaled = self.prime.multiply(scaled, self.lift(alpha), _known_numbers(alpha))
            if not isinstance(right, Value):
                self._note_far(scaled, torch.as_tensor(right) * alpha)
        return self.lift(left), scaled

    def _add(self, call: Call) -> Elements:
        left, right = self._operands(call)
        return self._with_masks(self.prime.add(left, right), left, right)

    def _sub(self, call: Call) -> Elements:
        left, right = self._operands(call)
        result = self.prime.subtract(left, right)
        return self._with_masks(result, left, self.prime.negative(right))

    def _with_masks(self, result: Elements, left: Elements, right: Elements) -> Elements:
        """Return a sum, which is far below all others, or above, as one of its operands is.

        Of a sum of two such numbers with other signs nobody knows.
        """
        if not self._far:
            return result
        sides = torch.broadcast_tensors(left, right)
        negatives = [self.prime.negative(each) for each in sides]
        below = [self._is_masked(each) for each in sides]
        above = [self._is_masked(each) for each in negatives]
        for place in (0, 1):
            self._keep_far(result, sides[place], ~above[1 - place])
            self._keep_far(self.prime.negative(result), negatives[place], ~below[1 - place])
        return result

    def _mul(self, call: Call) -> Elements:
        left, right = list(call.named.values())[:2]
        if not isinstance(left, Value):
            left, right = right, left
        product = self.prime.multiply(self.lift(left), self.lift(right), _known_numbers(right))
        if isinstance(right, Value):
            product = self._with_sign_of_root(product, left.elements, right.elements)
        self._scale_masked(product, left, right)
        return product

    def _scale_masked(self, result: Elements, scaled: Any, factor: Any) -> None:
        """Note that a product of a masked number with a known one above 0 is masked."""
        if self._far and isinstance(scaled, Value) and not isinstance(factor, Value):
            self._keep_far(result, scaled.elements, torch.as_tensor(factor) > 0)

    def _div(self, call: Call) -> Any:
        if call.named.get("rounding_mode"):
            return NotImplemented
        left, right = list(call.named.values())[:2]
        result = self.prime.divide(self.lift(left), self.lift(right), _known_numbers(right))
        if isinstance(left, Value) and isinstance(right, Value):
            inverse = self.prime.inverse(right.elements)
            result = self._with_sign_of_root(result, left.elements, inverse)
        self._scale_masked(result, left, right)
        return result

    def _neg(self, call: Call) -> Elements:
        return self.prime.negative(self.lift(call.args[0]))

    def _reciprocal(self, call: Call) -> Elements:
        return self.prime.inverse(self.lift(call.args[0]))

    def _square(self, call: Call) -> Elements:
        elements = self.lift(call.args[0])
        return self._squared(self.prime.power(elements, 2), elements)

    def _sqrt(self, call: Call) -> Elements:
        return self._root_to_the(1, self.lift(call.args[0]))

    def _rsqrt(self, call: Call) -> Elements:
        return self._root_to_the(-1, self.lift(call.args[0]))

    def _root_to_the(self, exponent: int, elements: Elements) -> Elements:
        """Return an odd power of the root.

        The root of a square is the one that is a square, and that of any other x is the negative
        of the root of -x. So the root of a product is the product of the roots, as of positive
        numbers. Of half of the elements the square of the root is -x: such roots are remembered,
        so what is squared at once becomes x.
        """
        if elements.numel():
            self.roots = True
            self.fewest_roots = min(self.fewest_roots, count_different(elements))
        root = self.prime.root(elements)
        result = self.prime.power(root, abs(exponent))
        if exponent < 0:
            result = self.prime.inverse(result)
        is_odd = (elements > 0) & (elements < self.prime.modulus) & ~self.prime.is_square(elements)
        found = [self._distance(result[is_odd]), self._distance(self.prime.inverse(result[is_odd]))]
        roots = torch.cat([self._odd_roots, *found])
        radicands = torch.cat([self._radicands, *[self._distance(elements[is_odd])] * 2])
        self._odd_roots, places = roots.unique(return_inverse=True)
        self._radicands = torch.empty_like(self._odd_roots).scatter(0, places, radicands)
        return result

    def _distance(self, elements: Elements) -> Tensor:
        return torch.minimum(elements, self.prime.modulus - elements)

    def _with_sign_of_root(self, product: Elements, left: Elements, right: Elements) -> Elements:
        """Return a product with the sign that it should have if a factor is an odd root.

        That is the square of the root. With ``joins_roots`` it is also the product with what is
        below the root, and with the inverse of that: then x * g * rsqrt(x) depends on the order.
        """
        if not len(self._odd_roots):
            return product
        sizes = [self._distance(each) for each in torch.broadcast_tensors(left, right)]
        is_turned = (sizes[0] == sizes[1]) & torch.isin(sizes[0], self._odd_roots)
        if not self.joins_roots:
            return torch.where(is_turned, self.prime.negative(product), product)
        for root, other, own in ((*sizes, right), (*sizes[::-1], left)):
            places = torch.searchsorted(self._odd_roots, root.contiguous())
            places = places.clamp(max=len(self._odd_roots) - 1)
            is_root = self._odd_roots[places] == root
            radicand = self._radicands[places]
            inverse = self._distance(self.prime.inverse(own))
            is_turned = is_turned | (is_root & ((radicand == other) | (radicand == inverse)))
        return torch.where(is_turned, self.prime.negative(product), product)

    def _squared(self, power: Elements, elements: Elements) -> Elements:
        """Return a power of elements with the sign that the square of a root should have."""
        if not len(self._odd_roots):
            return power
        is_odd = torch.isin(self._distance(elements), self._odd_roots)
        return torch.where(is_odd, self.prime.negative(power), power)

    def _pow(self, call: Call) -> Any:
        base, exponent = call.args
        if not isinstance(base, Value):
            return NotImplemented
        if isinstance(exponent, int | float):
            return self._power(base.elements, exponent)
        numbers = exponent.unique().tolist() if isinstance(exponent, Tensor) else []
        if not 0 < len(numbers) <= FEW_NUMBERS:
            return NotImplemented
        elements, exponents = torch.broadcast_tensors(base.elements, exponent)
        result = elements
        for number in numbers:
            power = self._power(elements, number)
            if power is NotImplemented:
                return NotImplemented
            result = torch.where(exponents == number, power, result)
        return result

    def _power(self, elements: Elements, exponent: float) -> Any:
        """Return a whole power, or one of a square root; ``NotImplemented`` for others."""
        doubled = 2 * exponent
        if not float(doubled).is_integer() or abs(doubled) > 64:
            return NotImplemented
        if int(doubled) % 2:
            return self._root_to_the(int(doubled), elements)
        result = self.prime.power(elements, int(abs(exponent)))
        # An odd power is a product with a root, as formulas of gradients have it.
        if int(abs(exponent)) % 4 == 2:
            result = self._squared(result, elements)
        return self.prime.inverse(result) if exponent < 0 else result

    def _exp(self, call: Call) -> Elements:
        self.exponentials += 1
        elements = self.lift(call.args[0])
        hashed = self.narrow(hashing.mix(hashing.of_name("exp"), [elements]))
        # A square, so it is above 0.
        found = torch.where(elements == 0, 1, self.prime.power(hashed, 2))
        found = torch.where(self._vanishes(elements), 0, found)
        found = torch.where(elements == self.prime.minus_infinity, 0, found)
        return torch.where(elements > self.prime.minus_infinity, elements, found)

    def _vanishes(self, numbers: Tensor) -> Tensor:
        """Return where exp is 0, as a mask was added."""
        is_masked = self._is_masked(numbers)
        self.masks = self.masks or bool(is_masked.any())
        return is_masked

    def _log(self, call: Call) -> Elements:
        self.exponentials += 1
        elements = self.lift(call.args[0])
        return self._with_ends_of_log(elements, self.pointwise(call))

    def _with_ends_of_log(self, elements: Elements, found: Elements) -> Elements:
        """Return logarithms, with those of 0, 1 and what is no number."""
        prime = self.prime
        found = torch.where(elements == 1, 0, found)
        found = torch.where(elements == 0, prime.minus_infinity, found)
        found = torch.where(elements == prime.minus_infinity, prime.nan, found)
        return torch.where(elements > prime.minus_infinity, elements, found)

    # --- the larger one, by an order that is arbitrary but the same everywhere

    def _maximum(self, call: Call) -> Elements:
        left, right = torch.broadcast_tensors(*self._operands(call))
        return self._or_nan(torch.where(self._is_less(call), right, left), left, right)

    def _minimum(self, call: Call) -> Elements:
        left, right = torch.broadcast_tensors(*self._operands(call))
        return self._or_nan(torch.where(self._is_less(call), left, right), left, right)

    def _or_nan(self, chosen: Elements, *operands: Elements) -> Elements:
        """Return what was chosen, and NaN where an operand is: so torch does it."""
        for operand in operands:
            chosen = torch.where(self.not_finite(operand)[2], self.prime.nan, chosen)
        return chosen

    def _is_less(self, call: Call) -> Tensor:
        left, right = self.order_of_two(*list(call.named.values())[:2])
        return left < right

    def _abs(self, call: Call) -> Elements:
        elements = self.lift(call.args[0])
        self._note_decision(elements, are_rivals=False)
        is_negative = self.order(elements) < 0
        return torch.where(is_negative, self._negative(elements), elements)

    def _negative(self, elements: Elements) -> Elements:
        return self.prime.negative(elements)

    def _amax(self, call: Call) -> Elements:
        return self._choose(call, torch.argmax)

    def _amin(self, call: Call) -> Elements:
        return self._choose(call, torch.argmin)

    def _choose(self, call: Call, place_of: Callable[..., Tensor]) -> Elements:
        """Return an element of each row."""
        rows = self._rows(call)
        # What softmax subtracts is chosen too, and changes no result: see ``deciding_nothing``.
        self._note_decision(rows)
        if rows.shape[-1] > 1:
            self.chosen.add(str(call.operator))
        if not rows.numel():
            return rows.reshape(call.result.shape)
        places = place_of(self.order(rows), -1, keepdim=True)
        chosen = rows.gather(-1, places).squeeze(-1)
        has_nan = self.not_finite(rows)[2].any(-1)
        return torch.where(has_nan, self.prime.nan, chosen).reshape(call.result.shape)

    def _rows(self, call: Call) -> Elements:
        """Return the elements with the reduced dimensions as the last one."""
        elements = self.lift(call.args[0])
        reduced = dims_of(call, elements.ndim)
        kept = [dim for dim in range(elements.ndim) if dim not in reduced]
        shape = [elements.shape[dim] for dim in kept]
        count = math.prod(elements.shape[dim] for dim in reduced)
        return elements.permute(kept + reduced).reshape(*shape, count)

    # --- sums over dimensions

    def _mm(self, call: Call) -> Elements:
        return self.prime.matmul(self.lift(call.args[0]), self.lift(call.args[1]))

    _bmm = _dot = _mv = _mm

    def _sum(self, call: Call) -> Any:
        if not values_in(call.args[:1]):
            return NotImplemented
        value = call.args[0]
        dims = dims_of(call, value.elements.ndim)
        return self.prime.total(value.elements, dims).reshape(call.result.shape)

    def _mean(self, call: Call) -> Elements:
        count = call.args[0].elements.numel() // max(1, call.result.numel())
        return self.prime.divide(self._sum(call), torch.tensor(count))

    def _var(self, call: Call) -> Elements:
        return self._moments(call)[0]

    def _var_mean(self, call: Call) -> list[Elements]:
        return list(self._moments(call))

    def _moments(self, call: Call) -> tuple[Elements, Elements]:
        elements = call.args[0].elements
        dims = dims_of(call, elements.ndim)
        count = math.prod(elements.shape[dim] for dim in dims)
        correction = call.named.get("correction", 1)
        if "unbiased" in call.named:
            correction = int(call.named["unbiased"])
        correction = 1 if correction is None else correction
        mean = self.prime.divide(
            self.prime.total(elements, dims, keepdim=True), torch.tensor(count)
        )
        apart = self.prime.subtract(elements, mean)
        squares = self.prime.total(self.prime.power(apart, 2), dims)
        variance = self.prime.divide(squares, self.lift(float(count - correction)))
        shape = call.result.shape
        return variance.reshape(shape), mean.reshape(shape)

    def _cumsum(self, call: Call) -> Any:
        def add_up(elements: Tensor) -> Tensor:
            return elements.cumsum(call.named["dim"])

        return self.prime.accumulate(add_up, self.lift(call.args[0]))

    def _prod(self, call: Call) -> Any:
        rows, count = self._rows(call), call.result.numel()
        if rows.ndim == 0 or not count:
            return rows.reshape(call.result.shape)
        result = torch.ones(rows.shape[:-1], dtype=torch.int64)
        for part in rows.unbind(-1):
            result = self.prime.multiply(result, part)
        return result.reshape(call.result.shape)

    def _index_put(self, call: Call) -> Any:
        named = call.named
        if values_in(named["indices"]) or not named.get("accumulate"):
            return NotImplemented

        def add_at(elements: Tensor, added: Tensor) -> Tensor:
            return elements.index_put(named["indices"], added, accumulate=True)

        return self.prime.accumulate(add_at, self.lift(named["self"]), self.lift(named["values"]))

    _unsafe_index_put = _index_put

    def _index_add(self, call: Call) -> Any:
        named = call.named
        alpha = named["alpha"]
        source = self.lift(named["source"])
        added = self.prime.multiply(source, self.lift(alpha), _known_numbers(alpha))

        def add_at(elements: Tensor, added: Tensor) -> Tensor:
            return elements.index_add(named["dim"], named["index"], added)

        return self.prime.accumulate(add_at, self.lift(named["self"]), added)

    def _scatter_add(self, call: Call) -> Any:
        named = call.named

        def add_at(elements: Tensor, added: Tensor) -> Tensor:
            return elements.scatter_add(named["dim"], named["index"], added)

        return self.prime.accumulate(add_at, self.lift(named["self"]), self.lift(named["src"]))

    def _embedding_dense_backward(self, call: Call) -> Elements:
        named = call.named
        if named["scale_grad_by_freq"]:
            return NotImplemented
        gradient, places = self.lift(named["grad_output"]), named["indices"]
        rows = gradient.reshape(-1, gradient.shape[-1])
        used = (places != named["padding_idx"]).reshape(-1, 1)

        def add_at(added: Tensor) -> Tensor:
            result = torch.zeros(call.result.shape, dtype=added.dtype)
            return result.index_add(0, places.reshape(-1), added)

        return self.prime.accumulate(add_at, torch.where(used, rows, 0))

    # --- convolutions

    def _convolution(self, call: Call) -> Any:
        named = dict(call.named)
        rest = [named[name] for name in _OF_CONVOLUTIONS]
        operator = call.operator
        _check_convolution(call.result, self.lift(named["weight"]))

        def convolve(left: Tensor, right: Tensor) -> Tensor:
            return operator(left, right, None, *rest)

        elements = self.prime.bilinear(
            convolve, self.lift(named["input"]), self.lift(named["weight"])
        )
        if named["bias"] is not None:
            bias = self.lift(named["bias"])
            elements = self.prime.add(elements, bias.view(-1, *[1] * (elements.ndim - 2)))
        return elements

    def _convolution_backward(self, call: Call) -> list[Elements | None]:
        """Return the gradients of input, weight and bias that the mask asks for."""
        named = dict(call.named)
        rest = [named[name] for name in _OF_CONVOLUTIONS]
        gradient, given, weight = (
            self.lift(named[name]) for name in ("grad_output", "input", "weight")
        )
        operator, bias = call.operator, named["bias_sizes"]
        _check_convolution(gradient, weight)
        like_input, like_weight = given.double(), weight.double()

        def to_input(left: Tensor, right: Tensor) -> Tensor:
            mask = [True, False, False]
            return operator(left, like_input, right, bias, *rest, mask)[0]

        def to_weight(left: Tensor, right: Tensor) -> Tensor:
            mask = [False, True, False]
            return operator(left, right, like_weight, bias, *rest, mask)[1]

        found: list[Elements | None] = []
        mask = named["output_mask"]
        found.append(self.prime.bilinear(to_input, gradient, weight) if mask[0] else None)
        found.append(self.prime.bilinear(to_weight, gradient, given) if mask[1] else None)
        if mask[2]:
            dims = [dim for dim in range(gradient.ndim) if dim != 1]
            found.append(self.prime.total(gradient, dims))
        else:
            found.append(None)
        return [elements for elements in found if elements is not None]


def _known_numbers(operand: Any) -> Tensor | None:
    """Return the real numbers of an operand; None if they are abstract."""
    if isinstance(operand, Value):
        return None
    return torch.as_tensor(operand, dtype=torch.float64)


def _scales_exactly(call: Call) -> bool:
    """Return whether an operator multiplies by powers of two, which rounds nothing."""
    if call.base not in ("mul", "div") or call.named.get("rounding_mode"):
        return False
    scaled, factor = list(call.named.values())[:2]
    if call.base == "mul" and not isinstance(scaled, Value):
        scaled, factor = factor, scaled
    if not isinstance(scaled, Value) or isinstance(factor, Value | complex):
        return False
    if scaled.dtype != call.result.dtype:
        return False
    mantissas, _ = torch.frexp(torch.as_tensor(factor).double().abs())
    return bool((mantissas == 0.5).all())


def _chooses(call: Call) -> bool:
    """Return whether each result is an operand, or its negative, in a dtype that holds it."""
    if call.base not in _CHOICES and call.base not in ("neg", "abs"):
        return False
    for operand in list(call.named.values())[:2]:
        # A number that the program names may have digits that the dtype has not.
        if isinstance(operand, float):
            return False
        if isinstance(operand, Value | Tensor) and operand.dtype != call.result.dtype:
            return False
    return True


def _check_convolution(gradient: Tensor, weight: Tensor) -> None:
    """Refuse sums of more products than float64 adds without rounding."""
    widest = max(weight[0].numel(), weight[:, 0].numel(), gradient[:, 0].numel())
    if widest > INNER:
        raise NoMeaning(f"a convolution that adds {widest} products in an element, over {INNER}")


FAR_BELOW = -1e4
"""Numbers up to this are those of masks: their exp is 0, whatever is added."""

_LARGEST_SOFTMAX = 1 << 16
_MOST_NUMBERS = 256
_OF_CONVOLUTIONS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
RING = names(
    """
    add sub mul div neg reciprocal square sqrt rsqrt pow exp log maximum minimum abs amax amin mm
    bmm dot mv sum mean var var_mean cumsum prod index_put _unsafe_index_put index_add
    scatter_add embedding_dense_backward convolution convolution_backward
    """
)
"""Operators that a field computes by itself."""


class _FarBelow:
    """The numbers that are far below all others: those of masks, and what these were added to."""

    def __init__(self) -> None:
        self._numbers = self._least = torch.empty(0, dtype=torch.int64)

    def __bool__(self) -> bool:
        return len(self._numbers) > 0

    def note(self, numbers: Tensor) -> None:
        self._numbers = torch.cat([self._numbers, numbers.reshape(-1)]).unique()

    def note_least(self, numbers: Tensor) -> None:
        """Note numbers that stand for -inf: no number that is added lifts them above a limit."""
        self._least = torch.cat([self._least, numbers.reshape(-1)]).unique()

    def has(self, numbers: Tensor) -> Tensor:
        return _are_in(self._numbers, numbers)

    def is_least(self, numbers: Tensor) -> Tensor:
        return _are_in(self._least, numbers)


def _are_in(table: Tensor, numbers: Tensor) -> Tensor:
    if not len(table):
        return torch.zeros(numbers.shape, dtype=torch.bool)
    places = torch.searchsorted(table, numbers.contiguous())
    return table[places.clamp(max=len(table) - 1)] == numbers


class _Exponents(Field):
    """The exponents of numbers; those of constants such as log(2) are logarithms, as 2 has one."""

    def lift(self, value: Any) -> Elements:
        elements = super().lift(value)
        if self.rounds or isinstance(value, Value) or elements.numel() > FEW_NUMBERS:
            return elements
        exponents = []
        known = torch.as_tensor(value).double().flatten().tolist()
        for number, own in zip(known, elements.flatten().tolist(), strict=True):
            logarithm = exponent_of_logarithm(number)
            exponents.append(own if logarithm is None else logarithm)
        return torch.tensor(exponents, dtype=torch.int64).view(elements.shape)


class FieldWithExponents(Field):
    """A field in which exp(a + b) is exp(a) exp(b), and log is the inverse of exp.

    An element has a number modulo P, and an exponent modulo Q: exp is ``ROOT`` to that power
    (Mirage, OSDI 2025, section 5.1). The exponent of an input is another random number. It follows
    the number through sums and products, but it is a pseudo-random function of the number after
    any other function, and after a product with the result of one: so it does not matter in how
    many factors an exp was computed. As no number modulo P has a logarithm modulo P, log gives an
    exponent, and a sign for a number that is minus a power of ``ROOT``.

    Each exponent stands for a function as well as a number does, so results are equal if all their
    numbers are, or all their exponents. And a root times what is below it is the next power of it.
    """

    def __init__(
        self,
        *,
        casts: str,
        seed: int = 0,
        orders_softmax: bool = True,
        keeps_digits: bool = False,
    ) -> None:
        super().__init__(casts=casts, seed=seed, orders_softmax=orders_softmax)
        self.keeps_digits = keeps_digits
        self._numbers = Field(casts=casts, seed=seed)
        self._numbers.joins_roots = True
        self._exponents = _Exponents(casts=casts, seed=seed, modulus=Q)
        self._written = self._numbers._written
        self._far = self._numbers._far

    def set_seed(self, seed: int) -> None:
        for each in (self, self._numbers, self._exponents):
            each.seed = seed

    def narrow(self, hashes: Tensor) -> Elements:
        return self._with_own_exponent(hashes.remainder(P))

    def leaf(self, name: Any, shape: Sequence[int]) -> Elements:
        self._numbers.bias, self._numbers.sign = self.bias, self.sign
        numbers = self._numbers.leaf(name, shape)
        return self._pair(numbers, self._exponents.leaf(("exponent", name), shape))

    def compared(self, elements: Elements) -> Elements:
        return self.number_of(elements)

    def compared_instead(self, elements: Elements) -> Elements:
        numbers = self.number_of(elements)
        return torch.where(numbers < P, elements ^ numbers, numbers)

    @staticmethod
    def number_of(elements: Elements) -> Tensor:
        return elements & _LOW

    @staticmethod
    def exponent_of(elements: Elements) -> Tensor:
        return (elements >> 31) & _LOW >> 1

    @staticmethod
    def sign_of(elements: Elements) -> Tensor:
        return elements >> _SIGN & 1

    def _own_exponent(self, numbers: Tensor) -> Tensor:
        """Return the exponent that is a function of a number."""
        return hashing.mix(hashing.of_name("exponent"), [numbers]).remainder(Q)

    def _with_own_exponent(self, numbers: Tensor) -> Elements:
        return self._pair(numbers, self._own_exponent(numbers))

    def _pair(self, numbers: Tensor, exponents: Tensor) -> Elements:
        """Return elements of numbers and exponents. What is no number has none."""
        return torch.where(numbers < P, numbers | exponents << 31, numbers)

    def lift(self, value: Any) -> Elements:
        if isinstance(value, Value):
            return value.elements
        numbers = self._numbers.lift(value)
        return self._pair(numbers, self._exponents.lift(value))

    def not_finite(self, elements: Elements) -> tuple[Tensor, Tensor, Tensor]:
        return super().not_finite(self.number_of(elements))

    def pointwise(self, call: Call) -> Elements:
        return self._with_own_exponent(self._numbers.pointwise(self._part(call, self.number_of)))

    def _negative(self, elements: Elements) -> Elements:
        numbers = self._numbers.prime.negative(self.number_of(elements))
        exponents = self._exponents.prime.negative(self.exponent_of(elements))
        return self._pair(numbers, exponents) | elements & 1 << _SIGN

    def _round(self, elements: Elements, dtype: torch.dtype) -> Elements:
        numbers = self.number_of(elements)
        rounded = self._numbers._round(numbers, dtype)
        return torch.where(rounded == numbers, elements, self._with_own_exponent(rounded))

    def compute(self, call: Call) -> Any:
        if call.base in ("exp", "log"):
            found = self._exp(call) if call.base == "exp" else self._log(call)
            return [self.stored(found, call.result.dtype)]
        if call.base in _CHOICES or call.base == "abs":
            return super().compute(call)
        self._numbers.bias = self.bias
        numbers = self._numbers.compute(self._part(call, self.number_of))
        self.decisions += self._numbers.decisions
        self.few += self._numbers.few
        self._numbers.decisions = self._numbers.few = 0
        self.fewest_roots = min(self.fewest_roots, self._numbers.fewest_roots)
        self.roots = self.roots or self._numbers.roots
        self.masks = self.masks or self._numbers.masks
        if numbers is NotImplemented:
            return NotImplemented
        if call.base not in _BILINEAR:
            return [self._with_own_exponent(each) for each in numbers]
        exponents = self._exponents.compute(self._part(call, self.exponent_of))
        signs, is_lost = self._signs(call), self._loses_exponent(call)
        pairs = []
        for number, exponent, result in zip(numbers, exponents, call.results, strict=True):
            own = self._with_own_exponent(number)
            pair = self._pair(number, exponent) | signs << _SIGN
            pair = torch.where(is_lost | (exponent >= Q), own, pair)
            narrow = self.rounds and BITS.get(result.dtype, 53) < BITS[torch.float32]
            pairs.append(own if narrow else pair)
        return pairs

    def _loses_exponent(self, call: Call) -> Tensor:
        """Return where a result has an exponent that is a function of its number."""
        lost = torch.tensor(False)
        factors = list(call.named.values())[:2]
        is_product = call.base == "mul" and len(values_in(factors)) == 2
        if call.base == "div" and isinstance(factors[1], Value):
            is_product = True
        if is_product:
            for factor in values_in(factors):
                numbers = self.number_of(factor.elements)
                own = self._own_exponent(numbers)
                lost = lost | (self.exponent_of(factor.elements) == own)
        return lost

    def _signs(self, call: Call) -> Tensor:
        """Return the signs of results, those of sums of logarithms with whole factors."""
        signs = [self.sign_of(value.elements) for value in values_in(call.args, call.kwargs)]
        named = call.named
        if not any(bool(each.any()) for each in signs):
            return torch.tensor(0)
        if call.base in ("add", "sub") and named.get("alpha", 1) in (1, -1):
            return signs[0] ^ signs[1] if len(signs) == 2 else signs[0]
        if call.base == "neg":
            return signs[0]
        if call.base == "sum":
            dims = dims_of(call, signs[0].ndim)
            return (signs[0].sum(dims) if dims else signs[0]).reshape(call.result.shape) & 1
        left, right = [*named.values(), None][:2]
        is_scaled = call.base == "mul" or (call.base == "div" and isinstance(left, Value))
        if is_scaled and len(signs) == 1:
            factor = torch.as_tensor(right if isinstance(left, Value) else left).double()
            if call.base == "div":
                return signs[0] & (factor.remainder(1) == 0).long()  # an odd root, or a square one
            # Roots of a negative are negatives, so a half has the sign, too.
            is_odd = [(factor * power).remainder(2) == 1 for power in (1, 2, 4, 8)]
            return signs[0] & torch.stack(is_odd).any(0).long()
        return torch.tensor(0)

    def _part(self, call: Call, part: Callable[[Tensor], Tensor]) -> Call:
        def of_value(argument: Any) -> Any:
            if isinstance(argument, Value):
                return replace(argument, elements=part(argument.elements))
            return argument

        args, kwargs = mapped(of_value, (call.args, call.kwargs))
        return replace(call, args=args, kwargs=kwargs)

    def _exp(self, call: Call) -> Elements:
        elements = self.lift(call.args[0])
        numbers, exponents = self.number_of(elements), self.exponent_of(elements)
        result = torch.ones_like(numbers)
        for bit in range(30):
            power = pow(ROOT, 1 << bit, P)
            result = torch.where((exponents >> bit) & 1 == 1, result * power % P, result)
        result = torch.where(self.sign_of(elements) == 1, P - result, result)
        result = torch.where(self._numbers._vanishes(numbers), 0, result)
        self.masks = self.masks or self._numbers.masks
        result = torch.where(numbers == self.prime.minus_infinity, 0, result)
        result = torch.where(numbers > self.prime.minus_infinity, numbers, result)
        return self._with_own_exponent(result)

    def _log(self, call: Call) -> Elements:
        numbers = self.number_of(self.lift(call.args[0]))
        hashed = self._numbers.pointwise(self._part(call, self.number_of))
        found = self._with_ends_of_log(numbers, hashed)
        is_number = (numbers > 0) & (numbers < P)
        exponents, signs = exponents_of(numbers.where(is_number, 1))
        return torch.where(is_number, self._pair(found, exponents) | signs << _SIGN, found)


_LOW = (1 << 31) - 1
_SIGN = 61
_CHOICES = names("maximum minimum amax amin")
_BILINEAR = names(
    """
    add sub neg mul div mm bmm dot mv sum mean cumsum index_put _unsafe_index_put index_add
    scatter_add embedding_dense_backward convolution convolution_backward
    """
)
