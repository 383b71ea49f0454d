"""Decide in which further runs two programs have to be equal, so that they are not by chance.

Different sums and products have equal elements with a chance of one in a billion, so one run says
enough of them. A comparison has two answers and a root two signs: of these, two programs may have
the same by chance. So they run again, with elements in other orders:

| in the first run | further runs |
|---|---|
| elements are compared or sorted | all elements above all known numbers, all below, and 6 seeds |
| few different elements are compared | 8 seeds more |
| only square roots are taken | all elements above and below, and more seeds for fewer roots |
| one program alone compares with a limit | all elements in each interval next to that limit |

In a field there is one more case. If only one program chooses among certain elements (its
``rivals``), the run is repeated with these elements larger or smaller than all others.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_gtrainer.arithmetic.base import FEW, MOST_RIVALS, Arithmetic

ORDERS = ((0, 1), (0, -1), *((seed, 0) for seed in range(1, 7)))
"""Seeds and biases of further runs: one element decides alike in all with a chance of 1 in 64."""

_ORDERS_OF_FEW = tuple((seed, 0) for seed in range(7, 15))
_MOST_FOR_ROOTS = 8
_LARGEST_KEY = (1 << 62) + (1 << 54)  # above what ``key_of_real`` gives for any number


@dataclass(frozen=True, slots=True)
class Chances:
    """The ways in which results of a run may be equal by chance.

    Attributes:
        decides: elements were compared or sorted.
        decides_few: few elements were compared with each other, or sorted.
        roots: square roots were taken.
        fewest_roots: the least number of different elements of which one operator took roots.
        limits: elements and keys of known numbers that elements were compared with.
    """

    decides: bool = False
    decides_few: bool = False
    roots: bool = False
    fewest_roots: int = FEW
    limits: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, *arithmetics: Arithmetic) -> "Chances":
        return cls(
            any(each.decisions for each in arithmetics),
            any(each.few for each in arithmetics),
            any(each.roots for each in arithmetics),
            min(each.fewest_roots for each in arithmetics),
            tuple(sorted(pair for each in arithmetics for pair in each.limits.items())),
        )


@dataclass(frozen=True, slots=True)
class FurtherRun:
    """A run of both programs in which elements have another order.

    A *key* is the integer by which elements and known numbers are sorted.

    Attributes:
        seed: of the elements.
        bias: all elements are above (1) or below (-1) all known numbers; 0 if among them.
        gaps: intervals of keys, each as its begin and width. Every element lies in one of them;
            without gaps it may lie anywhere.
        is_for_limits: all elements lie next to a limit that only one program has.
        sign: of all inputs, 1 or -1; 0 for inputs of either sign.
    """

    seed: int
    bias: int = 0
    gaps: tuple[tuple[int, int], ...] = ()
    is_for_limits: bool = False
    sign: int = 0

    def set_up(self, arithmetic: Arithmetic, favoured: Tensor | None = None) -> Arithmetic:
        """Give an arithmetic, in which nothing has run, the order of this run, and return it.

        Args:
            favoured: rivals that are to be larger or smaller than all other elements.
        """
        arithmetic.set_seed(self.seed)
        arithmetic.bias, arithmetic.sign = self.bias, self.sign
        arithmetic.gaps = self.gaps
        if favoured is not None:
            arithmetic.favoured = favoured
        return arithmetic


def further_runs(actual: Sequence[Chances], expected: Sequence[Chances]) -> list[FurtherRun]:
    """Return the further runs that two programs need.

    Args:
        actual, expected: of each program its chances by rank.
    """
    keys: dict[int, int] = {}
    for each in (*actual, *expected):
        for element, key in each.limits:
            keys.setdefault(element, abs(key))
    unlike = {keys[element] for element in unlike_limits(actual, expected)}
    # Gaps lie between 0, the limits, and the largest key; a limit and its negative are one here.
    ends = [0, *sorted(set(keys.values())), _LARGEST_KEY]
    gaps, next_to_unlike, between_limits = [], [], []
    for low, high in itertools.pairwise(ends):
        gaps.append((low + 1, max(1, high - low - 1)))
        is_next_to_unlike = low in unlike or high in unlike
        # In the runs with a bias all elements lie in the last gap.
        if not is_next_to_unlike or high == _LARGEST_KEY:
            continue
        next_to_unlike.append(gaps[-1])
        if low > 0:
            between_limits.append(gaps[-1])

    found = []
    for seed, bias in orders(*actual, *expected):
        # With two limits or more, elements are spread over all intervals.
        found.append(FurtherRun(seed, bias, tuple(gaps) if seed and len(gaps) > 2 else ()))
    seeds = [run.seed for run in found if run.seed]
    for gap in between_limits:
        found += [FurtherRun(seed, gaps=(gap,), is_for_limits=True) for seed in seeds]
    # A condition on all elements, such as (x > .3).all(), holds only for one sign.
    for gap, sign in itertools.product(next_to_unlike, (1, -1)):
        found.append(FurtherRun(1, gaps=(gap,), is_for_limits=True, sign=sign))
    return found


def unlike_limits(actual: Sequence[Chances], expected: Sequence[Chances]) -> set[int]:
    """Return the limits that only one of the programs compares elements with."""
    ours = {element for each in actual for element, _ in each.limits}
    theirs = {element for each in expected for element, _ in each.limits}
    return ours ^ theirs


def orders(*chances: Chances) -> tuple[tuple[int, int], ...]:
    """Return seeds and biases of further runs.

    If few elements are compared, the chance that one of them has the same answer in all these runs
    is 1 in 16,000. Where roots are taken, inputs are above 0 in one run and below in another. Signs
    of roots of independent elements agree by chance in 1 of 60,000, of one or two elements in 1 of
    250.
    """
    if any(each.decides for each in chances):
        return ORDERS + (_ORDERS_OF_FEW if any(each.decides_few for each in chances) else ())
    if not any(each.roots for each in chances):
        return ()
    # One number that is a factor of all gives all of them one sign, so inputs of either sign run.
    runs = math.ceil(FEW / min(each.fewest_roots for each in chances))
    return ORDERS[:2] + tuple((seed, 0) for seed in range(1, min(runs, _MOST_FOR_ROOTS)))


def unlike_rivals(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the rivals other than 0 that only one program has; none if there are too many."""
    if max(len(actual), len(expected)) >= MOST_RIVALS:
        return torch.empty(0, dtype=torch.int64)
    found, counts = torch.cat([actual, expected]).unique(return_counts=True)
    return found[(counts == 1) & (found != 0)]


def add_branches(arithmetic: Arithmetic, other: Arithmetic) -> None:
    """Add the branches that a program has taken in another run."""
    for where, numbers in other.branches.items():
        arithmetic.branches.setdefault(where, set()).update(numbers)
