"""Complex numbers: pairs of real ones, a real and an imaginary part.

The memory of a complex tensor is that of its parts, one after the other, so its shadow is that of
``torch.view_as_real``. An operator on abstract complex numbers is made of real ones here. What is
not here is unknown.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pytest_gtrainer._torch.values import pytree, schema
from pytest_gtrainer.arithmetic.operators import FILLED, MOVES
from pytest_gtrainer.arithmetic.values import NoMeaning

Pair: TypeAlias = tuple[Any, Any]
"""Parts of a number or a tensor; of a real one the second is None."""

MAKERS = ("complex", "polar")
"""They make complex numbers of real ones."""

ROUND_NOTHING = MOVES | {"_conj_physical", "_to_copy", "complex", "conj_physical", "neg"}
"""They compute each part alone, and as the operator of the same name on real numbers does."""


def compute_by_parts(operator: Any, base: str, named: dict[str, Any]) -> Pair:
    """Return both parts of an operator's result, by operators on real tensors.

    Args:
        named: its arguments by the names of the schema.

    Raises:
        NoMeaning: it is not known for complex numbers.
    """
    if base in MOVES:
        return _move(operator, named)
    if base not in FORMULAS:
        raise NoMeaning(f"{operator} of complex numbers")
    found: Pair = FORMULAS[base](**named)
    return found


def pair_of(value: Any) -> Pair:
    """Return the parts of a tensor or a number."""
    if isinstance(value, complex):
        return value.real, value.imag
    if not isinstance(value, Tensor) or not value.is_complex():
        return value, None
    if value.is_conj():  # a view, whose memory holds the numbers before
        real, imaginary = torch.view_as_real(value.conj()).unbind(-1)
        return real, -imaginary
    real, imaginary = torch.view_as_real(value).unbind(-1)
    return real, imaginary


def _move(operator: Any, named: dict[str, Any]) -> Pair:
    """Move both parts alike."""
    if named.get("reduce"):
        raise NoMeaning(f"{operator} reduces complex numbers")
    for name, value in named.items():
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        is_number = isinstance(value, int | float | complex) and not isinstance(value, bool)
        if is_real or (is_number and name in FILLED):
            raise NoMeaning(f"{operator} of complex numbers and real ones")
    first, second = (_moved(operator, named, place) for place in (0, 1))
    return first, second


def _moved(operator: Any, named: dict[str, Any], place: int) -> Tensor:
    def part(tensor: Tensor) -> Any:
        return pair_of(tensor)[place] if tensor.is_complex() else tensor

    own = pytree.tree_map_only(Tensor, part, named)
    args, kwargs = [], {}
    for argument in schema(operator).arguments:
        if argument.kwarg_only:
            kwargs[argument.name] = own[argument.name]
        else:
            args.append(own[argument.name])
    moved: Tensor = operator(*args, **kwargs)
    return moved


def _product(operator: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Pair]:
    def multiply(first: Any, second: Any) -> Pair:
        (a, b), (c, d) = pair_of(first), pair_of(second)
        if d is None:
            return operator(a, c), operator(b, c)
        if b is None:
            return operator(a, c), operator(a, d)
        return operator(a, c) - operator(b, d), operator(a, d) + operator(b, c)

    return multiply


def _sum_of_two(sign: int) -> Callable[..., Pair]:
    def add(self: Any, other: Any, alpha: Any = 1) -> Pair:
        (a, b), (c, d) = pair_of(self), pair_of(other)
        if isinstance(alpha, complex):
            raise NoMeaning("a sum with a complex alpha")
        real = a + sign * alpha * c
        if d is None:
            return real, b.expand(real.shape)
        scaled = sign * alpha * d
        return real, scaled if b is None else b + scaled

    return add


def _divide(self: Any, other: Any, rounding_mode: Any = None) -> Pair:
    (a, b), (c, d) = pair_of(self), pair_of(other)
    if d is not None:
        raise NoMeaning("a quotient by complex numbers")
    return a / c, b / c


def _sum(self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Pair:
    real, imaginary = pair_of(self)
    if dtype is not None:
        raise NoMeaning(f"a sum of complex numbers in {dtype}")
    dims = list(range(real.ndim)) if dim is None or dim == [] else dim
    return real.sum(dims, keepdim), imaginary.sum(dims, keepdim)


def _negate(self: Any) -> Pair:
    real, imaginary = pair_of(self)
    return -real, -imaginary


def _conjugate(self: Any) -> Pair:
    real, imaginary = pair_of(self)
    return real, -imaginary


_multiply = _product(torch.mul)
_multiply_matrices = _product(torch.matmul)

FORMULAS: dict[str, Callable[..., Pair]] = {
    "_conj_physical": _conjugate,
    "_to_copy": lambda self, **options: pair_of(self),
    "add": _sum_of_two(1),
    "bmm": lambda self, mat2: _multiply_matrices(self, mat2),
    "complex": lambda real, imag: (real, imag),
    "conj_physical": _conjugate,
    "div": _divide,
    "mm": lambda self, mat2: _multiply_matrices(self, mat2),
    "mul": lambda self, other: _multiply(self, other),
    "neg": _negate,
    "polar": lambda abs, angle: (abs * angle.cos(), abs * angle.sin()),
    "sub": _sum_of_two(-1),
    "sum": _sum,
}
