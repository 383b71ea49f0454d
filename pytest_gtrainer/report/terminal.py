"""What a run says on the terminal: long work while it goes on; at the end tables, one of conformance, and a summary."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer import facts, options
from pytest_gtrainer.facts import Fact, counted
from pytest_gtrainer.report.collected import SHOWN, world_label

MOST_LINES, MOST_LETTERS = 18, 400
_NET = ("ranks", "nodes", "channels", "algorithm", "partition", "accumulate")
_BAD = {"error", "broken"}
_TOPICS = (
    ("worlds", "world", lambda fact: f"tests in {world_label(fact)}"),
    ("goldens", "golden", lambda fact: fact["outcome"]),
    ("inline", "inline", lambda fact: fact["outcome"]),
    ("verdicts", "verdict", lambda fact: fact["outcome"]),
    (
        "rules",
        "conformance",
        lambda fact: (
            f"{fact['rule']} of {fact['pass']} " * (fact["result"] in _BAD) + fact["result"]
        ),
    ),
    ("idle", "idle", lambda fact: fact["what"]),
    ("skipped", "skip", lambda fact: fact["cause"]),
    ("leaked", "leak", lambda fact: f"{fact['test']} changed {fact['what']}"),
    ("left", "left", lambda fact: f"{fact['what']} by {fact['test']}"),
)
"""The lines of the summary: title, kind of facts, what is counted."""

_RULE = ("rule", "result", "says", "graph", "why")
_WORST = ("error", "broken", "proves nothing", "not claimed", "held")
_JUDGED = {"error", "broken", "held"}


class SummaryPlugin:
    """Gathers the facts that reports carry and prints them once, if there are any."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.facts: list[Fact] = []
        self._nets: dict[str, list[Fact]] = {}  # by test function

    def pytest_sessionstart(self) -> None:
        """From now on write what is told on ``progress`` to the terminal, also while the output of a test is captured.
        Only where a person looks: a terminal, not a file or a pipe, and not in a worker. The line goes to a copy of the
        terminal's file descriptor, so that nothing is captured or has to stop capturing, and ends before the next."""
        reporter: pytest.TerminalReporter | None = self.config.pluginmanager.getplugin(
            "terminalreporter"
        )
        if reporter is None or not reporter.isatty or hasattr(self.config, "workerinput"):
            return
        terminal = os.dup(sys.stdout.fileno())  # output is not captured yet

        def write(text: str) -> None:
            os.write(
                terminal, f"\ngtrainer: {facts.one_line(text)}\n".encode(errors="backslashreplace")
            )

        with ExitStack() as stack:
            stack.callback(os.close, terminal)
            stack.enter_context(facts.watching({"progress": write}))
            self.config.add_cleanup(stack.pop_all().close)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seen = [fact for fact in getattr(report, "gt_facts", []) if fact["kind"] not in SHOWN]
        self.facts += seen
        for fact in seen:
            if fact["kind"] == "net":
                self._nets.setdefault(report.nodeid.partition("[")[0], []).append(fact)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        sweeps: dict[str, list[Fact]] = {}
        for fact in self.facts:
            if fact["kind"] == "sweep":
                sweeps.setdefault(fact["sweep"], []).append(fact)
        sections = [("-", f"sweep {name}", sweep_table(rows)) for name, rows in sweeps.items()]
        for test, rows in self._nets.items():
            if (
                len({tuple(row[name] for name in _NET) for row in rows}) > 1
            ):  # of several nets, not one net twice
                sections.append(("-", f"nets of {test}", net_table(rows)))
        sections.append(("=", "gtrainer", bounded(list(map(facts.one_line, self.lines())))))
        for sign, title, lines in sections:
            if lines:
                terminalreporter.write_sep(sign, facts.one_line(title))
            for line in lines:
                terminalreporter.write_line(facts.one_line(line))

    def lines(self) -> list[str]:
        """All that there is to say; the terminal shows ``bounded`` lines of it, the page of a report all."""
        plugin = self.config.pluginmanager.getplugin
        goldens, unused = plugin("gtrainer-goldens"), plugin("gtrainer-unused-goldens")
        return (
            summary_lines(self.facts + goldens.late_facts) + goldens.summary_lines() + unused.lines
        )


def bounded(lines: list[str], most: int = MOST_LINES, letters: int = MOST_LETTERS) -> list[str]:
    """At most so many lines of at most about so many letters; where there would be more, it says so.

    >>> bounded(["a", "b", "c", "d"], most=3)
    ['a', 'b', '… and 2 more lines: --gt-report FILE has all of them']
    >>> bounded(["verdicts  2 different, 1 equal"], letters=25)
    ['verdicts  2 different, …: --gt-report FILE has the whole line']
    """
    cut = [
        line[:letters].rpartition(", ")[0] if len(line) > letters else "" for line in lines
    ]  # a list; no command
    whole = ", …: --gt-report FILE has the whole line"
    lines = [short + whole if short else line for short, line in zip(cut, lines, strict=True)]
    if len(lines) <= most:
        return lines
    left = len(lines) - most + 1
    return [
        *lines[: most - 1],
        f"… and {counted(left, 'more line')}: --gt-report FILE has all of them",
    ]


def summary_lines(facts: list[Fact]) -> list[str]:
    """At most one line a topic, none for what did not happen.

    >>> summary_lines([{"kind": "verdict", "outcome": "equal"}, {"kind": "verdict", "outcome": "equal"}])
    ['verdicts  2 equal']
    >>> summary_lines([{"kind": "world", "world": "fake", "size": 4}])
    ['worlds    1 test in fake(4)']
    """
    lines = []
    for title, kind, label in _TOPICS:
        if counts := Counter(label(fact) for fact in facts if fact["kind"] == kind):
            told = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
            lines.append(f"{title:<9} " + re.sub(r"\b1 tests in\b", "1 test in", told))
    return lines


def net_table(rows: Sequence[Fact]) -> list[str]:
    """The nets of a simulated world that a test ran under: the header and a line a net, in their order."""
    names = (*_NET, "result")
    ordered = sorted(
        rows, key=lambda row: [(isinstance(row[name], str), row[name]) for name in names]
    )
    return in_columns([names, *([row[name] for name in names] for row in ordered)])


def sweep_table(rows: Sequence[Fact]) -> list[str]:
    """Header, a line a cell, and the counts; cells that were not judged for one reason are one line."""
    cells = [
        [*row["settings"].values(), row["result"], row["why"]]
        for row in rows
        if row["result"] != "not judged"
    ]
    lines = in_columns([[*rows[0]["settings"], "result", "why"], *cells]) if cells else []
    for why, count in Counter(row["why"] for row in rows if row["result"] == "not judged").items():
        lines.append(f"{count} cell{'' if count == 1 else 's'} not judged: {why}")
    counts = Counter(row["result"] for row in rows)
    return [*lines, ", ".join(f"{count} {result}" for result, count in counts.items())]


def in_columns(rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows as lines, the header first; whole numbers stand to the right."""
    columns = []
    for header, *cells in zip(*rows, strict=True):
        width = max(len(str(cell)) for cell in (header, *cells))
        sign = ">" if all(isinstance(cell, int) for cell in cells) else "<"
        columns.append([f"{cell!s:{sign}{width}}" for cell in (header, *cells)])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


class ConformanceTable:
    """Gathers what was told of each rule; of several ranks the worst."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: dict[str, dict[str, Fact]] = {}  # by pass and rule
        self._results: dict[
            str, set[str]
        ] = {}  # by pass, of tests that failed, passed or were skipped for them
        self._names_a_pass = options.get(config, "pass") is not None
        self._tests_ran = False
        against = options.get(config, "conformance-against")
        self._before = None if against is None else _read(Path(against))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests_ran = True
        for fact in getattr(report, "gt_facts", []):
            if fact["kind"] == "conformance":
                # A test may also judge a pass on purpose that proves nothing, and pass: it chose no rules.
                if report.skipped or fact["result"] in _JUDGED:
                    self._results.setdefault(fact["pass"], set()).add(fact["result"])
                rows = self._rows.setdefault(fact["pass"], {})
                held = rows.get(fact["rule"], fact)
                rows[fact["rule"]] = min(held, fact, key=lambda each: _WORST.index(each["result"]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, rows in self._rows.items():
            terminalreporter.write_sep("-", facts.one_line(f"conformance of {name}"))
            cells = [[row[column] for column in _RULE] for row in rows.values()]
            for line in in_columns([_RULE, *cells]):
                terminalreporter.write_line(facts.one_line(line))
            results = [row["result"] for row in rows.values()]
            counts = (
                f"{results.count(each)} {each}" for each in reversed(_WORST) if each in results
            )
            terminalreporter.write_line(", ".join(counts))
            for line in self._changes(name, rows):
                terminalreporter.write_line(facts.one_line(line))
        for line in self._proved_nothing():
            terminalreporter.write_line(facts.one_line(line))

    def _proved_nothing(self) -> list[str]:
        """A sentence for each pass of which no rule was judged: then the run is not green, whatever was chosen."""
        found = []
        for name, results in self._results.items():
            if results & _JUDGED:
                continue
            if "proves nothing" in results:
                found.append(
                    f"no rule could have failed: {name} finds nothing to do in these graphs. Choose other rules, say "
                    "which kind of pass it is (--gt-kind), or test it by pass files, on graphs of your own"
                )
            elif self._names_a_pass:
                found.append(
                    f"no rule was judged: {name} claims none of the rules that were chosen. Choose others"
                )
        if self._names_a_pass and self._tests_ran and not self._rows:
            found.append("no rule was judged: every test that was chosen was skipped, -rs says why")
        return found

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

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return
        if session.exitstatus == pytest.ExitCode.OK and self._proved_nothing():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if (file := options.get(self._config, "conformance")) is not None:
            told = {
                name: {
                    rule: {column: row[column] for column in _RULE[1:]}
                    for rule, row in rows.items()
                }
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
