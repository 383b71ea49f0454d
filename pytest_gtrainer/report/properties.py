"""What a test's entry in a JUnit file says beyond pytest: its world, its ranks, its verdicts, digests of its runs.

As properties ``gt_world``, ``gt_ranks``, ``gt_verdict``, ``gt_golden`` and ``gt_digest``: of each comparison of two
records one digest a step and side, over all phases and ranks. Two CI runs whose digests agree have trained alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from pytest_gtrainer.report.collected import Test


class JUnitProperties:
    """Adds properties to a test's last report, in the process that ran the test."""

    def __init__(self) -> None:
        self._tests: dict[str, Test] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "node"):  # from a worker of xdist, which has added them
            return
        test = self._tests.setdefault(report.nodeid, Test(report.nodeid))
        test.add(report)
        if report.when == "teardown":
            report.user_properties = [*report.user_properties, *properties_of(test)]
            del self._tests[report.nodeid]


def properties_of(test: Test) -> Iterator[tuple[str, str]]:
    """Name and value of each property; the same name may come several times."""
    worlds = [fact for fact in test.facts if fact["kind"] == "world"]
    if worlds:
        yield "gt_world", test.world
        yield "gt_ranks", str(max(fact["size"] for fact in worlds))
    for fact in test.facts:
        if fact["kind"] == "golden":
            yield "gt_golden", f"{fact['name']}: {fact['outcome']}"
        elif fact["kind"] == "verdict":
            yield "gt_verdict", f"{fact.get('what') or 'comparison'}: {fact['outcome']}"
    for comparison in test.comparisons():
        yield from _digests(comparison)


def _digests(comparison: dict[str, Any]) -> Iterator[tuple[str, str]]:
    title = comparison["what"] or "comparison"
    sides = {side: _by_step(comparison[side]) for side in ("actual", "expected")}
    for step in sorted({step for told in sides.values() for step in told}):
        told = ", ".join(f"{side} {steps[step]}" for side, steps in sides.items() if step in steps)
        yield "gt_digest", f"{title}, step {step}: {told}"


def _by_step(rows: Iterable[Sequence[Any]]) -> dict[int, str]:
    """One digest for each step of a table of ``step, rank, phase, digest``.

    >>> _by_step([(0, 0, "loss", "aa"), (0, 1, "loss", "bb")]) == _by_step([(0, 0, "loss", "bb"), (0, 1, "loss", "aa")])
    False
    """
    lines: dict[int, list[str]] = {}
    for step, rank, phase, told in rows:
        lines.setdefault(step, []).append(f"{phase} {rank} {told}")
    return {step: hashlib.sha256("\n".join(told).encode()).hexdigest()[:16] for step, told in lines.items()}
