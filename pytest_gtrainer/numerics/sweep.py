"""Sweeps: every combination of some settings, and of each what is claimed about it.

A *cell* is one combination. *Rules* say what is claimed: it is equal to something, it is known to
differ and why, it is refused and with which words, or it cannot be judged here and why. The first
rule that fits a cell counts; a cell that none fits is a failure. The plugin prints one table a
sweep.
"""

import itertools
import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_gtrainer import facts
from pytest_gtrainer.numerics.compare import assert_bitwise_different, assert_bitwise_equal
from pytest_gtrainer.numerics.record import Tensors
from pytest_gtrainer.numerics.verdict import Verdict

Claim = Literal["equal", "different", "refused", "not judged"]
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
        """
        >>> str(Cell((("batch", 2), ("remat", True), ("attention", "sdpa"))))
        'batch2-remat_on-sdpa'
        """
        words = (
            value
            if isinstance(value, str)
            else f"{axis}{'_' if isinstance(value, bool) else ''}{shown(value)}"
            for axis, value in self.settings
        )
        return "-".join(words)


def shown(value: Any) -> str:
    """A setting in the table: ``on`` and ``off`` for booleans."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Rule:
    """What is claimed about the cells that have these settings.

    Attributes:
        claim: "equal", "different" (known, with its reason), "refused", or "not judged".
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
        if self.claim == "equal" and not self.to:
            raise ValueError(
                "a rule that claims equality says what to: Rule('equal', to='eager fully_shard')"
            )
        if self.claim != "equal" and not self.reason:
            raise ValueError(f"a rule that claims {self.claim!r} needs its reason")

    def fits(self, cell: Cell) -> bool:
        """Return whether the rule speaks of this cell, here."""
        if self.needs_gpu and torch.cuda.is_available():
            return False
        return all(
            cell[axis] in (want if isinstance(want, tuple) else (want,))
            for axis, want in self.where.items()
        )


@dataclass(frozen=True, slots=True)
class Sweep:
    """Settings by axis, and the rules about their combinations.

    Raises:
        ValueError: a rule names an axis or a setting that the sweep does not have, and so could
            never fit.
    """

    name: str
    axes: Mapping[str, Sequence[Any]]
    rules: Sequence[Rule]

    def __post_init__(self) -> None:
        for rule in self.rules:
            for axis, want in rule.where.items():
                wanted = want if isinstance(want, tuple) else (want,)
                if axis not in self.axes or not all(value in self.axes[axis] for value in wanted):
                    raise ValueError(
                        f"sweep {self.name!r}: a rule speaks of {axis}={want!r}, which no cell has"
                    )

    @property
    def cells(self) -> list[Cell]:
        """Every combination, the last axis changing fastest."""
        products = itertools.product(*self.axes.values())
        return [Cell(tuple(zip(self.axes, values, strict=True))) for values in products]

    def rule(self, cell: Cell) -> Rule | None:
        """The first rule that fits."""
        return next((rule for rule in self.rules if rule.fits(cell)), None)

    def judging(self, cell: Cell) -> "Judging":
        """Hands out what compares the cell's two sides as its rule demands; tells the table how it
        went.

        Raises:
            UnknownCell: no rule fits; the body does not run. unittest.SkipTest: the cell cannot be
            judged here; pytest reports a skip with the reason.
            BitwiseDifference, ControlFailed: the claim is wrong.
        """
        return Judging(self, cell)


class Judging:
    """The ``with`` block in which a cell is judged: a class, so that no failure shows contextlib's
    frames.
    """

    def __init__(self, sweep: Sweep, cell: Cell) -> None:
        self._sweep, self._cell, self._rule = sweep, cell, sweep.rule(cell)
        self._judged: list[Verdict] = []
        # An error that refuses the cell is what the rule expects. Nothing else catches it here.
        self._refusals = facts.failing_checks(lambda error: None)

    def __enter__(self) -> Judge:
        __tracebackhide__ = True
        rule, name = self._rule, self._sweep.name
        if rule is None:
            self._tell("UNKNOWN", "no rule fits")
            raise UnknownCell(
                f"sweep {name!r} claims nothing about {self._cell}: add a rule that fits it"
            )
        if rule.claim == "not judged":
            self._tell("not judged", rule.reason)
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
        assert rule is not None
        if rule.claim == "refused":
            self._refusals.__exit__(None, None, None)
        refused = (
            kind is not None
            and issubclass(kind, ValueError | TypeError)
            and rule.reason in str(error)
        )
        if rule.claim == "refused" and kind is None:
            self._tell("FAILED", "nothing refused it")
            raise facts.FailedCheck(
                f"sweep {self._sweep.name!r}: {self._cell} is not refused, with {rule.reason!r}"
            )
        if rule.claim == "refused" and refused:
            self._tell("refused", rule.reason)
        elif kind is not None:
            self._tell("FAILED", f"claimed to be {rule.claim}")
            return False
        elif not self._judged:
            self._tell("FAILED", "nothing was compared")
            raise facts.FailedCheck(
                f"sweep {self._sweep.name!r}: the test of {self._cell} compared nothing"
            )
        else:
            self._tell(rule.claim, f"to {rule.to}" if rule.claim == "equal" else rule.reason)
        return True

    def _tell(self, result: str, why: str) -> None:
        settings = {axis: shown(value) for axis, value in self._cell.settings}
        facts.emit("sweep", sweep=self._sweep.name, settings=settings, result=result, why=why)
