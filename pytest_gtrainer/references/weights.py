"""The weights with which the batches of all data coordinates count in one gradient.

The gradient of a step is a sum of those of the batches, each times a number. In exact arithmetic
these numbers are the solution of linear equations, one for each element of the gradient.
"""

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from pytest_gtrainer.arithmetic.prime import P, Prime

_MOST_EQUATIONS = 64


def spell_weights(found: Tensor, wanted: Tensor, of_batches: Sequence[Tensor]) -> str:
    """Return how much each batch counts in a gradient, and should, in words; "" if nobody knows.

    Args:
        found, wanted: the gradient, and the expected one.
        of_batches: the gradient of each batch by itself.
    """
    sides = [weights_of(gradient, of_batches) for gradient in (found, wanted)]
    if sides[0] is None or sides[1] is None or sides[0] == sides[1]:
        return ""
    own, expected = (", ".join(map(str, side)) for side in sides if side is not None)
    return f"the gradients of the {len(of_batches)} batches count {own}, expected {expected}"


def weights_of(gradient: Tensor, of_batches: Sequence[Tensor]) -> list[Fraction] | None:
    """Return the numbers by which ``of_batches`` add up to a gradient.

    None if they do not, if several solutions do, or if one is no small fraction.
    """
    field = Prime(P)
    columns = [each.flatten() for each in (*of_batches, gradient)]
    equations = torch.stack(columns, 1)
    if bool((equations >= P).any()):
        return None
    is_known = (equations[:, :-1] != 0).any(1)
    solution = _solve(equations[is_known].unique(dim=0)[:_MOST_EQUATIONS].tolist())
    if solution is None:
        return None
    total = torch.zeros_like(gradient)
    for weight, each in zip(solution, of_batches, strict=True):
        total = field.add(total, field.multiply(each, torch.tensor(weight)))
    if not torch.equal(total, gradient):
        return None
    fractions = []
    for weight in solution:
        fraction = field.small_fraction(weight) if weight else Fraction(0)
        if fraction is None:
            return None
        fractions.append(fraction)
    return fractions


def _solve(rows: list[list[int]]) -> list[int] | None:
    """Return the solution of linear equations modulo ``P``; None if there are several.

    Args:
        rows: the coefficients of each equation, and its right side.
    """
    unknowns = len(rows[0]) - 1 if rows else 0
    for column in range(unknowns):
        pivots = [place for place in range(column, len(rows)) if rows[place][column]]
        if not pivots:
            return None
        rows[column], rows[pivots[0]] = rows[pivots[0]], rows[column]
        inverse = pow(rows[column][column], -1, P)
        rows[column] = [inverse * each % P for each in rows[column]]
        for place, row in enumerate(rows):
            if place == column or not row[column]:
                continue
            times = row[column]
            own = zip(row, rows[column], strict=True)
            rows[place] = [(each - times * pivot) % P for each, pivot in own]
    return [row[-1] for row in rows[:unknowns]] or None
