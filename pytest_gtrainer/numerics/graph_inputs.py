"""Made-up inputs of graphs: ordinary numbers, and values that those never reach.

A pass that inserts ``clamp(-100, 100)``, or deletes one, changes no bit of normally distributed
numbers. So two graphs that are equal on ordinary inputs are run again, once for each ``Extreme``,
with some elements of each floating-point input replaced. Integer inputs stay as they are, because
they may be indices.

An infinity or a NaN in every weight makes every result of a training step NaN, and then nothing can
differ. If that happens, one input alone gets the values. If still every result is NaN,
``try_extremes`` reports it.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer.numerics.graph_run import CAN_BE_EXTREME

MOST_ALONE = 4  # how many inputs are tried one at a time


class Extreme(Enum):
    """A kind of values, in words for messages."""

    LARGE = "large numbers"  # finite, also in products of a few: 150 to 20,000
    TINY = "zeros of both signs and subnormal numbers"
    INFINITE = "infinities"
    NAN = "NaN"

    def values(self, dtype: torch.dtype) -> list[float]:
        """The values that replace others, each of them a number of ``dtype``."""
        limits = torch.finfo(dtype)
        positive = {
            Extreme.LARGE: [150.0, 1e3, 2e4],
            Extreme.TINY: [0.0, limits.smallest_normal / 2, limits.smallest_normal],
            Extreme.INFINITE: [torch.inf],
            Extreme.NAN: [torch.nan],
        }[self]
        return (
            positive
            if self is Extreme.NAN
            else [sign * value for value in positive for sign in (1, -1)]
        )

    def count(self, numel: int) -> int:
        """Return how many of ``numel`` elements are replaced. A few NaNs leave rows and columns
        without one.
        """
        share = {Extreme.LARGE: 3, Extreme.TINY: 2}.get(self, 16)
        most = numel if share < 16 else 4
        return min(max(numel // share, 1), most, numel)


def try_extremes(inputs: Sequence[Any], check: Callable[[str, list[Any]], bool]) -> list[str]:
    """Call ``check(description, changed inputs)`` for each kind of extreme values.

    Args:
        inputs: of a graph; an element may be a list, one value for each rank.
        check: compares two graphs on these inputs, and returns whether any result was a number. On
            ranks all must return the same.

    Returns:
        a description of each kind of values with which every result was NaN, whichever input had
        them.
    """
    silent: list[str] = []
    places = [at for at, value in enumerate(inputs) if _takes_extremes(value)]
    if not places:
        return silent
    # A training step begins with parameters and ends with its batch: the first and the last input
    # differ most.
    alone = list(dict.fromkeys([places[0], places[-1], *places[1:-1]]))[:MOST_ALONE]
    for extreme in Extreme:
        attempts = [places] if len(places) == 1 else [places, *([place] for place in alone)]
        for chosen in attempts:
            where = "some inputs" if chosen is places else f"graph input {chosen[0]} alone"
            if check(f"inputs with {extreme.value} in {where}", _changed(inputs, chosen, extreme)):
                break
        else:
            silent.append(f"inputs with {extreme.value}")
    return silent


def _changed(inputs: Sequence[Any], chosen: Sequence[int], extreme: Extreme) -> list[Any]:
    """Inputs of which the chosen ones are copies with extreme values; what was one tensor in two
    places stays one.
    """
    made: dict[int, Tensor] = {}

    def change(value: Any, place: int) -> Any:
        if isinstance(value, list):
            return type(value)([change(each, place) for each in value])
        if not _takes_extremes(value):
            return value
        if id(value) not in made:
            made[id(value)] = replace_elements(value, extreme, seed=place)
        return made[id(value)]

    return [change(value, at) if at in chosen else value for at, value in enumerate(inputs)]


def replace_elements(tensor: Tensor, extreme: Extreme, *, seed: int) -> Tensor:
    """A copy of a floating-point or complex tensor with extreme values at places drawn from
    ``seed``.

    Replicas of one shape on several ranks get the same values at the same places.
    """
    result = tensor.detach().clone()
    parts = torch.view_as_real(result) if result.is_complex() else result
    if parts.numel() == 0:
        return result
    generator = torch.Generator().manual_seed(seed)
    values = extreme.values(parts.dtype)
    places = torch.randperm(parts.numel(), generator=generator)[: extreme.count(parts.numel())]
    first = seed % len(values)  # a scalar gets one value only: not the same for each input
    chosen = torch.tensor(
        [values[(first + at) % len(values)] for at in range(len(places))], dtype=torch.float64
    )
    chosen = chosen.to(parts.dtype).to(parts.device)
    if parts.dim() == 0:
        parts.copy_(chosen[0])
    else:
        parts[torch.unravel_index(places.to(parts.device), parts.shape)] = chosen
    return result


def _takes_extremes(value: Any) -> bool:
    if isinstance(value, list):
        return any(_takes_extremes(each) for each in value)
    if not isinstance(value, Tensor) or type(value) not in (Tensor, torch.nn.Parameter):
        return False
    return value.dtype in CAN_BE_EXTREME and value.layout is torch.strided and value.numel() > 0


def sample_tensor(
    like: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    generator: torch.Generator,
    *,
    small: float = 1.0,
) -> Tensor:
    """Ordinary values for a graph input: normally distributed numbers; integers are 0 or 1, which
    may be indices.

    Args:
        like: a tensor with the dtype and device.
        shape, strides: of the result, in elements.
        small: a factor of every fourth row, as 0.001, so that what is added to a small number
            shows.
    """
    if like.dtype.is_floating_point or like.dtype.is_complex:
        wide = torch.complex128 if like.dtype.is_complex else torch.float64
        drawn = torch.randn(list(shape), dtype=wide, generator=generator)
        if drawn.dim() > 1:
            drawn[..., 1::4, :] *= small
    else:
        drawn = torch.randint(0, 2, list(shape), generator=generator)
    empty = torch.empty_strided(list(shape), list(strides), dtype=like.dtype)
    return empty.copy_(drawn).to(like.device)
