"""The run's summary: worlds used, goldens checked, verdicts, what was skipped and why."""

from __future__ import annotations

from collections import Counter

import pytest

from pytest_gtrainer.facts import Fact
from pytest_gtrainer.report.collected import world_label
from pytest_gtrainer.report.witness import without_shown

MOST_LINES = 18
_TELLERS = ("goldens", "unused-goldens")


class SummaryPlugin:
    """Counts the facts that reports carry and prints them once, if there are any."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.facts: list[Fact] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seen: list[Fact] = getattr(report, "gt_facts", [])
        self.facts += without_shown(seen)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = bounded(self.lines())
        if lines:
            terminalreporter.write_sep("=", "gtrainer")
            for line in lines:
                terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """All that there is to say; the terminal shows ``bounded`` lines of it, the page of a report all."""
        goldens, unused = (self.config.pluginmanager.getplugin(f"gtrainer-{name}") for name in _TELLERS)
        return summary_lines(self.facts + goldens.late_facts) + goldens.summary_lines() + unused.summary_lines()


def bounded(lines: list[str], most: int = MOST_LINES) -> list[str]:
    """At most so many lines; the last one then says how many there would be.

    >>> bounded(["a", "b", "c", "d"], most=3)
    ['a', 'b', '… and 2 more lines: --gt-report FILE has all of them']
    """
    if len(lines) <= most:
        return lines
    left = len(lines) - most + 1
    return [*lines[: most - 1], f"… and {left} more lines: --gt-report FILE has all of them"]


def summary_lines(facts: list[Fact]) -> list[str]:
    """At most one line a topic, none for what did not happen.

    >>> summary_lines([{"kind": "verdict", "outcome": "equal"}, {"kind": "verdict", "outcome": "equal"}])
    ['verdicts  2 equal']
    """
    topics = (
        ("worlds", "world", _world_label),
        ("goldens", "golden", lambda fact: fact["outcome"]),
        ("inline", "inline", lambda fact: fact["outcome"]),
        ("verdicts", "verdict", lambda fact: fact["outcome"]),
        ("skipped", "skip", lambda fact: fact["cause"]),
        ("leaked", "leak", lambda fact: f"{fact['test']} changed {fact['what']}"),
        ("left", "left", lambda fact: f"{fact['what']} by {fact['test']}"),
    )
    lines = []
    for title, kind, label in topics:
        counts = Counter(label(fact) for fact in facts if fact["kind"] == kind)
        if counts:
            lines.append(f"{title:<9} " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    return lines


def _world_label(fact: Fact) -> str:
    return f"tests in {world_label(fact)}"
