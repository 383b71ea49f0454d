"""Goldens that no test checks: found after a full run, told, failed for, or removed.

A golden belongs to the test that its path is made from. It is *unused* if

- its test has run and passed, and has not checked it;
- or no test that was collected is its test, although the file of its test was collected, or is gone.

So the goldens of tests that failed, were skipped, deselected or not reached are used, those of files
that were not collected (ignored, skipped as a whole) too, those of parameters where the set of
parameters is empty here, and those kept for another version of torch. One that only a GPU could judge
(its devices, its environments or its name say so) is *not judged* where there is none. What a full run
is, ``coverage`` says.

What was collected is known to the process that collects, under xdist to each worker, which sends it
when it ends; what a test came to, to all processes that its reports pass through.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import PurePosixPath
from typing import Any

import pytest

from pytest_gtrainer import devices
from pytest_gtrainer.golden import store, tree
from pytest_gtrainer.golden.coverage import asks_for_a_part
from pytest_gtrainer.golden.evidence import Collection, Outcome
from pytest_gtrainer.golden.modes import PRUNE, given
from pytest_gtrainer.golden.naming import SUFFIXES, stem_of_golden, stem_of_test, torch_of
from pytest_gtrainer.golden.plugin import GoldenPlugin
from pytest_gtrainer.supported import installed_minor

_WORKER_OUTPUT = "gt_unowned_goldens"
_MOST_SHOWN = 8


class UnusedGoldens:
    """Gathers what was collected and what ran; registered as ``gtrainer-unused-goldens``."""

    def __init__(self, config: pytest.Config, goldens: GoldenPlugin) -> None:
        self.config = config
        self.root = config.rootpath
        self._goldens = goldens
        self._mode = goldens.modes.unused
        self._collection = Collection()
        self._selected: set[str] = set()
        self._tests: dict[str, Outcome] = {}
        self._cut: str | None = None  # why the run has not come to its end
        self._workers_unowned: set[str] | None = None
        self._lines: list[str] = []
        if given(config, PRUNE) and not hasattr(config, "workerinput"):
            _refuse_a_part(config)

    # -- collecting

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if isinstance(collector, pytest.File):
            self._collection.add_file(collector.nodeid, report.outcome)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._cut = "collection failed"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        self._collection.add(items)
        result = yield
        self._collection.add(items)  # a plugin may add tests
        return result

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected |= {item.nodeid for item in session.items}

    # -- running

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" or report.nodeid not in self._tests:
            self._tests[report.nodeid] = Outcome()  # again: a plugin repeats the test
        self._tests[report.nodeid].add(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        told = getattr(node, "workeroutput", {}).get(_WORKER_OUTPUT)
        if error is not None or told is None:
            self._cut = f"worker {node.gateway.id} has died"
        else:
            agreed = self._workers_unowned
            self._workers_unowned = set(told) if agreed is None else agreed & set(told)

    # -- concluding

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output[_WORKER_OUTPUT] = [str(path) for path in self._collection.unowned(self.root)]
        elif self._mode != "ignore" or any(test.lacks_devices for test in self._tests.values()):
            self._conclude(session, exitstatus)

    def _conclude(self, session: pytest.Session, exitstatus: int) -> None:
        files = tree.goldens(self.root)
        if not files:
            return
        unused, unjudged = self._sorted_out(files)
        part = asks_for_a_part(self.config, files) or self._stopped(exitstatus)
        if self._mode != "ignore" and self._are_ours(files):
            if part is None:
                self._tell(session, unused)
            elif self._mode != "warn":
                self._lines.append(f"unused goldens were not looked for: {part}")
        self._count("not judged", unjudged if part is None else self._skipped(files))

    def _sorted_out(self, files: list[PurePosixPath]) -> tuple[list[PurePosixPath], list[PurePosixPath]]:
        """The goldens that no test uses, and those that could not be judged here."""
        loose = {*self._unowned(), *self._unclaimed(files)} & set(files)
        has_gpu = devices.resolve(self.config).kind == "cuda"
        unjudged = {*self._skipped(files), *(path for path in loose if not has_gpu and tree.needs_gpu(path, self.root))}
        kept = {(self.root / path).resolve() for path in files if path not in loose}  # where a link in use leads to
        unused = [path for path in loose - unjudged if self._is_link(path) or (self.root / path).resolve() not in kept]
        return sorted(unused), sorted(unjudged)

    def _is_link(self, path: PurePosixPath) -> bool:
        return (self.root / path).is_symlink()

    def _unowned(self) -> set[PurePosixPath]:
        if self._workers_unowned is not None:
            return {PurePosixPath(path) for path in self._workers_unowned}
        return set(self._collection.unowned(self.root))

    def _unclaimed(self, files: list[PurePosixPath]) -> set[PurePosixPath]:
        """Goldens of tests that have passed without checking them; those for another torch are not for this run."""
        stems = tree.by_stem([path for path in files if torch_of(path) in (None, installed_minor())])
        return {
            path
            for nodeid, test in self._tests.items()
            if test.is_complete
            for path in stems.get(stem_of_test(nodeid), ())
            if str(path) not in (test.claims or ())
        }

    def _skipped(self, files: list[PurePosixPath]) -> list[PurePosixPath]:
        """Goldens of tests that were skipped for want of devices."""
        stems = {stem_of_test(nodeid) for nodeid, test in self._tests.items() if test.lacks_devices}
        return [path for path in files if stem_of_golden(path) in stems]

    def _stopped(self, exitstatus: int) -> str | None:
        """Why a run has not come to its end."""
        if exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            return self._cut or "the run was stopped"
        left = [nodeid for nodeid in self._selected if nodeid not in self._tests or not self._tests[nodeid].has_ended]
        return self._cut or (f"{len(left)} tests did not run" if left else None)

    def _are_ours(self, files: list[PurePosixPath]) -> bool:
        """Whether the folder is one of goldens: who never checks any may have another use of its name."""
        claimed = any(test.claims for test in self._tests.values())
        return claimed or any(not path.name.endswith(SUFFIXES["text"]) for path in files)

    # -- telling

    def _tell(self, session: pytest.Session, unused: list[PurePosixPath]) -> None:
        if self._mode == "prune":
            unused = self._prune(unused)
        self._count("unused", unused)
        if not unused:
            return
        self._lines.append("goldens that no test checks (--gt-prune-goldens removes them):")
        self._lines += _bounded(unused)
        if self._mode == "warn":
            return
        self._lines.append("a run with unused goldens has failed, as --gt-unused-goldens=fail was given")
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _prune(self, unused: list[PurePosixPath]) -> list[PurePosixPath]:
        """Remove goldens, and say so; returns those that are still there."""
        left = []
        for path in unused:
            try:
                store.remove(self.root / path, self.root)
            except store.GoldenFileError as error:
                self._lines.append(str(error))
                left.append(path)
            else:
                self._lines.append(f"removed {path}")
        self._count("removed", [path for path in unused if path not in left])
        return left

    def _count(self, outcome: str, paths: Iterable[PurePosixPath]) -> None:
        facts = ({"kind": "golden", "outcome": outcome, "name": str(path)} for path in paths)
        self._goldens.late_facts += facts

    def summary_lines(self) -> list[str]:
        """What the run's summary says of unused goldens."""
        return self._lines


def _refuse_a_part(config: pytest.Config) -> None:
    part = asks_for_a_part(config, tree.goldens(config.rootpath))
    if part is not None:
        raise pytest.UsageError(f"--gt-prune-goldens removes goldens only after a run of all tests, and {part}")


def _bounded(paths: list[PurePosixPath]) -> list[str]:
    left = len(paths) - _MOST_SHOWN
    return [f"  {path}" for path in paths[:_MOST_SHOWN]] + ([f"  … and {left} more"] if left > 0 else [])
