"""Output on the terminal: progress of long work, tables at the end of a run, and the summary."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer import facts, options
from pytest_gtrainer.facts import Fact, counted, of_kind, spell_counts

MOST_LINES, MOST_LETTERS = 18, 400
_NET = ("ranks", "nodes", "channels", "algorithm", "partition", "accumulate")


def _rule_label(fact: Fact) -> str:
    """Return the result of a rule; a bad one with rule and pass, as each is read."""
    if fact["result"] in ("error", "broken"):
        return f"{fact['rule']} of {fact['pass']} {fact['result']}"
    return str(fact["result"])


def _world_label(fact: Fact) -> str:
    from pytest_gtrainer.report.collected import world_label

    return f"tests in {world_label(fact)}"


_TOPICS = (
    ("worlds", "world", _world_label),
    ("goldens", "golden", lambda fact: fact["outcome"]),
    ("inline", "inline", lambda fact: fact["outcome"]),
    ("verdicts", "verdict", lambda fact: fact["outcome"]),
    ("kinds", "kind", lambda fact: fact["outcome"]),
    ("rules", "conformance", _rule_label),
    ("assumed", "assumed", lambda fact: fact["what"]),
    ("idle", "idle", lambda fact: fact["what"]),
    ("skipped", "skip", lambda fact: fact["cause"]),
    ("repeated", "repeat", lambda fact: fact["what"]),
    ("leaked", "leak", lambda fact: f"{fact['test']} changed {fact['what']}"),
    ("left", "left", lambda fact: f"{fact['what']} by {fact['test']}"),
)
"""The lines of the summary: title, kind of facts, and the label that is counted."""

_RULE = ("rule", "result", "says", "graph", "why")
_WORST = ("error", "broken", "proves nothing", "not claimed", "held")
_JUDGED = {"error", "broken", "held"}
_BESIDE_THE_GRAPH = "held beside the graph"
"""The result of the rule ``state``: a pass that does nothing to a graph holds it, too."""


class SummaryPlugin:
    """Gathers the facts that reports carry and prints them once, if there are any."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.facts: list[Fact] = []
        self._nets: dict[str, list[Fact]] = {}  # by test function

    def pytest_sessionstart(self) -> None:
        """Write notifications of "progress" to the terminal, even while output is captured.

        Only to a terminal, where a person looks: not to a file or a pipe, and not from a worker.
        """
        reporter: pytest.TerminalReporter | None = self.config.pluginmanager.getplugin(
            "terminalreporter"
        )
        if reporter is None or not reporter.isatty or hasattr(self.config, "workerinput"):
            return
        # pytest's capture replaces file descriptor 1 during a test. A copy made now, before any
        # test, remains the terminal, and writing to it needs no stop of the capture.
        terminal = os.dup(sys.stdout.fileno())

        def write(text: str) -> None:
            line = f"\ngtrainer: {facts.one_line(text)}\n"
            os.write(terminal, line.encode(errors="backslashreplace"))

        with ExitStack() as stack:
            stack.callback(os.close, terminal)
            stack.enter_context(facts.watching({"progress": write}))
            self.config.add_cleanup(stack.pop_all().close)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = getattr(report, "gt_facts", [])
        if not found:
            return
        from pytest_gtrainer.report.collected import SHOWN

        for fact in found:
            if fact["kind"] in SHOWN:
                continue
            self.facts.append(fact)
            if fact["kind"] == "net":
                self._nets.setdefault(report.nodeid.partition("[")[0], []).append(fact)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        sweeps: dict[str, list[Fact]] = {}
        for fact in facts.of_kind(self.facts, "sweep"):
            sweeps.setdefault(fact["sweep"], []).append(fact)
        for name, rows in sweeps.items():
            write_section(terminalreporter, "-", f"sweep {name}", sweep_table(rows))
        for test, rows in self._nets.items():
            # A table compares nets; one net that was run several times needs none.
            if len(set(map(itemgetter(*_NET), rows))) > 1:
                write_section(terminalreporter, "-", f"nets of {test}", net_table(rows))
        lines = bounded(list(map(facts.one_line, self.lines())))
        if lines:
            write_section(terminalreporter, "=", "gtrainer", lines)

    def lines(self) -> list[str]:
        """Return the whole summary, for the page of a report; the terminal shows less."""
        plugin = self.config.pluginmanager.getplugin
        goldens, unused = plugin("gtrainer-goldens"), plugin("gtrainer-unused-goldens")
        found = self.facts + goldens.late_facts + _find_idle(self.facts)
        return summary_lines(found) + goldens.summary_lines() + unused.lines


def _find_idle(found: Sequence[Fact]) -> list[Fact]:
    """Return a fact for each thing that checked nothing in the whole run, which is green.

    These are a sweep of which no cell was judged, a pass that claims no rule, and a test function
    that asks for ``gt_golden`` and does not use it in any of its cases.
    """
    results: dict[str, list[str]] = {}
    for row in facts.of_kind(found, "sweep"):
        results.setdefault(row["sweep"], []).append(row["result"])
    idle: list[Fact] = []
    for name, each in results.items():
        if set(each) == {"not judged"}:
            cells = "its cell was not" if len(each) == 1 else f"none of its {len(each)} cells was"
            idle.append({"kind": "idle", "what": f"sweep {name}: {cells} judged"})

    claims: dict[str, set[str]] = {}
    for row in facts.of_kind(found, "conformance"):
        claims.setdefault(row["pass"], set()).add(row["result"])
    for name, outcomes in claims.items():
        if outcomes == {"not claimed"}:
            idle.append({"kind": "idle", "what": f"conformance of {name}: no rule is claimed"})

    uses: dict[str, list[bool]] = {}
    for use in facts.of_kind(found, "golden_use"):
        uses.setdefault(use["test"], []).append(use["checks"])
    for name, checks in uses.items():
        if not any(checks):
            what = f"{name} asks for gt_golden and checks nothing"
            idle += [{"kind": "idle", "what": what}] * len(checks)
    return idle


def write_section(
    reporter: pytest.TerminalReporter, sign: str, title: str, lines: Sequence[str]
) -> None:
    """Write a line with a title, then the lines."""
    reporter.write_sep(sign, facts.one_line(title))
    for line in lines:
        reporter.write_line(facts.one_line(line))


def bounded(lines: list[str], most: int = MOST_LINES, letters: int = MOST_LETTERS) -> list[str]:
    """Cut to ``most`` lines of about ``letters`` letters, and say so where something is cut.

    >>> bounded(["a", "b", "c", "d"], most=3)
    ['a', 'b', '… and 2 more lines: --gt-report FILE has all of them']
    >>> bounded(["verdicts  2 different, 1 equal"], letters=25)
    ['verdicts  2 different, …: --gt-report FILE has the whole line']
    """
    shown = []
    for line in lines:
        # Behind an item of a list; a line without commas, as a command, is useless in part.
        cut = line[:letters].rpartition(", ")[0]
        if len(line) > letters and cut:
            line = f"{cut}, …: --gt-report FILE has the whole line"
        shown.append(line)

    if len(shown) > most:
        left = counted(len(shown) - most + 1, "more line")
        shown[most - 1 :] = [f"… and {left}: --gt-report FILE has all of them"]
    return shown


def summary_lines(facts: list[Fact]) -> list[str]:
    """Return a line for each topic that has facts.

    >>> equal = {"kind": "verdict", "outcome": "equal"}
    >>> summary_lines([equal, equal])
    ['verdicts  2 equal']
    >>> summary_lines([{"kind": "world", "world": "fake", "size": 4}])
    ['worlds    1 test in fake(4)']
    """
    lines = []
    for title, kind, label in _TOPICS:
        counts = Counter(map(label, of_kind(facts, kind)))
        if counts:
            line = spell_counts(dict(sorted(counts.items())))
            lines.append(f"{title:<9} " + re.sub(r"\b1 tests in\b", "1 test in", line))
    return lines


def net_table(rows: Sequence[Fact]) -> list[str]:
    """Return the table of the nets that a test of a simulated world ran under, in their order."""
    names = (*_NET, "result")
    # A setting may be a number or a word, and Python does not compare the two.
    cells = sorted(
        map(itemgetter(*names), rows),
        key=lambda row: [(isinstance(cell, str), cell) for cell in row],
    )
    return in_columns([names, *cells])


def sweep_table(rows: Sequence[Fact]) -> list[str]:
    """Return the table of a sweep: judged cells, the others counted by reason, and counts."""
    cells = []
    not_judged: Counter[str] = Counter()
    for row in rows:
        if row["result"] == "not judged":
            not_judged[row["why"]] += 1
        else:
            cells.append([*row["settings"].values(), row["result"], row["why"]])

    lines = []
    if cells:
        lines += in_columns([[*rows[0]["settings"], "result", "why"], *cells])
    for why, count in not_judged.items():
        lines.append(f"{counted(count, 'cell')} not judged: {why}")
    lines.append(spell_counts(Counter(row["result"] for row in rows)))
    return lines


def in_columns(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return rows as lines, the header first; columns of whole numbers are aligned to the right."""
    columns = []
    for column in zip(*rows, strict=True):
        texts = list(map(str, column))
        width = max(map(len, texts))
        align = str.ljust
        if all(isinstance(cell, int) for cell in column[1:]):
            align = str.rjust
        columns.append([align(text, width) for text in texts])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


class ConformanceTable:
    """Gathers the result of each rule of conformance: the worst one of all ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: dict[str, dict[str, Fact]] = {}  # by pass and rule
        # By pass: results of tests that were skipped for them or judged their rule.
        self._results: dict[str, set[str]] = {}
        self._names_a_pass = options.get(config, "pass") is not None
        # Of the command line: a project may set the ini twins for all of its runs.
        self._asked = [
            f"--gt-{name}"
            for name in ("pass", "kind", "model", "conformance", "conformance-against")
            if config.getoption(f"--gt-{name}") is not None
        ]
        for option, does in (
            ("--gt-kind", "chooses the rules of --gt-pass"),
            ("--gt-model", "gives --gt-pass further graphs"),
        ):
            if option in self._asked and not self._names_a_pass:
                raise pytest.UsageError(
                    f"{option} {does}, and no pass is given: add "
                    "--gt-pass=my_package.passes:my_pass, or leave it out"
                )
        self._tests_ran = False
        against = options.get(config, "conformance-against")
        here = config.invocation_params.dir
        self._before = None if against is None else _read_table(against, Path(here, against))
        self._file: Path | None = None
        self._is_not_written = ""
        if not hasattr(config, "workerinput"):
            self._file = options.file_to_write(config, "conformance", "conformance.json")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests_ran = True
        for fact in facts.of_kind(getattr(report, "gt_facts", []), "conformance"):
            # A test may judge, on purpose, a pass that proves nothing, and pass: it chose no rules.
            if report.skipped or fact["result"] in _JUDGED:
                result = fact["result"]
                if (fact["rule"], result) == ("state", "held"):
                    result = _BESIDE_THE_GRAPH
                self._results.setdefault(fact["pass"], set()).add(result)
            rows = self._rows.setdefault(fact["pass"], {})
            known = rows.get(fact["rule"], fact)
            rows[fact["rule"]] = min(known, fact, key=lambda each: _WORST.index(each["result"]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, rows in self._rows.items():
            lines = in_columns([_RULE, *map(itemgetter(*_RULE), rows.values())])
            counts = Counter(row["result"] for row in rows.values())
            lines.append(spell_counts({result: counts[result] for result in reversed(_WORST)}))
            lines += self._changes(name, rows)
            write_section(terminalreporter, "-", f"conformance of {name}", lines)
        for line in filter(None, [*self._nothing_judged(), self._is_not_written]):
            terminalreporter.write_line(facts.one_line(line))

    def _nothing_judged(self) -> list[str]:
        """Return a sentence for each pass without a judged rule; such a run must not be green."""
        found = []
        for name, results in self._results.items():
            if results & _JUDGED or results == {_BESIDE_THE_GRAPH}:
                continue
            if "proves nothing" in results:
                found.append(
                    f"no rule could have failed: {name} finds nothing to do in these graphs. "
                    "Choose other rules, say which kind of pass it is (--gt-kind), or test it by "
                    "pass files, on graphs of your own"
                )
            elif self._names_a_pass:
                found.append(
                    f"no rule was judged: {name} claims none of the rules that were chosen. "
                    "Choose others"
                )

        if (self._asked or self._names_a_pass) and self._tests_ran and not self._rows:
            asked = " and ".join(self._asked or ["gt_pass"])
            found.append(
                f"no rule was judged for {asked}: no test of conformance has run. Choose some by "
                "--pyargs pytest_gtrainer.conformance; -rs says why those that were chosen are "
                "skipped"
            )
        return found

    def _changes(self, name: str, rows: dict[str, Fact]) -> list[str]:
        """Return the differences from the table of ``--gt-conformance-against``."""
        if self._before is None:
            return []
        # The table before may have one pass, under another name: a pass and its successor.
        before: dict[str, Any] = self._before.get(name) or next(iter(self._before.values()), {})
        changed = []
        for rule, row in rows.items():
            was = before.get(rule, {"result": "not judged"})["result"]
            if was != row["result"]:
                changed.append(f"{rule}: was {was}, is {row['result']}")

        # A rule that nobody judges any more has not kept its result.
        gone = [f"{rule} ({row['result']})" for rule, row in before.items() if rule not in rows]
        if gone:
            changed.append(f"in the table before and not in this run: {', '.join(gone)}")
        return changed or ["no rule has another result than before"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return
        if session.exitstatus == pytest.ExitCode.OK and self._nothing_judged():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        # The table of an earlier run is kept if no test has run, as with --collect-only.
        if self._file is None or not self._tests_ran:
            return
        table: dict[str, dict[str, Any]] = {}
        for name, rows in self._rows.items():
            table[name] = {}
            for rule, row in rows.items():
                table[name][rule] = {column: row[column] for column in _RULE[1:]}
        try:
            self._file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            self._is_not_written = f"no table of conformance: {type(error).__name__}: {error}"


def _read_table(given: str, file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for rows in found.values():
            assert all(row["result"] in _WORST for row in rows.values())
    except (OSError, ValueError, AssertionError, AttributeError, TypeError, KeyError) as error:
        raise pytest.UsageError(
            f"--gt-conformance-against={given}: this is no table that --gt-conformance wrote "
            f"({error})"
        ) from None
    return found
