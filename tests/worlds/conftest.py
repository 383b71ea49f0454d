"""Real pytest runs of small suites on ranks, and what they reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

LIMIT = 400

_RECORDING_CONFTEST = """
import glob, json, os

def pytest_configure(config):
    config.records = not hasattr(config, "workerinput")
    global the_config
    the_config = config

def pytest_runtest_logreport(report):
    if the_config.records:
        name = report.nodeid.split("::")[-1]
        record = dict(name=name, when=report.when, outcome=report.outcome, text=report.longreprtext,
                      output=report.capstdout, facts=getattr(report, "gt_facts", []),
                      xfailed=hasattr(report, "wasxfail"), duration=report.duration)
        with open(os.environ["RECORDS"], "a") as file:
            file.write(json.dumps(record) + "\\n")

def pytest_runtest_logfinish(nodeid):
    worker = getattr(the_config, "workerinput", {})
    if "gt_rank" not in worker:
        below = descendants(os.getpid())
        ranks = set(below) - set(children(os.getpid()))
        footprint = dict(test=nodeid.split("::")[-1], worker=worker.get("workerid"), processes=len(below),
                         files=len(os.listdir("/proc/self/fd")), folders=len(glob.glob(os.environ["TMPDIR"] + "/*/*")),
                         kib=kib("self"), kib_of_ranks=max(map(kib, ranks), default=0))
        with open(os.environ["RECORDS"] + ".footprints", "a") as file:
            file.write(json.dumps(footprint) + "\\n")

def kib(pid):
    try:
        lines = open(f"/proc/{pid}/smaps_rollup").read().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    except OSError:
        return 0

def children(pid):
    try:
        return open(f"/proc/{pid}/task/{pid}/children").read().split()
    except OSError:
        return []

def descendants(pid):
    return [each for child in children(pid) for each in [child, *descendants(child)]]
"""


@dataclass(frozen=True)
class Run:
    """A finished pytest run: its output, and its reports by test name and phase."""

    folder: Path
    status: int
    output: str
    reports: dict[str, dict[str, dict[str, Any]]]
    footprints: list[dict[str, Any]]
    """After each test: processes below pytest's, its open files, folders below TMPDIR's, private memory in KiB."""

    def outcome(self, name: str) -> str:
        """passed, failed, skipped, xfailed, or error for a setup or teardown that failed."""
        phases = self.reports[name]
        for when, report in phases.items():
            if report["outcome"] == "failed":
                return "failed" if when == "call" else "error"
        if any(report["xfailed"] for report in phases.values()):
            return "xfailed"
        return "skipped" if any(report["outcome"] == "skipped" for report in phases.values()) else "passed"

    def text(self, name: str) -> str:
        """The failure as the terminal shows it, of all phases."""
        return "\n".join(report["text"] for report in self.reports[name].values())

    def left_over(self) -> list[str]:
        return left_over(self.folder)


class Suite:
    """A folder with test files, to be run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        (folder / "pytest.ini").write_text("[pytest]\n")
        self.write("conftest.py", _RECORDING_CONFTEST)

    def write(self, name: str, source: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(source))

    def start(
        self, *args: str, launcher: tuple[str, ...] = (), environ: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        """Start ``pytest *args``; with ``launcher``, torchrun's arguments, in each process that torchrun starts."""
        torchrun = ("-m", "torch.distributed.run", *launcher) if launcher else ()
        environ = {**os.environ, **environ, "TMPDIR": str(self.folder / "tmp"), "RECORDS": str(self.folder / "records")}
        for name in [name for name in environ if name.startswith("PYTEST_")]:
            del environ[name]
        return subprocess.Popen(
            [sys.executable, *torchrun, "-m", "pytest", f"--rootdir={self.folder}", "--gt-device=cpu", *args],
            cwd=self.folder, env=environ, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *args: str, **how: Any) -> Run:
        return self.run_together(self.start(*args, **how))

    def run_together(self, *processes: subprocess.Popen[str], limit: float = LIMIT) -> Run:
        """What processes did that were started for one run; the status is the first one's."""
        try:
            outputs = [process.communicate(timeout=limit)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        status = processes[0].returncode
        return Run(self.folder, status, "".join(outputs), self._reports(), _lines(self.folder / "records.footprints"))

    def left_over(self) -> list[str]:
        return left_over(self.folder)

    def _reports(self) -> dict[str, dict[str, dict[str, Any]]]:
        reports: dict[str, dict[str, dict[str, Any]]] = {}
        for record in _lines(self.folder / "records"):
            reports.setdefault(record["name"], {})[record["when"]] = record
        return reports


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def left_over(folder: Path) -> list[str]:
    """Processes that still run for a suite, which hold its ports and locks, and what it left in its temporary folder.

    Pytest and torch keep folders of their own there. A lock file may stay: removing it would race with taking it.
    """
    left = [path for path in (folder / "tmp").iterdir() if not path.name.startswith(_KEPT_BY_OTHERS)]
    return _processes_of(folder) + [str(path) for path in left if path.suffix != ".lock"]


_KEPT_BY_OTHERS = ("pytest-of-", "torchinductor_", "torchelastic_")


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that have the folder in them, as the forkserver and its ranks do."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(f"{entry.parent.name}: {line[:80]}")
    return found


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path / "suite")


@pytest.fixture(scope="module")
def module_suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """For a run that the tests of a module look at together."""
    return Suite(tmp_path_factory.mktemp("module") / "suite")
