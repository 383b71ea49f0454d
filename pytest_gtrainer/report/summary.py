"""The run's summary: worlds used, goldens checked, verdicts, what was skipped and why."""

from __future__ import annotations

from collections import Counter

import pytest

from pytest_gtrainer.facts import Fact

_TELLERS = ("goldens", "unused-goldens")


class SummaryPlugin:
    """Counts the facts that reports carry and prints them once, if there are any."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.facts: list[Fact] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seen: list[Fact] = getattr(report, "gt_facts", [])
        self.facts += seen

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        goldens, unused = (self.config.pluginmanager.getplugin(f"gtrainer-{name}") for name in _TELLERS)
        lines = summary_lines(self.facts + goldens.late_facts) + goldens.summary_lines() + unused.summary_lines()
        if lines:
            terminalreporter.write_sep("=", "gtrainer")
            for line in lines:
                terminalreporter.write_line(line)


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
    )
    lines = []
    for title, kind, label in topics:
        counts = Counter(label(fact) for fact in facts if fact["kind"] == kind)
        if counts:
            lines.append(f"{title:<9} " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    return lines


def _world_label(fact: Fact) -> str:
    if fact["world"] == "fake":
        return f"tests in fake({fact['size']})"
    return f"tests in {fact['world']}({fact['size']}, {fact['backend']} on {fact['device']})"
