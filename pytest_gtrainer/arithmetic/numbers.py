"""Numbers: an element is a float64 number, as its bits, and nothing is rounded to another dtype.

Every operator runs its own kernel on float64 tensors, and comparisons decide as the numbers do. So
it proves nothing, and contradicts what another arithmetic has proven by a mistake of its own.
"""

from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer._torch.random_states import without_modes
from pytest_gtrainer._torch.values import schema
from pytest_gtrainer.arithmetic import hashing
from pytest_gtrainer.arithmetic.base import Arithmetic, Call, Elements, mapped
from pytest_gtrainer.arithmetic.operators import CASTS, ROUND_NOTHING, SORTS, is_pointwise
from pytest_gtrainer.arithmetic.values import NoMeaning, Value
from pytest_gtrainer.graph.nodes import tensors_in

_SMALL, _LARGE = 2.0**-13, 2.0**13
"""Sizes of inputs: below the most common limits and above them. Products of two, and ``exp`` of
what is left of them, still keep a third of the digits of float64."""


class Numbers(Arithmetic):
    """Float64 numbers: in draw 0 those that are given, in draw 1 others near them.

    In each third draw all inputs are between -2 and 2, so choices go many ways. In the others every
    input is small, large, of one sign, or near what is given, by chance.

    Attributes:
        shaken: above 0 the last digit of what each operator computes is another one, by chance, and
            by this seed another one of equal numbers comes first. So a program shows how many
            digits its cancellations leave, and whether it goes on by one of equal numbers.
        calls: how many operators have run.
        largest: the largest number of all inputs.
        narrowest: the largest epsilon of the dtypes that operators return.
    """

    kind = "numbers"
    rounds = False

    def __init__(self, draw: int = 0, shaken: int = 0, keeps_digits: bool = False) -> None:
        super().__init__(draw)
        self.shaken, self.keeps_digits = shaken, keeps_digits
        self.calls = 0
        self.largest = self.narrowest = 0.0

    def settings(self) -> tuple[Any, ...]:
        return (*super().settings(), self.shaken)

    def of_input(self, name: Any, tensor: Tensor) -> Elements:
        """Write the numbers of a draw to an input, and return its elements.

        Equal names have equal numbers. In draw 1 those that are given are changed by a few percent:
        so zeros, and numbers that are equal, are no special case of what a program computes.
        """
        if not self.seed:
            return self.lift(tensor)
        with without_modes(), torch.no_grad():
            given = tensor.double()
            is_positive = not bool((given < 0).any())
            key = hashing.mix(
                hashing.of_name("number", self.seed, name),
                [torch.arange(1, given.numel() + 1)],
            )
            drawn = (key.remainder(2**31) / 2.0**30 - 1).view(given.shape)  # between -1 and 1
            style = hashing.of_name("style", self.seed, name) % 6
            if self.seed == 1 or (self.seed % 3 == 1 and style < 2):
                if is_positive:
                    drawn = drawn.abs()
                size = given[given.isfinite()].abs().mean().nan_to_num() or 1.0
                drawn = torch.where(given == 0, drawn * size, given * (1 + drawn / 8))
            elif self.seed % 3 == 2 or style < 2:
                drawn = 2 * drawn
            else:
                away = drawn.abs() + 1
                drawn = (drawn * _SMALL, drawn * _LARGE, away * _LARGE, -away * _LARGE)[style - 2]
            tensor.detach().copy_(drawn)
            finite = torch.where(drawn.isfinite(), drawn, 0.0)
            if finite.numel():
                self.largest = max(self.largest, float(finite.abs().max()))
            return self.lift(tensor)

    def narrow(self, hashes: Tensor) -> Elements:
        return self.lift(hashes.remainder(2**31) / 2.0**30 - 1)

    def lift(self, value: Any) -> Elements:
        if isinstance(value, Value):
            return value.elements
        if isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex()):
            raise NoMeaning("complex numbers")
        return torch.as_tensor(value).double().view(torch.int64)

    def order(self, elements: Elements) -> Tensor:
        raise NoMeaning("an order of numbers")  # kernels compare

    def not_finite(self, elements: Elements) -> tuple[Tensor, Tensor, Tensor]:
        numbers = numbers_of(elements)
        return numbers == -torch.inf, numbers == torch.inf, numbers.isnan()

    def rounded(self, value: Value, dtype: torch.dtype) -> Elements:
        return value.elements

    def compute(self, call: Call) -> Any:
        return NotImplemented

    def by_kernel(self, call: Call) -> list[Tensor]:
        """Run an operator on float64 numbers. Results of other dtypes are known numbers."""
        self.calls += 1
        if call.base in CASTS and call.result.is_floating_point():
            self.coarsest = max(self.coarsest, torch.finfo(call.result.dtype).eps)
        for result in call.results:
            if result.is_floating_point():
                self.narrowest = max(self.narrowest, torch.finfo(result.dtype).eps)
        named = call.named
        args, kwargs = mapped(_in_float64, (tuple(call.args), dict(call.kwargs)))
        if self.shaken and call.base in SORTS and isinstance(call.args[0], Value):
            # The sigmoid of all large numbers is 1: any of them may come first.
            args = (_without_ties(args[0], self.shaken), *args[1:])
        if "eps" in named and named["eps"] is None:
            kwargs["eps"] = torch.finfo(call.result.dtype).eps  # by default that of the dtype
            args = args[: list(named).index("eps")]
        try:
            found = tensors_in(call.operator(*args, **kwargs))
        except Exception as error:
            raise NoMeaning(f"{call.operator} has no kernel for float64") from error
        results = []
        for each in found:
            if each.is_floating_point():
                each = each.double().view(torch.int64)
                if self.shaken and call.base not in ROUND_NOTHING:
                    each = _shaken(each, hashing.of_name("digit", call.base))
            results.append(each)
        return results


def _without_ties(numbers: Tensor, seed: int) -> Tensor:
    """Return numbers of which equal ones differ in their last digits."""
    if not numbers.is_floating_point():
        return numbers
    places = torch.arange(numbers.numel()).view(numbers.shape)
    digits = hashing.mix(hashing.of_name("tie", seed), [places]).remainder(64).double() - 31.5
    float64 = torch.finfo(torch.float64)
    apart = numbers * (1 + digits * float64.eps) + digits * float64.tiny
    return torch.where(apart.isfinite(), apart, numbers)


def _shaken(elements: Elements, seed: int) -> Elements:
    """Return numbers with another last digit."""
    numbers = numbers_of(elements)
    sign = ((hashing.mix(seed, [elements]) & 2) - 1).double()
    shaken = numbers * (1 + sign * torch.finfo(torch.float64).eps)
    return torch.where(shaken.isfinite(), shaken, numbers).view(torch.int64)


def numbers_of(elements: Elements) -> Tensor:
    """Return the float64 numbers that elements stand for."""
    return elements.view(torch.float64)


def in_float64(operator: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator computes of known numbers, in float64."""
    args, kwargs = mapped(_in_float64, (tuple(args), dict(kwargs)))
    if not any(tensor.is_floating_point() for tensor in tensors_in(args, kwargs)):
        if is_pointwise(operator):
            args = mapped(_whole_in_float64, args)  # such as a quotient of integers
        elif any(argument.name == "dtype" for argument in schema(operator).arguments):
            kwargs["dtype"] = torch.float64  # such as linspace
    return operator(*args, **kwargs)


def _whole_in_float64(argument: Any) -> Any:
    is_whole = isinstance(argument, Tensor) and argument.dtype != torch.bool
    return argument.double() if is_whole else argument


def _in_float64(argument: Any) -> Any:
    if isinstance(argument, Value):
        if argument.dtype.is_floating_point:
            return numbers_of(argument.elements)
        return argument.elements
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.double()
    if isinstance(argument, torch.dtype) and argument.is_floating_point:
        return torch.float64
    return argument
