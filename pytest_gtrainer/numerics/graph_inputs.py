"""Made-up inputs of graphs: ordinary numbers, and values that those never reach.

A pass that inserts ``clamp(-100, 100)``, or deletes one, changes no bit of normally distributed
numbers. So two graphs that are equal on ordinary inputs are run again, once for each ``Extreme``,
with some elements of each input replaced.

An infinity or a NaN in every weight makes every result of a training step NaN, and then nothing can
differ. If that happens, one input alone gets the values. If still every result is NaN,
``try_extremes`` reports it.

Integers may be indices: an input gets the largest one that the graph takes without an error.
"""

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_gtrainer import facts
from pytest_gtrainer.numerics.bits import span
from pytest_gtrainer.numerics.graph_run import CAN_BE_EXTREME, copies, has_storage

MOST_ALONE = 4  # how many inputs are tried one at a time
INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class InputsRefused(Exception):
    """The graph before the passes raises on made-up inputs; the cause is its error."""


class Extreme(Enum):
    """A kind of values, in words for messages."""

    LARGE = "large numbers"  # finite, also in products of a few: 150 to 20,000
    TINY = "zeros of both signs and subnormal numbers"
    INFINITE = "infinities"
    NAN = "NaN"
    # Small whole numbers: sums and products of them are exact, and equal, too.
    TIES = "equal numbers"
    ALL_INFINITE = "infinities everywhere"
    # As those that a mask hides from first to last: of them a softmax may be NaN.
    ROWS = "rows that are negative and large, or infinite"

    # Ordinary integers are 0 and 1. Modest ones, because a graph may allocate as many elements.
    INTEGERS = "large and negative integers"
    TO_100 = "integers from 2 to 100"
    TO_10 = "integers from 2 to 10"
    TO_3 = "the integers 2 and 3"

    def values(self, dtype: torch.dtype) -> list[float]:
        """Return the values that replace others, each of them a number of ``dtype``."""
        if self in INTEGERS:
            chosen = {
                Extreme.INTEGERS: [1000, -1, 2, -100, 100],
                Extreme.TO_100: [100, 2, 50, 3],
                Extreme.TO_10: [10, 2, 5, 3],
                Extreme.TO_3: [3, 2],
            }[self]
            limits = torch.iinfo(dtype)
            if self is Extreme.INTEGERS and limits.bits <= 16:
                chosen += [limits.max, limits.min]  # where one more wraps
            return [value for value in chosen if limits.min <= value <= limits.max]

        if self is Extreme.NAN:
            return [torch.nan]
        if self is Extreme.TIES:
            return [1.0, 2.0, -1.0]
        if self is Extreme.ALL_INFINITE:
            return [torch.inf]
        if self is Extreme.ROWS:
            return [-2e4, -torch.inf]
        smallest = torch.finfo(dtype).smallest_normal
        positive = {
            Extreme.LARGE: [150.0, 1e3, 2e4],
            Extreme.TINY: [0.0, smallest / 2, smallest],
            Extreme.INFINITE: [torch.inf],
        }[self]
        return [sign * value for value in positive for sign in (1, -1)]

    def count(self, numel: int) -> int:
        """Return how many of ``numel`` elements are replaced; most keep an ordinary number."""
        if self in (Extreme.TIES, Extreme.ALL_INFINITE, Extreme.ROWS):
            return max(numel, 3)  # all values in one run: a scalar has no equal
        if self in (Extreme.INFINITE, Extreme.NAN):
            # Few, which leaves rows and columns without one.
            return min(max(numel // 16, 1), 4, numel)
        return min(max(numel // (2 if self is Extreme.TINY else 3), 1), numel)


INTEGERS = (Extreme.INTEGERS, Extreme.TO_100, Extreme.TO_10, Extreme.TO_3)
"""From the widest to those that most indices may be."""


def try_extremes(inputs: Sequence[Any], check: Callable[[str, list[Any]], bool]) -> list[str]:
    """Call ``check(description, changed inputs)`` for each kind of extreme values.

    There are several calls for a small input, as a scalar, until it has had all values.

    Args:
        inputs: of a graph; an element may be a list, one value for each rank.
        check: compares two graphs on these inputs, and returns whether any result was a number. On
            ranks all must return the same. It raises ``InputsRefused`` if the graph before the
            passes does not take the inputs.

    Returns:
        a description of each kind of values with which every result was NaN, whichever input had
        them. A kind that the graph refuses, whichever input has it, is named in the summary.
    """
    silent: list[str] = []
    places = [at for at, value in enumerate(inputs) if _has_dtype(value, CAN_BE_EXTREME)]
    # A training step begins with parameters and ends with its batch: the first and the last input
    # differ most.
    alone = list(dict.fromkeys([*places[:1], *places[-1:], *places[1:-1]]))[:MOST_ALONE]
    for extreme in Extreme:
        if extreme in (*INTEGERS, Extreme.ALL_INFINITE) or not places:
            continue
        attempts = [(places, "some inputs")]
        if len(places) > 1:
            attempts += [([place], f"graph input {place} alone") for place in alone]
        is_number, all_refused = False, True
        for chosen, where in attempts:
            try:
                is_number = _check_values(inputs, chosen, extreme, where, check)
                all_refused = False
            except InputsRefused as error:
                refusal = _refusal_of_one_process(error)
            if is_number:
                break
        if all_refused:
            _note_refused(f"no input has had {extreme.value}: the graph refuses them", refusal)
        elif not is_number:
            silent.append(f"inputs with {extreme.value}")

    # Among a few infinities there may be none where an element counts.
    for place in alone[:2]:
        where = f"graph input {place} alone"
        try:
            _check_values(inputs, [place], Extreme.ALL_INFINITE, where, check)
        except InputsRefused as error:
            refusal = _refusal_of_one_process(error)
            what = f"graph input {place} has not had {Extreme.ALL_INFINITE.value}"
            _note_refused(f"{what}: the graph refuses them", refusal)
    _try_integers(inputs, check)
    return silent


def _ranks_run() -> bool:
    """Return whether a graph that raises on one rank leaves others waiting in a collective."""
    return dist.is_initialized() and dist.get_backend() != "fake" and dist.get_world_size() > 1


def _refusal_of_one_process(error: InputsRefused) -> BaseException | None:
    """Return the error of the graph; on ranks raise the refusal, as others may not refuse."""
    if _ranks_run():
        raise error
    return error.__cause__


def _note_refused(what: str, refusal: BaseException | None) -> None:
    first_line = str(refusal).partition("\n")[0]
    facts.emit("idle", what=f"{what} ({type(refusal).__name__}: {first_line})")


def _try_integers(inputs: Sequence[Any], check: Callable[[str, list[Any]], bool]) -> None:
    """Give each integer input the widest of ``INTEGERS`` that the graph takes.

    An index out of range is an error of one rank, for which others would wait in a collective; and
    one on a GPU ends all use of it. There, integers stay as they are.
    """
    if _ranks_run():
        return
    for place, value in enumerate(inputs):
        first = value[0] if isinstance(value, list) and value else value
        if not _has_dtype(value, INTEGER_DTYPES) or first.device.type != "cpu":
            continue
        refusal, refused = None, 0
        for extreme in INTEGERS:
            most = int(max(extreme.values(first.dtype)))
            try:
                _check_values(inputs, [place], extreme, f"graph input {place}", check)
            except InputsRefused as error:
                refusal, refused = error.__cause__, most
                continue
            if refused:
                _try_largest(inputs, place, most, refused, check)
            break
        else:
            if _try_largest(inputs, place, 1, refused, check) == 1:
                kept = f"graph input {place} has no other integers than its own"
                _note_refused(f"{kept}: the graph refuses 2 and 3", refusal)


def _try_largest(
    inputs: Sequence[Any],
    place: int,
    taken: int,
    refused: int,
    check: Callable[[str, list[Any]], bool],
) -> int:
    """Give an input larger integers until it has the largest index, where a bound shows.

    Returns:
        the largest one, at least ``taken``, and less than ``refused``.
    """
    while refused - taken > 1:
        middle = (taken + refused) // 2
        made = copies(inputs)
        for tensor in made[place] if isinstance(made[place], list) else [made[place]]:
            replace_elements(tensor, Extreme.TO_3, seed=place, values=[middle])
        try:
            check(f"inputs with the integer {middle} in graph input {place}", made)
        except InputsRefused:
            refused = middle
        else:
            taken = middle
    return taken


def _check_values(
    inputs: Sequence[Any],
    chosen: Sequence[int],
    extreme: Extreme,
    where: str,
    check: Callable[[str, list[Any]], bool],
) -> bool:
    """Check until the chosen inputs have had all values; return whether any result was a number."""
    rounds = 2 if extreme is Extreme.ROWS else 1  # a row has one value
    for place in chosen:
        first = inputs[place][0] if isinstance(inputs[place], list) else inputs[place]
        values = extreme.values(first.dtype.to_real())
        rounds = max(rounds, math.ceil(len(values) / extreme.count(first.numel())))
    is_number = False
    for number in range(rounds):
        changed = _changed(inputs, chosen, extreme, number)
        is_number |= check(f"inputs with {extreme.value} in {where}", changed)
    return is_number


def _changed(
    inputs: Sequence[Any], chosen: Sequence[int], extreme: Extreme, shift: int
) -> list[Any]:
    """Return copies of the inputs, of which the chosen ones have extreme values."""
    made = copies(inputs)
    for place in chosen:
        value = made[place]
        # Replicas of one shape on several ranks get the same values at the same places.
        for tensor in value if isinstance(value, list) else [value]:
            replace_elements(tensor, extreme, seed=place, shift=shift)
    return made


def replace_elements(
    tensor: Tensor,
    extreme: Extreme,
    *,
    seed: int,
    shift: int = 0,
    values: Sequence[float] | None = None,
) -> None:
    """Write extreme values to places of a tensor that are drawn from ``seed``.

    Of more values than places, the first is the one at ``seed + shift``, and each shift has other
    places. ``values`` stand for those of the kind.
    """
    if extreme is Extreme.ROWS:
        kinds = extreme.values(tensor.dtype.to_real())
        _replace_rows(tensor, kinds[shift % len(kinds)])
        return
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    for dim, stride in enumerate(parts.stride()):
        if stride == 0:  # an expanded tensor, which torch does not write to
            parts = parts.narrow(dim, 0, 1)
    numel = parts.numel()
    generator = torch.Generator().manual_seed(seed)
    count = extreme.count(numel)
    places = torch.randperm(numel, generator=generator).roll(-shift * count)[:count]
    values = values or extreme.values(parts.dtype)
    # A scalar gets one value only: not the same for each input.
    first = seed + shift * len(places)
    given = [values[(first + at) % len(values)] for at in range(len(places))]
    wide = torch.float64 if parts.dtype.is_floating_point else torch.int64
    chosen = torch.tensor(given, dtype=wide).to(parts.dtype).to(parts.device)
    if parts.dim() == 0:
        parts.copy_(chosen[0])
    else:
        parts[torch.unravel_index(places.to(parts.device), parts.shape)] = chosen


def _replace_rows(tensor: Tensor, value: float) -> None:
    """Write a value to all of the first row of a tensor, of the third, and so on."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:  # an expanded tensor, which torch does not write to
            tensor = tensor.narrow(dim, 0, 1)
    shape = (*tensor.shape[:-1], 1) if tensor.dim() else ()
    rows = torch.arange(math.prod(shape), device=tensor.device).view(shape)
    tensor.copy_(torch.where(rows % 2 == 0, value, tensor))


def _has_dtype(value: Any, dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether elements of a graph's input, of one dtype on all ranks, can be replaced."""
    if isinstance(value, list):
        return all(_has_dtype(each, dtypes) for each in value)
    if not isinstance(value, Tensor) or not has_storage(value) or not value.numel():
        return False
    return value.dtype in dtypes


def sample_tensor(
    like: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    generator: torch.Generator,
    *,
    small: float = 1.0,
    integers: int = 2,
) -> Tensor:
    """Return ordinary values for a graph input.

    Args:
        like: a tensor with the dtype and device.
        shape, strides: of the result, in elements.
        small: a factor of every fourth row, as 0.001, so that what is added to a small number
            shows.
        integers: integers, which may be indices, are less than this, and not negative.
    """
    if like.dtype.is_floating_point or like.dtype.is_complex:
        wide = torch.complex128 if like.dtype.is_complex else torch.float64
        drawn = torch.randn(list(shape), dtype=wide, generator=generator)
        if drawn.dim() > 1:
            drawn[..., 1::4, :] *= small
    else:
        most = 2 if like.dtype is torch.bool else integers
        drawn = torch.randint(0, most, list(shape), generator=generator)
    needed = span(shape, strides)
    if 0 in strides or needed < drawn.numel():
        # Elements share memory, as those of an expanded tensor, so each place gets one number.
        memory = drawn.flatten().repeat(needed // max(drawn.numel(), 1) + 1)[:needed]
        memory = memory.to(like.dtype).to(like.device)
        return memory.as_strided(list(shape), list(strides))
    empty = torch.empty_strided(list(shape), list(strides), dtype=like.dtype)
    return empty.copy_(drawn).to(like.device)
