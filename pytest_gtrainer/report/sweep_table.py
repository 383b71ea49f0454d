"""The table of a sweep: one line a cell, printed at the end, with what was not judged and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from pytest_gtrainer.facts import Fact


class SweepTables:
    """Collects what tests tell of sweeps ("sweep" facts); prints one table for each."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Fact]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seen: list[Fact] = getattr(report, "gt_facts", [])
        for fact in seen:
            if fact["kind"] == "sweep":
                self._rows.setdefault(fact["sweep"], []).append(fact)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, rows in self._rows.items():
            terminalreporter.write_sep("-", f"sweep {name}")
            for line in table_lines(rows):
                terminalreporter.write_line(line)


def table_lines(rows: Sequence[Fact]) -> list[str]:
    """Header, a line a cell, and the counts; cells that were not judged for one reason are one line.

    >>> row = {"settings": {"batch": "2", "graph": "off"}, "result": "equal", "why": "to eager"}
    >>> other = {"settings": {"batch": "2", "graph": "on"}, "result": "not judged", "why": "needs a GPU"}
    >>> print("\\n".join(table_lines([row, other])))
    batch  graph  result  why
    2      off    equal   to eager
    1 cell not judged: needs a GPU
    1 equal, 1 not judged
    """
    judged = [row for row in rows if row["result"] != "not judged"]
    cells = [[*row["settings"].values(), row["result"], row["why"]] for row in judged]
    table = [[*rows[0]["settings"], "result", "why"], *cells] if cells else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    for why, count in Counter(row["why"] for row in rows if row["result"] == "not judged").items():
        lines.append(f"{count} cell{'' if count == 1 else 's'} not judged: {why}")
    counts = Counter(row["result"] for row in rows)
    return [*lines, ", ".join(f"{count} {result}" for result, count in counts.items())]
