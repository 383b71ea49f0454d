"""The table of a test that ran under several nets of a simulated world: one line a net, printed at the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_gtrainer.facts import Fact

NET = ("ranks", "nodes", "channels", "partition", "accumulate")
COLUMNS = (*NET, "result")


class NetTable:
    """Collects what tests tell of nets ("net" facts); prints a table for each test function that ran under several."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Fact]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts: list[Fact] = getattr(report, "gt_facts", [])
        rows = [fact for fact in facts if fact["kind"] == "net"]
        if rows:
            self._rows.setdefault(report.nodeid.partition("[")[0], []).extend(rows)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, rows in self._rows.items():
            if len({tuple(row[name] for name in NET) for row in rows}) > 1:
                terminalreporter.write_sep("-", f"nets of {test}")
                for line in table_lines(rows):
                    terminalreporter.write_line(line)


def table_lines(rows: Sequence[Fact]) -> list[str]:
    """The header and a line a row, in columns; rows in the order of their nets.

    >>> row = {"ranks": 16, "nodes": 2, "channels": 4, "partition": "contiguous", "accumulate": "wire", "result": "a"}
    >>> print("\\n".join(table_lines([{**row, "nodes": 4, "result": "b"}, row])))
    ranks  nodes  channels  partition   accumulate  result
       16      2         4  contiguous  wire        a
       16      4         4  contiguous  wire        b
    """
    ordered = sorted(rows, key=lambda row: [(isinstance(row[name], str), row[name]) for name in COLUMNS])
    cells = [[*COLUMNS], *([str(row[name]) for name in COLUMNS] for row in ordered)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numbers = {place for place, name in enumerate(COLUMNS) if all(isinstance(row[name], int) for row in rows)}
    return [
        "  ".join(
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
