"""``-p tests.parity.resume --resume=FILE``: continue a long run that was cut.

A test that has passed, or was skipped, is a line of the file, with its report of the sweep; it
does not run again, and the table at the end has its row. Failures run again.
"""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--resume", metavar="FILE", type=Path, help="where a long run keeps what it has done"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("resume") is not None and not hasattr(
        config, "workerinput"
    ):  # not in a rank
        config.pluginmanager.register(Resume(config.getoption("resume"), config), "resume")


class Resume:
    def __init__(self, file: Path, config: pytest.Config) -> None:
        self.file, self.config = file, config
        self.done: dict[str, list[dict[str, Any]]] = {}
        self._failed: set[str] = set()
        self._facts: dict[str, list[dict[str, Any]]] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                self.done |= [json.loads(line)]  # a pair: node id, facts
            except ValueError:  # the line that was being written when the run was cut
                continue

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        old = [item for item in items if item.nodeid in self.done]
        if old:
            items[:] = [item for item in items if item.nodeid not in self.done]
            self.config.hook.pytest_deselected(items=old)
            summary = self.config.pluginmanager.getplugin("gtrainer-summary")
            summary.facts += [fact for item in old for fact in self.done[item.nodeid]]

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> str:
        return f"{self.file}: {len(self.done)} done before, {len(items)} to run"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._facts.setdefault(report.nodeid, []).extend(
            fact for fact in getattr(report, "gt_facts", ()) if fact["kind"] == "sweep"
        )
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self._failed:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(
                    "\n" + json.dumps([report.nodeid, self._facts[report.nodeid]])
                )  # behind a torn line, too

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.done:
            session.exitstatus = pytest.ExitCode.OK
