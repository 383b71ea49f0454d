"""Terms: an element is a fingerprint of the expression that makes it.

Equal fingerprints mean the same operators on the same operands, with additions in the same order.
Real kernels then give the same bits for any numbers, if their results depend on nothing else.
``Terms(strict=True)`` assumes that only of one kernel that is called with the same shapes, strides
and dtypes, for an element at the same place; ``Terms(strict=False)`` of all kernels.
"""

from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer.arithmetic import hashing
from pytest_gtrainer.arithmetic.base import Arithmetic, Call, Elements, dims_of, values_in
from pytest_gtrainer.arithmetic.operators import (
    COMMUTATIVE,
    CORRECTLY_ROUNDED,
    MOVES,
    is_pointwise,
    names,
)
from pytest_gtrainer.arithmetic.values import NoMeaning, Value, spell

_REDUCTIONS = names("amax amin mean prod sum var")
_PRODUCTS = names("bmm dot mm mv")


class Terms(Arithmetic):
    """Fingerprints of expressions; 0.0 has the fingerprint 0."""

    def __init__(self, *, strict: bool, seed: int = 0) -> None:
        super().__init__(seed)
        self.strict = strict
        self.takes_apart = not strict
        self.kind = "identical" if strict else "other kernels"
        self._not_finite = self.lift(torch.tensor([-torch.inf, torch.inf, torch.nan]))

    def narrow(self, hashes: Tensor) -> Elements:
        return hashes

    def lift(self, value: Any) -> Elements:
        if isinstance(value, Value):
            return value.elements
        if not isinstance(value, Tensor):
            if isinstance(value, complex):
                raise NoMeaning(f"the complex number {value}")
            value = torch.tensor(float(value), dtype=torch.float64)
        if value.is_complex():
            raise NoMeaning("complex numbers")
        bits = value.double().contiguous().view(torch.int64)
        # Fingerprints of numbers keep clear of small integers, so 1.0 is not the place 1.
        return torch.where(bits == 0, 0, hashing.mix(hashing.of_name("number"), [bits]))

    def order(self, elements: Elements) -> Tensor:
        # -inf comes last, so a padded place, which is none of the tensor, is never chosen.
        limits = torch.iinfo(torch.int64)
        salt = self.lift(self.seed + 1.0)
        salted = hashing.scramble(elements ^ salt) - hashing.scramble(salt)
        minus, plus, _ = self.not_finite(elements)
        return torch.where(plus, limits.max, torch.where(minus, limits.min, salted))

    def _note_limits(self, elements: Elements, known: Any, keys: Tensor) -> None:
        super()._note_limits(elements, known, keys)
        if self.limits:
            # Expressions have no order in which all limits could be met.
            self._note_rivals(hashing.mix(0, torch.broadcast_tensors(elements, self.lift(known))))

    def not_finite(self, elements: Elements) -> tuple[Tensor, Tensor, Tensor]:
        minus, plus, nan = self._not_finite.unbind()
        return elements == minus, elements == plus, elements == nan

    def rounded(self, value: Value, dtype: torch.dtype) -> Elements:
        seed = hashing.of_name("round", str(dtype))
        if not (value.dtype.is_floating_point and dtype.is_floating_point):
            seed = hashing.of_name("convert", str(value.dtype), str(dtype))
        hashed = hashing.mix(seed, [value.elements])
        return torch.where(value.elements == 0, 0, hashed)

    def tag(self, call: Call) -> Any:
        if not self.strict or call.base in CORRECTLY_ROUNDED:
            return call.base
        return call.base, spell(call.named)

    def compute(self, call: Call) -> Any:
        if call.base in _PRODUCTS:
            return [self._product(call)]
        if call.base in _REDUCTIONS and values_in(call.args[:1]):
            value = call.args[0]
            dims = dims_of(call, value.elements.ndim)
            options = {name: each for name, each in call.named.items() if name in _OF_REDUCTIONS}
            seed = hashing.of_name(self.tag(call), spell(options), str(call.result.dtype))
            folded = hashing.mix(seed, [hashing.fold(value.elements, dims)])
            return [self._at_place(folded.reshape(call.result.shape))]
        if call.base in ("add", "sub", "mul", "div", "maximum", "minimum"):
            return [self._binary(call)]
        is_atom = self.strict or call.base in ("neg", "reciprocal", "sqrt")
        is_atom = is_atom and call.base not in MOVES  # torch marks clone as pointwise
        if is_atom and is_pointwise(call.operator) and len(call.results) == 1:
            elements = self.pointwise(call)
            # Of a vector kernel the rest of a row may be computed by scalar code.
            is_exact = call.base in CORRECTLY_ROUNDED
            return [elements if is_exact else self._at_place(elements)]
        return NotImplemented

    def _product(self, call: Call) -> Elements:
        left, right = (self.lift(operand) for operand in call.args[:2])
        rows = hashing.fold(left, [-1])
        columns = hashing.fold(right, [-2 if right.ndim > 1 else -1])
        dtype = call.args[0].dtype
        seed = hashing.of_name(self.tag(call) if self.strict else "matmul", str(dtype))
        if right.ndim > 1:
            rows, columns = rows.unsqueeze(-1), columns.unsqueeze(-2)
        return self._at_place(hashing.mix(seed, [rows, columns], commutes=not self.strict))

    def _at_place(self, elements: Elements) -> Elements:
        """Let the place count: a kernel may add another way at the edge of a block."""
        if not self.strict:
            return elements
        places = torch.arange(elements.numel()).view(elements.shape)
        return hashing.scramble(elements + places)

    def _binary(self, call: Call) -> Elements:
        """Return an addition, product or quotient, or the larger or smaller of two."""
        left, right = list(call.named.values())[:2]
        base, dtype = call.base, str(call.result.dtype)
        options = [call.named.get("alpha", 1), call.named.get("rounding_mode")]
        is_plain = options == [1, None]
        is_number = isinstance(right, int | float)
        if base == "div" and is_plain and is_number and _is_power_of_two(right):
            base, right = "mul", 1 / right  # exact in both spellings
        is_same = isinstance(left, Value) and left.dtype == call.result.dtype
        if base == "mul" and is_number and right == 1 and is_same:
            return left.elements
        operands = torch.broadcast_tensors(self.lift(left), self.lift(right))
        dtypes = {str(each.dtype) for each in (left, right) if isinstance(each, Value | Tensor)}
        mixed = sorted(dtypes) if len(dtypes) > 1 else []
        seed = hashing.of_name(base, spell(options), mixed, dtype)
        commutes = is_plain and base in COMMUTATIVE
        if self.strict and base in ("maximum", "minimum"):
            commutes = False  # of 0.0 and -0.0 a kernel returns one by its place
        return hashing.mix(seed, operands, commutes=commutes)


_OF_REDUCTIONS = ("correction", "unbiased", "dtype")


def _is_power_of_two(number: float) -> bool:
    if number == 0 or abs(number) == float("inf") or number != number:
        return False
    # A larger power, or its inverse, is no number of a narrower dtype.
    ratio = abs(float(number)).as_integer_ratio()
    return all(part & (part - 1) == 0 and part <= 2**14 for part in ratio)
