"""Writing accepted inline expectations into source files: once, at the end, by one process.

All reports of a run come here, from ranks and xdist's workers too. A worker that crashes has sent
those of the tests that it has finished. Only tests that have passed count, teardown included.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_gtrainer.facts import Fact
from pytest_gtrainer.golden import _expecttest, literals, store
from pytest_gtrainer.golden.inline import Expectation, by_place, digest, disagreement


@dataclass(slots=True)
class _Test:
    """What the reports of one test have told."""

    nodeid: str
    location: tuple[str, int | None, str]
    outcomes: list[tuple[str | None, str]] = field(default_factory=list)
    expectations: list[Expectation] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        phases = {when for when, _ in self.outcomes}
        return {"call", "teardown"} <= phases and all(outcome == "passed" for _, outcome in self.outcomes)


class AcceptancePlugin:
    """Gathers the expectations of all tests, and accepts them when the last test has ended."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self._tests: dict[tuple[str, int], _Test] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = report.nodeid, id(getattr(report, "node", None))  # xdist: the worker, as two may run one test
        if key not in self._tests or report.when == "setup":  # again: a plugin repeats the test
            self._tests[key] = _Test(report.nodeid, report.location)
        self._tests[key].outcomes.append((report.when, report.outcome))
        self._tests[key].expectations += [Expectation(**each) for each in getattr(report, "gt_inline", ())]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:  # stopped at a failure, or interrupted: as goldens, those of the tests before are written
            self._accept()

    def _accept(self) -> None:
        passed = [(test, each) for test in self._tests.values() if test.has_passed for each in test.expectations]
        edits: dict[str, dict[literals.Edit, _Test]] = {}
        for seen in by_place(passed).values():
            problem = disagreement(((test.nodeid, each) for test, each in seen), "give each its own")
            test, each = seen[0]
            if problem is not None:
                self._fail(test, problem)
            elif each.obtained != each.expected:
                edits.setdefault(each.file, {})[literals.Edit(each.line, each.expected, each.obtained)] = test
        for file in sorted(edits):
            imported = {each.digest for _, each in passed if each.file == file}
            self._accept_in(file, edits[file], imported)

    def _accept_in(self, file: str, edits: dict[literals.Edit, _Test], imported: set[str]) -> None:
        """Edit one file, of which the processes of the run have ``imported`` these states."""
        refused: dict[literals.Edit, str] = {}

        def edited(source: bytes) -> bytes:
            if imported != {digest(source)}:
                raise literals.EditError("was changed while the tests ran")
            new, problems = literals.rewritten(source, edits, _expecttest.spell)
            refused.update(problems)
            return new

        some_test = next(iter(edits.values()))
        try:
            if Path(file).is_absolute():
                raise literals.EditError("lies outside of the root directory")
            store.rewrite(self.root / file, self.root, edited)
        except literals.EditError as error:
            self._fail(some_test, f"{file} {error}: none of its inline expectations is accepted, run again")
        except store.GoldenFileError as error:
            self._fail(some_test, str(error))
        else:
            for edit, problem in refused.items():
                self._fail(edits[edit], f"{file}:{edit.line}: the inline expectation is not accepted: {problem}")
            self._count(file, edits.keys() - refused.keys())

    def _count(self, file: str, edits: set[literals.Edit]) -> None:
        late_facts: list[Fact] = self.config.pluginmanager.getplugin("gtrainer-goldens").late_facts
        for edit in edits:
            outcome = "updated" if edit.old else "created"
            late_facts.append({"kind": "inline", "outcome": outcome, "name": f"{file}:{edit.line}"})

    def _fail(self, test: _Test, problem: str) -> None:
        """One more report of a test, as it has ended already."""
        report = pytest.TestReport(test.nodeid, test.location, {}, "failed", problem, "teardown")
        self.config.hook.pytest_runtest_logreport(report=report)
