"""Real pytest runs of small suites on ranks, and what they reported."""

import fcntl
import json
import os
import shutil
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
SUITES = Path(__file__).parents[2] / "fixtures" / "suites"

# Hypothesis would be imported to say a word at the end of each run.
_QUICK = ("-p", "no:hypothesispytest")


@dataclass(frozen=True)
class Run:
    """A finished pytest run: its output, and its reports by test name and phase."""

    folder: Path
    status: int
    output: str
    reports: dict[str, dict[str, dict[str, Any]]]
    footprints: list[dict[str, Any]]
    """After each test, in the worker of xdist that has dispatched it.

    ``processes`` below it, ``strays`` of the run below nobody, its open ``files``, ``folders``
    below TMPDIR's, ``ports`` that all of them listen on, ``locks`` of slots that are held; with
    ``RECORD_MEMORY`` in its environment private memory in ``kib``.
    """

    def outcome(self, name: str) -> str:
        """passed, failed, skipped, xfailed, or error for a setup or teardown that failed."""
        phases = self.reports[name]
        for when, report in phases.items():
            if report["outcome"] == "failed":
                return "failed" if when == "call" else "error"
        if any(report["xfailed"] for report in phases.values()):
            return "xfailed"
        return (
            "skipped"
            if any(report["outcome"] == "skipped" for report in phases.values())
            else "passed"
        )

    def text(self, name: str) -> str:
        """The failure as the terminal shows it, of all phases."""
        return "\n".join(report["text"] for report in self.reports[name].values())

    def footprint(self, name: str) -> dict[str, Any]:
        """Return the state after a test that ran in a worker of xdist."""
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
        self.take("recording")

    def take(self, name: str) -> None:
        """Add the files of ``fixtures/suites/name``."""
        shutil.copytree(
            SUITES / name,
            self.folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )

    def write(self, name: str, source: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(source))

    def start(
        self,
        *args: str,
        launcher: tuple[str, ...] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
        without_plugin: bool = False,
    ) -> subprocess.Popen[str]:
        """Start ``pytest *args``.

        With ``launcher``, torchrun's arguments, in each process that torchrun starts.
        """
        plugin = ("-p", "no:gtrainer") if without_plugin else ("--gt-device=cpu",)
        torchrun = ("-m", "torch.distributed.run", *launcher) if launcher else ()
        environ = {
            **os.environ,
            "TMPDIR": str(self.folder / "tmp"),
            "RECORDS": str(self.records),
            **environ,
        }
        for name in [
            name for name in environ if name.startswith("PYTEST_") or name == "OMP_NUM_THREADS"
        ]:
            del environ[name]  # ranks have one thread of their own accord
        return subprocess.Popen(
            [
                sys.executable,
                *torchrun,
                "-m",
                "pytest",
                f"--rootdir={self.folder}",
                *plugin,
                *_QUICK,
                *args,
            ],
            cwd=self.folder,
            env=environ,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_heed_ctrl_c,
        )

    def run(self, *args: str, **how: Any) -> Run:
        return self.run_together(self.start(*args, **how))

    def run_together(self, *processes: subprocess.Popen[str], limit: float = LIMIT) -> Run:
        """Run processes of one run; the exit status is the first one's."""
        try:
            outputs = [process.communicate(timeout=limit)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        status, footprints = (
            processes[0].returncode,
            _lines(self.records.with_suffix(".footprints")),
        )
        return Run(self.folder, status, "".join(outputs), self._reports(), footprints)

    def left_over(self) -> list[str]:
        return left_over(self.folder)

    def _reports(self) -> dict[str, dict[str, dict[str, Any]]]:
        reports: dict[str, dict[str, dict[str, Any]]] = {}
        for record in _lines(self.records):
            reports.setdefault(record["name"], {})[record["when"]] = record
        return reports


def _heed_ctrl_c() -> None:
    """Handle SIGINT, which a shell lets background processes and their children ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def left_over(folder: Path) -> list[str]:
    """Processes that still run for a suite, which hold its ports, its locks, and what it left in
    its temporary folder.

    Pytest and torch keep folders of their own there. A lock file may stay: removing it would race
    with taking it.
    """
    left = [path for path in (folder / "tmp").iterdir() if not path.name.startswith(_KEPT)]
    leases = [
        path
        for path in (folder / "tmp").rglob("gtrainer-leases/**/*")
        if path.is_file() and _is_locked(path)
    ]
    return _processes_of(folder) + [
        str(path) for path in [*left, *leases] if path.suffix != ".lock"
    ]


_KEPT = ("pytest-of-", "torchinductor_", "torchelastic_", "gtrainer-locks-")


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
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
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
