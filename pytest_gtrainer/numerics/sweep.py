"""Sweep over every combination of some settings, and hold each to a claim.

A *cell* is one combination. *Rules* are the claims: a cell is equal to something, is known to
differ for a reason, is refused with certain words, or cannot be judged here for a reason. The first
rule that fits a cell counts; a cell that none fits is a failure. The plugin prints a table for each
sweep.
"""

import itertools
import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from pytest_gtrainer import facts
from pytest_gtrainer.numerics.compare import assert_bitwise_different, assert_bitwise_equal
from pytest_gtrainer.numerics.record import Tensors
from pytest_gtrainer.numerics.verdict import Verdict

Claim = Literal["equal", "different", "refused", "not judged", "unknown"]
Judge = Callable[[Tensors, Tensors], None]


class UnknownCell(facts.FailedCheck):
    """Nothing is claimed about a cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of settings; ``cell["batch"]``, and ``str(cell)`` is an id for a test."""

    settings: tuple[tuple[str, Any], ...]

    def __getitem__(self, axis: str) -> Any:
        return dict(self.settings)[axis]

    def __str__(self) -> str:
        """Return an id for a test.

        >>> str(Cell((("batch", 2), ("remat", True), ("attention", "sdpa"))))
        'batch2-remat_on-sdpa'
        """
        words = []
        for axis, value in self.settings:
            if isinstance(value, str):
                words.append(value)
            elif isinstance(value, bool):
                words.append(f"{axis}_{spell_setting(value)}")
            else:
                words.append(f"{axis}{value}")
        return "-".join(words)


def spell_setting(value: Any) -> str:
    """Return a setting as the table shows it: ``on`` and ``off`` for booleans."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


@dataclass(frozen=True, slots=True)
class Rule:
    """A claim about the cells that have some settings.

    Attributes:
        claim: "equal", "different" (known, with its reason), "refused", or "not judged". A cell
            that no rule fits is "unknown".
        where: settings by axis, one value or a tuple of them; empty fits every cell.
        to: what it is equal to.
        reason: why it differs or cannot be judged; of a refusal, words of its ValueError or
            TypeError.
        needs_gpu: the rule holds only without a GPU; with one the next rule that fits counts.
    """

    claim: Claim
    where: Mapping[str, Any] = field(default_factory=dict)
    to: str = ""
    reason: str = ""
    needs_gpu: bool = False

    def __post_init__(self) -> None:
        if self.claim not in get_args(Claim):
            claims = ", ".join(map(repr, get_args(Claim)[:-1]))
            raise ValueError(f"a rule claims {self.claim!r}: use one of {claims}")
        if self.claim == "equal" and not self.to:
            raise ValueError(
                "a rule that claims equality says what to: Rule('equal', to='eager fully_shard')"
            )
        if self.claim != "equal" and not self.reason:
            raise ValueError(f"a rule that claims {self.claim!r} needs its reason")

    def fits(self, cell: Cell) -> bool:
        """Return whether the rule is about this cell, on this machine."""
        if self.needs_gpu and torch.cuda.is_available():
            return False
        return self.names(cell)

    def names(self, cell: Cell) -> bool:
        """Return whether the rule is about this cell, on any machine."""
        return all(cell[axis] in _one_or_several(want) for axis, want in self.where.items())


def _one_or_several(want: Any) -> tuple[Any, ...]:
    if isinstance(want, tuple):
        return want
    return (want,)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Settings by axis, and the rules about their combinations.

    Raises:
        ValueError: a rule could never apply, since it names an axis or a setting that the sweep
            does not have, or since earlier rules fit all of its cells; or an axis has no setting,
            so there is no cell, or a setting twice.
    """

    name: str
    axes: Mapping[str, Sequence[Any]]
    rules: Sequence[Rule]

    def __post_init__(self) -> None:
        for axis, settings in self.axes.items():
            if not len(settings):
                raise ValueError(
                    f"sweep {self.name!r}: the axis {axis!r} has no setting, so there is no cell"
                )
            for place, setting in enumerate(settings):
                if setting in settings[:place]:
                    raise ValueError(
                        f"sweep {self.name!r}: the axis {axis!r} has {setting!r} twice: take one "
                        "out (1, 1.0 and True are one setting)"
                    )
        for rule in self.rules:
            for axis, want in rule.where.items():
                known = self.axes.get(axis)
                if known is None or not all(value in known for value in _one_or_several(want)):
                    raise ValueError(
                        f"sweep {self.name!r}: a rule speaks of {axis}={want!r}, which no cell has"
                    )
        taken: set[int] = set()
        for number, rule in enumerate(self.rules, 1):
            own = {place for place, cell in enumerate(self.cells) if rule.names(cell)}
            if own <= taken:
                raise ValueError(
                    f"sweep {self.name!r}: no cell is left for rule {number}, {rule.claim!r} where "
                    f"{dict(rule.where) or 'anything'}, as the first rule that fits counts: put it "
                    "before the others, or take it out"
                )
            # With a GPU the next rule that fits counts.
            if not rule.needs_gpu:
                taken |= own

    @property
    def cells(self) -> list[Cell]:
        """Every combination, the last axis changing fastest."""
        products = itertools.product(*self.axes.values())
        return [Cell(tuple(zip(self.axes, values, strict=True))) for values in products]

    def rule(self, cell: Cell) -> Rule:
        """Return the first rule that fits; one that claims "unknown" if none does.

        Raises:
            ValueError: the cell is of other axes.
        """
        if {axis for axis, _ in cell.settings} != set(self.axes):
            raise ValueError(
                f"{cell} is no cell of sweep {self.name!r}, whose axes are {', '.join(self.axes)}"
            )
        unknown = Rule("unknown", reason="no rule fits")
        return next((rule for rule in self.rules if rule.fits(cell)), unknown)

    def judging(self, cell: Cell) -> "Judging":
        """Return a ``with`` block whose value compares the two sides of a cell as its rule demands.

        Raises:
            UnknownCell: no rule fits; the block does not run.
            unittest.SkipTest: the cell cannot be judged here; pytest shows it with the reason.
            BitwiseDifference, ControlFailed: the claim is wrong.
        """
        return Judging(self, cell)


class Judging:
    """The ``with`` block in which a cell is judged, and which adds its row to the table.

    It is a class, since a failure in a ``contextmanager`` would show frames of contextlib.
    """

    def __init__(self, sweep: Sweep, cell: Cell) -> None:
        self._sweep, self._cell, self._rule = sweep, cell, sweep.rule(cell)
        self._judged: list[Verdict] = []
        # An error that refuses the cell is what the rule expects. Nothing else catches it here.
        self._refusals = facts.failing_checks(lambda error: None)

    def __enter__(self) -> Judge:
        __tracebackhide__ = True
        rule, name = self._rule, self._sweep.name
        if rule.claim == "unknown":
            self._report("UNKNOWN", rule.reason)
            raise UnknownCell(
                f"sweep {name!r} claims nothing about {self._cell}: add a rule that fits it"
            )

        if rule.claim == "not judged":
            self._report("not judged", rule.reason)
            raise unittest.SkipTest(f"not judged: {rule.reason}")
        if rule.claim == "refused":
            self._refusals.__enter__()
        compare = assert_bitwise_equal if rule.claim == "equal" else assert_bitwise_different

        def judge(actual: Tensors, expected: Tensors) -> None:
            __tracebackhide__ = True
            self._judged.append(compare(actual, expected, what=f"sweep {name}, {self._cell}"))

        return judge

    def __exit__(self, kind: type | None, error: object, _: object) -> bool:
        __tracebackhide__ = True
        rule = self._rule
        if rule.claim == "refused":
            self._refusals.__exit__(None, None, None)
        if rule.claim == "refused" and kind is None:
            self._report("FAILED", "nothing refused it")
            raise facts.FailedCheck(
                f"sweep {self._sweep.name!r}: {self._cell} is not refused, with {rule.reason!r}"
            )

        is_refusal = isinstance(error, ValueError | TypeError)
        is_refusal = is_refusal and facts.has_words(str(error), rule.reason)
        # A refusal is what was claimed, so it does not leave the block.
        if rule.claim == "refused" and is_refusal:
            self._report("refused", rule.reason)
        elif kind is not None:
            self._report("FAILED", f"claimed to be {rule.claim}")
            return False
        elif not self._judged:
            self._report("FAILED", "nothing was compared")
            raise facts.FailedCheck(
                f"sweep {self._sweep.name!r}: the test of {self._cell} compared nothing"
            )
        else:
            self._report(rule.claim, f"to {rule.to}" if rule.claim == "equal" else rule.reason)

        return True

    def _report(self, result: str, why: str) -> None:
        settings = {axis: spell_setting(value) for axis, value in self._cell.settings}
        facts.emit("sweep", sweep=self._sweep.name, settings=settings, result=result, why=why)
