"""Compare both sides of a proof in float64, which shows mistakes of an arithmetic.

Elements that are equal although the numbers are far apart are such a mistake. Elements that differ
although the numbers agree for many inputs may be one: then the proof is "unknown".
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer.arithmetic.numbers import Numbers
from pytest_gtrainer.arithmetic.values import NoMeaning

AGREES = 2.0**-38
"""Largest difference of equal functions, relative to the largest number of a result.

Float64 has 53 bits. ``exp(x) - 1`` and ``log(1 + x)`` lose 13 of them for the smallest inputs that
are drawn, and long sums one or two more. A factor of 1 + 2**-30 is 256 times as far away.
"""

APART = {"identical": 1e-6, "other kernels": 1e-6, "reordered": 1e-6, "rounds elsewhere": 1e-3}
"""By kind, the smallest relative difference that no rounding explains.

In float64 no cast rounds, but a constant such as 0.1 may be rounded to its own dtype.
"""

_NOISE = 16
"""Roundings (units of eps) of the largest input that count as equal."""

_ROUNDINGS = 8
"""A difference is noise up to this many times the one that other roundings make on one side."""

_FAR = 1000 * _ROUNDINGS
"""A difference of more than this many times the first try's roundings needs no further tries."""

_KEPT = 2.0**-12
"""Share of a result by which both sides may differ in their own dtypes without a lost digit."""

_LOST = 256
"""A side loses digits if its rounding errors are this many times those of the other side."""

# Draws of inputs that are compared: few for a large program. A draw of one operator is a call.
_FEWEST_DRAWS, _MOST_DRAWS, _MOST_CALLS = 8, 100, 3000
_OTHER_DRAWS = (2, 5, 8, 11)
"""Seeds of draws whose inputs have other sizes."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of two sides, relative to the largest number of a result.

    Attributes:
        size: NaN if there are no finite numbers to compare; infinite if results are missing or of
            other shapes, or if known ones have other bits.
        result: where it is, in words.
    """

    size: float = 0.0
    result: str = ""

    @property
    def agrees(self) -> bool:
        return not self.size > AGREES

    def is_noise(self, roundings: "Difference") -> bool:
        """Return whether rounding errors that cancellation has made visible may explain it.

        Args:
            roundings: the difference of each side from itself with other last digits.
        """
        return self.size <= _ROUNDINGS * roundings.size


def largest(differences: Iterable[Difference]) -> Difference:
    """Return the largest of several differences; one of size NaN only if all others agree."""
    found = Difference()
    for each in differences:
        if math.isnan(found.size):
            is_larger = not each.agrees  # what overflows hides no difference elsewhere
        else:
            is_larger = each.size > found.size or (found.agrees and math.isnan(each.size))
        if is_larger:
            found = each
    return found


def difference(
    actual: Mapping[Any, Tensor], expected: Mapping[Any, Tensor], largest_input: float
) -> Difference:
    """Compare results by name and rank: float64, or known numbers of any other dtype.

    A result near zero has the rounding errors of the large inputs that it is computed from, such as
    the entropy of a distribution that is almost certain.
    """
    noise = _NOISE * torch.finfo(torch.float64).eps * largest_input
    if actual.keys() != expected.keys():
        return Difference(math.inf, "a result of one side")
    found = []
    for key, wanted in expected.items():
        found.append(Difference(_distance(actual[key], wanted, noise), _spell_key(key)))
    return largest(found)


def _spell_key(key: Any) -> str:
    name, rank = key
    return str(name) if rank is None else f"{name}, rank {rank}"


def _distance(found: Tensor, wanted: Tensor, noise: float) -> float:
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return math.inf
    if wanted.dtype != torch.float64:
        return 0.0 if torch.equal(found, wanted) else math.inf
    # Where both are NaN nothing is known, which says nothing of the rest.
    is_other = (found != wanted) & ~(found.isnan() & wanted.isnan())
    if not bool(is_other.any()):
        return 0.0
    errors = (found - wanted).abs()
    # What overflows on one side says nothing of its own place. The other places are compared.
    overflows = is_other & ~errors.isfinite()
    error = _size(errors[is_other & ~overflows])
    if error <= noise:
        return math.nan if bool(overflows.any()) else 0.0
    return error / max(_size(wanted[~overflows]), error)


Compare = Callable[[Numbers], Difference]
"""Run both sides on the numbers of a draw, and compare them on all ranks.

If the numbers are ``shaken``, compare each side with itself under other roundings.
"""


def agreement(compare: Compare, *, decides: bool) -> str:
    """Say how closely both sides agree for the numbers of many draws; "" if they do not.

    Some draws do not count: those in which rounding leaves too few digits or numbers overflow, and
    those in which a program chooses among equal numbers, such as saturated ones.

    Args:
        compare: as above.
        decides: a program compares or chooses. Then small programs run for more draws, since a
            mistake may be in a branch that numbers seldom take.
    """
    most = Difference()
    has_tables = False
    count, draw, draws = 0, 1, _FEWEST_DRAWS
    while draw <= draws:
        numbers = Numbers(draw)
        try:
            found = compare(numbers)
            if not found.agrees and numbers.has_digits:
                found = compare(Numbers(draw, keeps_digits=True))
                has_tables = has_tables or found.agrees
            is_noise = not found.agrees and _is_noise(found, draw, compare, decides=decides)
        except NoMeaning:
            return ""

        if not found.agrees and not is_noise:
            return ""
        if not math.isnan(found.size) and not is_noise:
            count += 1
            most = largest([most, found])
        if draw == 1 and decides:
            draws = min(_MOST_DRAWS, _FEWEST_DRAWS + _MOST_CALLS // max(1, numbers.calls))
        draw += 1

    if not count:
        return ""
    says = f"both agree in float64 to {max(most.size, 1e-16):.0e} for {count} inputs"
    if has_tables:
        return f"{says}: known numbers that they compute, such as tables, are rounded otherwise"
    return f"{says}, and this arithmetic does not know that they are equal"


def _is_noise(found: Difference, draw: int, compare: Compare, *, decides: bool) -> bool:
    """Return whether rounding, or a choice among equal numbers, may explain a difference."""
    for seed in range(1, 5):
        roundings = compare(Numbers(draw, shaken=seed))
        if found.is_noise(roundings):
            return True
        # One try may choose as the kernels did. Where nothing is chosen all tries move alike.
        if not decides and found.size > _FAR * roundings.size:
            return False
    return False


def contradiction(
    kind: str, compare: Compare, *, reads: bool = False, draws_once: bool = False
) -> str:
    """Say how float64 numbers contradict a kind of equal; "" if they do not.

    Args:
        reads: a program reads numbers, so the proof holds only for those that are given.
        draws_once: do not look at inputs of other sizes.
    """
    draws = [0] if reads else [1]
    while draws:
        draw = draws.pop(0)
        numbers = Numbers(draw)
        found = compare(numbers)
        allowed = APART[kind]
        if kind == "rounds elsewhere":
            # In bfloat16 a constant such as 0.1 is far from its number.
            allowed = max(allowed, 8 * numbers.coarsest)
        is_apart = found.size > allowed
        if is_apart and not found.is_noise(compare(Numbers(draw, shaken=1))):
            return (
                f"{found.result} is {found.size:.0e} apart in float64, though the elements are "
                "equal: an operator is taken for another one, or no run takes the branch in which "
                "they differ"
            )
        # Inputs of other sizes take other branches. Only small programs run again.
        if draw == 1 and not draws_once and numbers.calls < _MOST_CALLS // len(_OTHER_DRAWS):
            draws += _OTHER_DRAWS
    return ""


def lost_digits(
    own: Sequence[Mapping[Any, Tensor]],
    exact: Sequence[Mapping[Any, Tensor]],
    *,
    coarsest: float = 0.0,
) -> str:
    """Say which result only one side computes with lost digits; "" if there is none.

    ``(x + 2**23) - 2**23`` is x in a field and in float64, and rounds x to whole numbers.

    Args:
        own: of each side the results in their own dtypes, by name and rank.
        exact: the same of the same inputs, in float64.
        coarsest: eps of a dtype that results are computed in, if that is not their own.
    """
    sizes = [_size(wanted.double()) for wanted in own[1].values()]
    largest_of_all = max(sizes, default=0.0)
    for (key, wanted), size in zip(own[1].items(), sizes, strict=True):
        found, ulp = own[0][key], max(coarsest, torch.finfo(wanted.dtype).eps)
        # A result near zero may be what large numbers leave, and then has their errors.
        allowed = max(_KEPT, 8 * ulp) * (size + largest_of_all)
        if _size(found.double() - wanted.double()) <= allowed:
            continue
        errors = [
            _size(numbers[key].double() - true[key].double())
            for numbers, true in zip(own, exact, strict=True)
        ]
        if max(errors) > _LOST * max(min(errors), ulp * size):
            loses = "the actual" if errors[0] > errors[1] else "the expected"
            return (
                f"{loses} program alone loses digits of {_spell_key(key)}: with the numbers that "
                f"were tried it is {max(errors) / max(size, ulp):.0e} off its value in float64"
            )
    return ""


def _size(tensor: Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def describe_unchecked(error: NoMeaning) -> str:
    """Say that float64 numbers were not compared, because they cannot be computed."""
    return f"float64 numbers would agree, but they cannot be computed: {error}"
