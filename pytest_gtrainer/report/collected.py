"""What a run came to, test by test: put together from the reports that reach the process that ends the run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pytest

from pytest_gtrainer.facts import Fact
from pytest_gtrainer.numerics.verdict import page_order

ORDER = ("failed", "error", "xpassed", "passed", "xfailed", "skipped")
"""Outcomes as a reader wants them: failures first."""
SHOWN = (
    "graph_text",
    "pass",
    "schedule",
    "memory",
    "layout",
    "comparison",
    "golden_difference",
    "not_shown",
)
"""Kinds of the facts that only the report reads; ``witness`` says what they are."""


@dataclass(slots=True)
class Test:
    """One test: its reports in order, and the facts that only the report reads, by rank."""

    __test__ = False

    name: str
    reports: list[pytest.TestReport] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    shown: dict[int, list[Fact]] = field(default_factory=dict)

    def add(self, report: pytest.TestReport) -> None:
        """Take in the report of a phase. A test that is run again begins anew."""
        if report.when == "setup" and any(known.when == "setup" for known in self.reports):
            kept = (
                "graph_text",
                "schedule",
                "memory",
            )  # a witness of the whole test sends each once
            graphs = {
                rank: [one for one in told if one["kind"] in kept]
                for rank, told in self.shown.items()
            }
            self.reports, self.facts, self.shown = [], [], graphs
        self.reports.append(report)
        own: list[Fact] = getattr(report, "gt_facts", [])
        self.facts += own
        by_rank: Mapping[Any, list[Fact]] = getattr(report, "gt_shown", {})
        if hasattr(report, "gt_shown"):  # of ranks, whose goldens are judged here
            own = [fact for fact in own if fact["kind"] == "golden_difference"]
        for rank, told in [(0, shown_only(own)), *by_rank.items()]:
            self.shown.setdefault(int(rank), []).extend(told)

    @property
    def outcome(self) -> str:
        """failed, error (outside the call), xpassed, xfailed, skipped or passed.

        A subtest makes its test fail. Its skip or expected failure is not the test's.
        """
        if failed := [report for report in self.reports if report.failed]:
            return "failed" if any(report.when == "call" for report in failed) else "error"
        own = [report for report in self.reports if type(report) is pytest.TestReport]
        for report in own:
            if hasattr(report, "wasxfail"):
                return "xfailed" if report.skipped else "xpassed"
        return "skipped" if any(report.skipped for report in own) else "passed"

    @property
    def world(self) -> str:
        """The worlds it ran in, in words."""
        worlds = (fact for fact in self.facts if fact["kind"] == "world")
        return ", ".join(dict.fromkeys(world_label(fact) for fact in worlds))

    @property
    def headline(self) -> str:
        """The first line of its failure, as the terminal's short summary shows it; "" of a test that has not failed."""
        if (failed := next((report for report in self.reports if report.failed), None)) is None:
            return ""
        crash = getattr(failed.longrepr, "reprcrash", None)
        told = str(crash.message) if crash is not None else failed.longreprtext
        return told.strip().partition("\n")[0][:300]

    def of(self, kind: str) -> list[Fact]:
        """The shown facts of a kind, of the first rank that has any: graphs are the same on all, but for a rank."""
        for told in (self.shown[rank] for rank in sorted(self.shown)):
            if found := [fact for fact in told if fact["kind"] == kind]:
                return found
        return []

    def comparisons(self) -> list[dict[str, Any]]:
        """The comparisons of all ranks, the n-th of each rank as one; the first difference is the smallest."""
        by_rank = [
            [fact for fact in told if fact["kind"] == "comparison"]
            for _, told in sorted(self.shown.items())
        ]
        joined = []
        for nth in zip_longest(*by_rank):
            parts = [
                part for part in nth if part is not None
            ]  # a rank may have compared less often
            leader = min(
                parts, key=lambda part: (part["first"] is None, (part["first"] or [0, 0])[:2])
            )
            one = {
                **leader,
                **{count: sum(part[count] for part in parts) for count in ("tensors", "untold")},
            }
            one["differing"] = [key for part in parts for key in part["differing"]]
            for side in ("actual", "expected"):
                rows = (tuple(row) for part in parts for row in part[side])
                one[side] = sorted(rows, key=lambda row: page_order(*row[:3]))
            joined.append(one)
        return joined


def world_label(fact: Fact) -> str:
    """A world in a reader's words.

    >>> world_label({"world": "ranks", "size": 8, "backend": "gloo", "device": "cpu"})
    'ranks(8, gloo on cpu)'
    """
    if fact["world"] == "fake":
        return f"fake({fact['size']})"
    return f"{fact['world']}({fact['size']}, {fact['backend']} on {fact['device']})"


def shown_only(told: Iterable[Fact]) -> list[Fact]:
    """The facts that only the report reads."""
    return [fact for fact in told if fact["kind"] in SHOWN]
