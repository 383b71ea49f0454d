"""Real pytest runs of small suites on ranks, and what they reported."""

from __future__ import annotations

import fcntl
import json
import os
import signal
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

# The process that owns the tests needs no torch: with this a suite's files do not make it pay for the import.
_LATE = """
import importlib

class Late:
    def __init__(self, name):
        self.name = name

    def __getattr__(self, attribute):
        return getattr(importlib.import_module(self.name), attribute)

torch, dist = Late("torch"), Late("torch.distributed")
"""

# Hypothesis would be imported to say a word at the end of each run.
_QUICK = ("-p", "no:hypothesispytest")

_RECORDING_CONFTEST = """
import fcntl, glob, json, os, time
from pathlib import Path

def pytest_configure(config):
    time.sleep(float(os.environ.get("SLOW_START", 0)))
    config.records = not hasattr(config, "workerinput")
    global the_config
    the_config = config
    if "gt_rank" not in getattr(config, "workerinput", {}):
        config.pluginmanager.register(Recording())

def record_report(report):
    if the_config.records:
        name = report.nodeid.split("::")[-1]
        record = dict(name=name, when=report.when, outcome=report.outcome, text=report.longreprtext,
                      output=report.capstdout, facts=getattr(report, "gt_facts", []),
                      xfailed=hasattr(report, "wasxfail"), duration=report.duration, log=report.caplog,
                      errors=report.capstderr, properties=report.user_properties, keywords=sorted(report.keywords),
                      location=report.location)
        with open(os.environ["RECORDS"], "a") as file:
            file.write(json.dumps(record) + "\\n")

def record_footprint(nodeid):
    if the_config.pluginmanager.hasplugin("dsession"):
        return  # the workers of xdist do it
    pid = str(os.getpid())
    below = descendants(pid)
    ranks = set(below) - set(children(pid))
    end = time.monotonic() + 20
    while strays() and time.monotonic() < end:
        time.sleep(0.05)
    worker = getattr(the_config, "workerinput", {}).get("workerid")
    if worker is None:
        return  # to read all of this takes longer than a test, and nobody looks at it
    footprint = dict(test=nodeid.split("::")[-1], worker=worker, processes=len(below), strays=strays(),
                     files=len(os.listdir("/proc/self/fd")), folders=len(glob.glob(os.environ["TMPDIR"] + "/*/*")),
                     ports=ports([pid, *below]), locks=locks(), kib=kib("self"),
                     kib_of_ranks=max(map(kib, ranks), default=0))
    with open(os.environ["RECORDS"] + ".footprints", "a") as file:
        file.write(json.dumps(footprint) + "\\n")

class Recording:
    # not hooks of the conftest itself: those would keep ranks off their fast lane
    pytest_runtest_logreport = staticmethod(record_report)
    pytest_runtest_logfinish = staticmethod(record_footprint)

def kib(pid):
    try:
        lines = open(f"/proc/{pid}/smaps_rollup").read().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    except OSError:
        return 0

def children(pid):
    try:
        return [child for child in open(f"/proc/{pid}/task/{pid}/children").read().split() if lives(child)]
    except OSError:
        return []

def lives(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

def descendants(pid):
    return [each for child in children(pid) for each in [child, *descendants(child)]]

def of_this_run():
    # parent and name of whoever has inherited the folder for temporary files, by process number
    wanted, found = f"TMPDIR={os.environ['TMPDIR']}".encode(), {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(bytes(1)):
                name, _, fields = (process / "stat").read_text().rpartition(")")
                found[process.name] = fields.split()[1], name
        except OSError:
            pass
    return found

def strays():
    # processes of the run that are not, or no longer, below the first one
    found, root = of_this_run(), str(os.getpid())
    while found[root][0] in found:
        root = found[root][0]
    tree = {root, *descendants(root)}
    return [name for pid, (_, name) in found.items() if pid not in tree]

def ports(pids):
    # how many ports the processes listen on
    rows = [line.split() for table in glob.glob("/proc/net/tcp*") for line in open(table)]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    held = set()
    for link in (link for pid in pids for link in glob.glob(f"/proc/{pid}/fd/*")):
        try:
            held.add(os.readlink(link))
        except OSError:
            pass
    return len(held & listening)

def locks():
    # slots of the run that somebody holds
    held = set()
    for path in Path(os.environ["TMPDIR"]).glob("*/*/gtrainer-leases/slot-*"):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                held.add(path.name)
    return sorted(held)
"""


@dataclass(frozen=True)
class Run:
    """A finished pytest run: its output, and its reports by test name and phase."""

    folder: Path
    status: int
    output: str
    reports: dict[str, dict[str, dict[str, Any]]]
    footprints: list[dict[str, Any]]
    """After each test, in the worker of xdist that has dispatched it.

    ``processes`` below it, ``strays`` of the run below nobody, its open ``files``, ``folders`` below TMPDIR's,
    ``ports`` that all of them listen on, ``locks`` of slots that are held, private memory in ``kib``.
    """

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

    def footprint(self, name: str) -> dict[str, Any]:
        """What there was after a test that ran in a worker of xdist."""
        return next(each for each in self.footprints if each["test"] == name)

    def left_over(self) -> list[str]:
        return left_over(self.folder)


class Suite:
    """A folder with test files, to be run; the reports of a run go to the file ``records``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = folder / "records"
        (folder / "tmp").mkdir(parents=True)
        (folder / "pytest.ini").write_text("[pytest]\n")
        self.write("conftest.py", _RECORDING_CONFTEST)
        self.write("late.py", _LATE)

    def write(self, name: str, source: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(source))

    def start(
        self, *args: str, launcher: tuple[str, ...] = (), environ: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        """Start ``pytest *args``; with ``launcher``, torchrun's arguments, in each process that torchrun starts."""
        torchrun = ("-m", "torch.distributed.run", *launcher) if launcher else ()
        environ = {**os.environ, "TMPDIR": str(self.folder / "tmp"), "RECORDS": str(self.records), **environ}
        for name in [name for name in environ if name.startswith("PYTEST_")]:
            del environ[name]
        return subprocess.Popen(
            [sys.executable, *torchrun, "-m", "pytest", f"--rootdir={self.folder}", "--gt-device=cpu", *_QUICK, *args],
            cwd=self.folder, env=environ, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=_heed_ctrl_c,
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
        status, footprints = processes[0].returncode, _lines(self.records.with_suffix(".footprints"))
        return Run(self.folder, status, "".join(outputs), self._reports(), footprints)

    def left_over(self) -> list[str]:
        return left_over(self.folder)

    def _reports(self) -> dict[str, dict[str, dict[str, Any]]]:
        reports: dict[str, dict[str, dict[str, Any]]] = {}
        for record in _lines(self.records):
            reports.setdefault(record["name"], {})[record["when"]] = record
        return reports


def _heed_ctrl_c() -> None:
    """What a shell runs in the background, these tests for one, ignores it, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def left_over(folder: Path) -> list[str]:
    """Processes that still run for a suite, which hold its ports, its locks, and what it left in its temporary folder.

    Pytest and torch keep folders of their own there. A lock file may stay: removing it would race with taking it.
    """
    left = [path for path in (folder / "tmp").iterdir() if not path.name.startswith(_KEPT_BY_OTHERS)]
    leases = [path for path in (folder / "tmp").rglob("gtrainer-leases/**/*") if path.is_file() and _is_locked(path)]
    return _processes_of(folder) + [str(path) for path in [*left, *leases] if path.suffix != ".lock"]


_KEPT_BY_OTHERS = ("pytest-of-", "torchinductor_", "torchelastic_")


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _processes_of(folder: Path) -> list[str]:
    """Processes that have inherited the folder for temporary files, by their command lines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder / 'tmp'}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{entry.name}: {line[:80]}")
        except OSError:
            continue
    return found


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path / "suite")


@pytest.fixture(scope="module")
def module_suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """For a run that the tests of a module look at together."""
    return Suite(tmp_path_factory.mktemp("module") / "suite")
