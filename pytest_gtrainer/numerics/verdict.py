"""The result of a comparison of tensors, as text for a terminal and as a table for a file.

This module does not import torch, since reports read it: they order their rows by its phases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pytest_gtrainer.facts import counted, one_line

PHASES = ("rng", "loss", "gradient", "clipped", "weight", "optimizer", "buffer")
"""Phases in the order of a step: random states before it, the loss, gradients before and after
clipping, and what the optimiser leaves.
"""


def page_order(step: int, rank: int, phase: str) -> tuple[int, int, int]:
    """Return the key that sorts the digests of a page: by step, then by phase, then by rank."""
    return step, PHASES.index(phase), rank


class Key(NamedTuple):
    """The place in a run at which a tensor was captured.

    Gradients are ``gradient`` before clipping, and ``clipped`` after.
    """

    step: int
    rank: int
    phase: str
    name: str


Outcome = Literal["equal", "different", "unverified"]
Kind = Literal["bits", "dtype", "shape", "stride", "placements"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs, at its first differing element.

    ``kind`` is ``bits``, or what differs before bits can be compared, where there is no element.
    ``elements`` of ``numel`` differ; ``ulp`` is None for NaN and for what is not floating point.
    """

    key: Key
    kind: Kind
    actual: str
    expected: str
    layout: str
    numel: int
    element: tuple[int, ...] | None = None
    actual_bits: str = ""
    expected_bits: str = ""
    ulp: int | None = None
    elements: int = 0

    @property
    def place(self) -> str:
        """The element, as text that follows the name of the tensor."""
        if self.element is None:
            return f": {self.kind}"
        if not self.element:  # of a tensor without dimensions
            return ""
        return f", element {_tuple(self.element)}"

    @property
    def amount(self) -> str:
        """The number of elements that differ, or the layouts, in short."""
        if self.kind != "bits":
            return f"{self.kind} {self.actual}, expected {self.expected}"
        return f"{self.elements} of {self.numel}"

    def sides(self) -> list[str]:
        """Return three lines: both values with their bits, and how far they are apart."""
        width = max(len(self.actual), len(self.expected))
        actual = f"    actual   {self.actual:<{width}}  {self.actual_bits}".rstrip()
        expected = f"    expected {self.expected:<{width}}  {self.expected_bits}".rstrip()
        among = f"{self.elements} of {counted(self.numel, 'element')} of this {self.layout}"
        if self.kind != "bits":
            among = f"{self.layout} expected"
        elif self.ulp is not None:
            apart = f"{self.ulp} ULP apart"
            if not self.ulp:
                apart = "equal values, other sign of zero"
            elif (self.actual[:1] == "-") != (self.expected[:1] == "-"):
                # The number of floats between them says nothing: most of those are tiny.
                apart = "opposite signs"
            among = f"{apart}; {among}"

        return [actual, expected, f"    {among}"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison; ``str(verdict)`` is written for a terminal.

    Attributes:
        outcome: ``equal``, ``different`` or ``unverified``.
        compared: how many pairs of tensors were looked at.
        differences: every tensor that differs, in order of origin.
        only_actual, only_expected: keys that the other side does not have.
        reasons: why it is unverified, or different beyond its tensors.
        not_finite: tensors with NaN or infinite elements, and how many: these are equal whatever
            computes them.
        tied: names that are one memory on either side, as tied weights are: they are one
            comparison.
    """

    outcome: Outcome
    compared: int = 0
    differences: tuple[Difference, ...] = ()
    only_actual: tuple[Key, ...] = ()
    only_expected: tuple[Key, ...] = ()
    reasons: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The outcome as a summary counts it, with what limits it.

        >>> Verdict("equal").label, Verdict("equal", not_finite=("loss: 1 of 1 element",)).label
        ('equal', 'equal (not finite)')
        """
        limits = []
        if self.not_finite:
            limits.append("not finite")
        if self.tied:
            limits.append("names that share memory")
        if limits:
            return f"{self.outcome} ({', '.join(limits)})"
        return self.outcome

    @property
    def first(self) -> Difference | None:
        """The difference nearest to the origin."""
        return self.differences[0] if self.differences else None

    @property
    def differing_elements(self) -> int:
        """The number of elements that differ, over all tensors of equal dtype and shape."""
        return sum(difference.elements for difference in self.differences)

    @property
    def origin(self) -> tuple[int, int] | None:
        """``(step, rank)`` of what went wrong first; None outside records."""
        differing = [difference.key for difference in self.differences]
        places = []
        for key in (*differing, *self.only_actual, *self.only_expected):
            if key.phase:
                places.append((key.step, key.rank))
        return min(places, default=None)

    def __bool__(self) -> bool:
        raise TypeError("a verdict has three outcomes: ask for verdict.outcome == 'equal'")

    def __str__(self) -> str:
        """Write the whole verdict; lists are cut after eight lines, with how many were left out."""
        head = f"{self.outcome}: {counted(self.compared, 'tensor')} compared"
        if self.differences:
            head = f"{self.outcome}: {len(self.differences)} of {counted(self.compared, 'tensor')}"
            if self.differing_elements:
                head += f", {counted(self.differing_elements, 'element')}"
        elif self.compared:
            head += ", no bit differs"

        lines = [head]
        lines += [f"  {reason}" for reason in self.reasons]
        if self.first is not None:
            lines.append(f"  first at {where(self.first.key)}{self.first.place}")
            lines += self.first.sides()
        title = "equal, but not finite, which proves nothing: NaN and inf hide what computes them"
        lines += cut(title, self.not_finite)
        lines += cut("one memory on either side, so compared once", self.tied)
        lines += cut("only in actual", list(map(where, self.only_actual)))
        lines += cut("only in expected", list(map(where, self.only_expected)))
        lines += cut("then at", [f"{where(one.key)}: {one.amount}" for one in self.differences[1:]])
        return "\n".join(lines)


_MOST_LINES = 8
_WORDS = {"clipped": "clipped gradient", "optimizer": "optimizer state", "rng": "random state"}


def where(key: Key) -> str:
    """Return a key in words.

    >>> where(Key(1, 3, "gradient", "lm_head.weight"))
    'step 1, rank 3, gradient of lm_head.weight'
    >>> where(Key(0, 0, "", "wq")), where(Key(0, 0, "", ""))
    ('wq', 'the tensor')
    """
    name = one_line(key.name) or "the tensor"
    if not key.phase:
        return name
    what = _WORDS.get(key.phase, key.phase)
    if key.name not in ("", key.phase):  # the loss has no name of its own
        what += f" of {name}"
    return f"step {key.step}, rank {key.rank}, {what}"


def _tuple(index: Sequence[int]) -> str:
    return f"({', '.join(map(str, index))})"


def cut(title: str, lines: Sequence[str]) -> list[str]:
    """Return the first eight lines under a title; nothing at all without lines.

    >>> cut("then at", "abcdefghi")[-2:], cut("then at", "")
    (['    h', '    and 1 more'], [])
    """
    if not lines:
        return []
    shown = [f"  {title}", *(f"    {line}" for line in lines[:_MOST_LINES])]
    if len(lines) > _MOST_LINES:
        shown.append(f"    and {len(lines) - _MOST_LINES} more")
    return shown


_COLUMNS = (
    "side",
    "step",
    "rank",
    "phase",
    "name",
    "layout",
    "kind",
    "element",
    "actual",
    "actual_bits",
    "expected",
    "expected_bits",
    "ulp",
    "differing",
    "of",
)


def table(verdict: Verdict) -> str:
    """Return everything that differs, in order of origin, as tab-separated lines with a heading."""
    # Tabs and line ends in names are escaped, so every line has all columns.
    rows: list[tuple[object, ...]] = [_COLUMNS]
    for one in verdict.differences:
        element = "" if one.element is None else _tuple(one.element)
        rows.append(
            (
                "both",
                *one.key,
                one.layout,
                one.kind,
                element,
                one.actual,
                one.actual_bits,
                one.expected,
                one.expected_bits,
                "" if one.ulp is None else one.ulp,
                one.elements,
                one.numel,
            )
        )

    blank = ("",) * (len(_COLUMNS) - 5)
    rows += [("actual", *key, *blank) for key in verdict.only_actual]
    rows += [("expected", *key, *blank) for key in verdict.only_expected]
    return "".join("\t".join(one_line(str(cell)) for cell in row) + "\n" for row in rows)
