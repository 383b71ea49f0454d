"""``--outcomes FILE``: write what became of each test, with the reason, as JSON."""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--outcomes", metavar="FILE", help="write outcome and reason of each test")


class Outcomes:
    """Keep the first outcome of a test that is not "passed", and how many seconds it took."""

    def __init__(self, file):
        self.file = Path(file).absolute()
        self.found = {}
        self.path = Path()

    def pytest_collectstart(self, collector):
        if isinstance(collector, pytest.File):
            self.path = collector.path

    def pytest_runtest_logstart(self, nodeid, location):
        self.path = Path(location[0])

    def pytest_collectreport(self, report):
        if report.failed:
            # All tests of the file are missing: the file stands for them.
            self._keep(report.nodeid, "not collected", _last_line(report), 0.0)
            self._write()

    def pytest_runtest_logreport(self, report):
        if report.when == "setup" and report.passed:
            return  # nothing has passed yet: the run may be cut off in the middle of the test
        outcome = "passed"
        reason = ""
        if report.skipped:
            outcome, reason = "skipped", str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed:
            outcome, reason = "failed", _last_line(report)
        self._keep(report.nodeid, outcome, reason, report.duration)
        # After each test: a run that is cut off keeps what it had.
        self._write()

    def _keep(self, nodeid, outcome, reason, seconds):
        # Outside of the root directory pytest leaves the file out of the id.
        name = f"{self.path.name}::{nodeid.partition('::')[2]}".removesuffix("::")
        before = self.found.get(name, {"outcome": "passed", "reason": "", "seconds": 0.0})
        if before["outcome"] != "passed":
            outcome, reason = before["outcome"], before["reason"]
        seconds = round(before["seconds"] + seconds, 1)
        self.found[name] = {"outcome": outcome, "reason": reason, "seconds": seconds}

    def _write(self):
        self.file.write_text(json.dumps(self.found, indent=1, sort_keys=True) + "\n")


def _last_line(report):
    """The error of a report in one line: the last one that pytest marks with E."""
    text = report.longreprtext.splitlines()
    marked = [line[1:].strip() for line in text if line.startswith("E ") and line[1:].strip()]
    return (marked or text or [""])[0][:300]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    file = config.getoption("outcomes")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(file), "titan_outcomes")
