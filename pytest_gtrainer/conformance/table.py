"""The table of a run: a line a rule for each pass, in the terminal and as JSON, and against an earlier one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer import options
from pytest_gtrainer.facts import Fact
from pytest_gtrainer.report.terminal import in_columns

COLUMNS = ("rule", "result", "says", "graph", "why")
_WORST = ("error", "broken", "proves nothing", "not claimed", "held")


class ConformanceTable:
    """Gathers what ``rules.judge`` told of each rule; of several ranks the worst."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: dict[str, dict[str, Fact]] = {}  # by pass and rule
        against = options.get(config, "conformance-against")
        self._before = None if against is None else _read(Path(against))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for fact in getattr(report, "gt_facts", []):
            if fact["kind"] == "conformance":
                rows = self._rows.setdefault(fact["pass"], {})
                held = rows.get(fact["rule"], fact)
                rows[fact["rule"]] = min(held, fact, key=lambda each: _WORST.index(each["result"]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, rows in self._rows.items():
            terminalreporter.write_sep("-", f"conformance of {name}")
            cells = [[row[column] for column in COLUMNS] for row in rows.values()]
            for line in in_columns([COLUMNS, *cells]):
                terminalreporter.write_line(line)
            results = [row["result"] for row in rows.values()]
            counts = (f"{results.count(each)} {each}" for each in reversed(_WORST) if each in results)
            terminalreporter.write_line(", ".join(counts))
            for line in self._changes(name, rows):
                terminalreporter.write_line(line)

    def _changes(self, name: str, rows: dict[str, Fact]) -> list[str]:
        """What differs from the table before; of a pass that it does not have, from its only one."""
        if self._before is None:
            return []
        before: dict[str, Any] = self._before.get(name) or next(iter(self._before.values()), {})
        was = {rule: told["result"] for rule, told in before.items()}
        changed = [
            f"{rule}: was {was.get(rule, 'not judged')}, is {row['result']}"
            for rule, row in rows.items()
            if was.get(rule) != row["result"]
        ]
        return changed or ["no rule has another result than before"]

    def pytest_sessionfinish(self) -> None:
        file = options.get(self._config, "conformance")
        if file is not None and not hasattr(self._config, "workerinput"):
            told = {
                name: {rule: {column: row[column] for column in COLUMNS[1:]} for rule, row in rows.items()}
                for name, rows in self._rows.items()
            }
            Path(file).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        assert all(row["result"] in _WORST for rows in found.values() for row in rows.values())
    except (OSError, ValueError, AssertionError, AttributeError, TypeError, KeyError) as error:
        raise pytest.UsageError(
            f"--gt-conformance-against={file}: this is no table that --gt-conformance wrote ({error})"
        ) from None
    return found
