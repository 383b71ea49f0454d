"""What a comparison of tensors found, and how a person reads it: on a terminal, or as a table.

No torch here: reports order their rows by the same phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

PHASES = ("rng", "loss", "gradient", "clipped", "weight", "optimizer", "buffer")
"""In the order of a step: random states before it, the loss, gradients before and after clipping, and what the
optimiser leaves."""


def page_order(step: int, rank: int, phase: str) -> tuple[int, int, int]:
    """What sorts the digests of a page: by step, then by phase, then by rank."""
    return step, PHASES.index(phase), rank


class Key(NamedTuple):
    """Where in a run a tensor was captured; ``gradient`` is taken before clipping, ``clipped`` after."""

    step: int
    rank: int
    phase: str
    name: str


Outcome = Literal["equal", "different", "unverified"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs, at its first differing element.

    Attributes:
        key: step, rank, phase and name; the phase is empty outside a record.
        kind: ``bits``, or what differs before bits can be compared.
        actual, expected: the two values at ``element``, or the two dtypes, shapes, strides, placements.
        element: index of the first differing element; None unless ``kind`` is ``bits``.
        actual_bits, expected_bits: the patterns of that element.
        ulp: their distance; None for NaN and for what is not floating point.
        elements, numel: how many elements differ, of how many.
        layout: dtype and shape for a person, ``bf16[64, 64]``.
    """

    key: Key
    kind: Literal["bits", "dtype", "shape", "stride", "placements"]
    actual: str
    expected: str
    layout: str
    numel: int
    element: tuple[int, ...] | None = None
    actual_bits: str = ""
    expected_bits: str = ""
    ulp: int | None = None
    elements: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found; ``str(verdict)`` is written for a terminal.

    Attributes:
        outcome: ``equal``, ``different`` or ``unverified``.
        compared: how many pairs of tensors were looked at.
        differences: every tensor that differs, in order of origin.
        only_actual, only_expected: keys that the other side does not have.
        reasons: why it is unverified, or different beyond its tensors.
    """

    outcome: Outcome
    compared: int = 0
    differences: tuple[Difference, ...] = ()
    only_actual: tuple[Key, ...] = ()
    only_expected: tuple[Key, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def first(self) -> Difference | None:
        """The difference nearest to the origin."""
        return self.differences[0] if self.differences else None

    @property
    def differing_tensors(self) -> int:
        """How many tensors differ."""
        return len(self.differences)

    @property
    def differing_elements(self) -> int:
        """How many elements differ, over all tensors of equal dtype and shape."""
        return sum(difference.elements for difference in self.differences)

    @property
    def origin(self) -> tuple[int, int] | None:
        """``(step, rank)`` of what went wrong first; None outside records."""
        keys = [difference.key for difference in self.differences] + [*self.only_actual, *self.only_expected]
        places = [(key.step, key.rank) for key in keys if key.phase]
        return min(places, default=None)

    def __bool__(self) -> bool:
        raise TypeError("a verdict has three outcomes: ask for verdict.outcome == 'equal'")

    def __str__(self) -> str:
        return text(self)


_MOST_LINES = 8
_WORDS = {"clipped": "clipped gradient", "optimizer": "optimizer state", "rng": "random state"}


def text(verdict: Verdict) -> str:
    """The whole verdict; lists are cut after eight lines and say how much was left out."""
    lines = [_headline(verdict), *(f"  {reason}" for reason in verdict.reasons)]
    if verdict.first is not None:
        lines += _first(verdict.first)
    lines += _one_sided("actual", verdict.only_actual)
    lines += _one_sided("expected", verdict.only_expected)
    lines += _others(verdict.differences[1:])
    return "\n".join(lines)


def where(key: Key) -> str:
    """A key in words.

    >>> where(Key(1, 3, "gradient", "lm_head.weight")), where(Key(0, 0, "", "wq"))
    ('step 1, rank 3, gradient of lm_head.weight', 'wq')
    """
    name = key.name or "the tensor"
    if not key.phase:
        return name
    phase = _WORDS.get(key.phase, key.phase)
    what = phase if key.name in ("", key.phase) else f"{phase} of {name}"
    return f"step {key.step}, rank {key.rank}, {what}"


def _headline(verdict: Verdict) -> str:
    tensors = _count(verdict.compared, "tensor")
    if not verdict.differences:
        return f"{verdict.outcome}: {tensors} compared" + (", no bit differs" if verdict.compared else "")
    if verdict.differing_elements:
        tensors += f", {_count(verdict.differing_elements, 'element')}"
    return f"{verdict.outcome}: {verdict.differing_tensors} of {tensors}"


def _count(number: int, noun: str) -> str:
    """
    >>> _count(1, "tensor"), _count(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _first(first: Difference) -> list[str]:
    lines = [f"  first at {where(first.key)}" + _element(first)]
    width = max(len(first.actual), len(first.expected))
    for side, value, pattern in (
        ("actual", first.actual, first.actual_bits),
        ("expected", first.expected, first.expected_bits),
    ):
        lines.append(f"    {side:<8} {value:<{width}}  {pattern}".rstrip())
    return [*lines, f"    {_distance(first)}"]


def _element(first: Difference) -> str:
    if first.element is None:
        return f": {first.kind}"
    return f", element {_tuple(first.element)}" if first.element else ""


def _tuple(index: Sequence[int]) -> str:
    return f"({', '.join(map(str, index))})"


def _distance(first: Difference) -> str:
    if first.kind != "bits":
        return f"{first.layout} expected"
    among = f"{first.elements} of {_count(first.numel, 'element')} of this {first.layout}"
    if first.ulp is None:
        return among
    return f"{'equal values, other sign of zero' if first.ulp == 0 else f'{first.ulp} ULP apart'}; {among}"


def _others(differences: Sequence[Difference]) -> list[str]:
    return cut("then at", [f"{where(one.key)}: {_amount(one)}" for one in differences])


def _amount(difference: Difference) -> str:
    if difference.kind != "bits":
        return f"{difference.kind} {difference.actual}, expected {difference.expected}"
    return f"{difference.elements} of {difference.numel}"


def _one_sided(side: str, keys: Sequence[Key]) -> list[str]:
    return cut(f"only in {side}", [where(key) for key in keys])


def cut(title: str, lines: Sequence[str]) -> list[str]:
    """The lines under a title, the first eight of them; none at all without lines."""
    if not lines:
        return []
    more = len(lines) - _MOST_LINES
    tail = [f"    and {more} more"] if more > 0 else []
    return [f"  {title}", *(f"    {line}" for line in lines[:_MOST_LINES]), *tail]


_COLUMNS = ("side", "step", "rank", "phase", "name", "layout", "kind", "element", "actual", "actual_bits", "expected",
            "expected_bits", "ulp", "differing", "of")  # fmt: skip


def table(verdict: Verdict) -> str:
    """Everything that differs, as tab-separated lines with a heading, in order of origin: for a file."""
    return "".join("\t".join(map(str, row)) + "\n" for row in [_COLUMNS, *_rows(verdict)])


def _rows(verdict: Verdict) -> Iterator[tuple[object, ...]]:
    for one in verdict.differences:
        element = "" if one.element is None else _tuple(one.element)
        yield ("both", *one.key, one.layout, one.kind, element, one.actual, one.actual_bits, one.expected,
               one.expected_bits, "" if one.ulp is None else one.ulp, one.elements, one.numel)  # fmt: skip
    blank = ("",) * (len(_COLUMNS) - 5)
    for side, keys in (("actual", verdict.only_actual), ("expected", verdict.only_expected)):
        for key in keys:
            yield (side, *key, *blank)
