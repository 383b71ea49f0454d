"""Goldens in a pytest run: who judges, who writes, and when.

The process that owns a test judges its claims and alone writes files, after the test's
teardown and only if all of the test has passed. A rank records claims and sends them with its
call report; the parent judges them (``judge_ranks``) and finishes the test (``finish_item``).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer import facts, options
from pytest_gtrainer.golden import store
from pytest_gtrainer.golden.claims import Claim, disagreement
from pytest_gtrainer.golden.naming import FOLDER

_WORKER_OUTPUT = "gt_golden_facts"


class GoldenPlugin:
    """Judges and writes goldens; registered as ``gtrainer-goldens``.

    Attributes:
        late_facts: facts that no report carries, because they were found after the last one.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self.updating = bool(options.get(config, "update-goldens"))
        self.late_facts: list[facts.Fact] = []
        self._is_rank = "gt_rank" in getattr(config, "workerinput", {})
        self._recorded: dict[str, list[Claim]] = {}  # in a rank: what its reports will carry
        self._pending: dict[str, list[Claim]] = {}  # to be written if the test passes
        self._running: str | None = None
        self._outcomes: list[tuple[str | None, str]] = []  # of the running test: phase, outcome
        if self.updating and not hasattr(config, "workerinput"):
            _refuse_in_ci(config)

    # -- while the test runs

    def claim(self, item: pytest.Item, claim: Claim) -> str | None:
        """Judge a check, or keep it for later; returns why it fails."""
        if self._is_rank:
            self._recorded.setdefault(item.nodeid, []).append(claim)
            return None
        outcome, failure = self._judge(item, claim)
        if outcome is not None:
            facts.emit("golden", outcome=outcome, name=claim.path)
        return failure

    def _judge(self, item: pytest.Item, claim: Claim) -> tuple[str | None, str | None]:
        """Outcome, None while it awaits the test's end; and the failure's text."""
        path = self.root / claim.path
        try:
            golden = store.read(path, self.root)
        except store.GoldenFileError as error:
            return "different", self._failure(item, str(error), "")
        if golden is None:
            problem, details = f"{claim.path} is missing", f"\nobtained:\n{_head(claim.text)}"
        else:
            from pytest_gtrainer.golden.compare import difference

            found = difference(claim.kind, golden, claim.text)
            if found is None:
                return "equal", None
            problem, details = f"{claim.path} differs", f"\n{found}"
        if self.updating:
            self._pending.setdefault(item.nodeid, []).append(claim)
            return None, None
        return ("missing" if golden is None else "different"), self._failure(item, problem, details)

    def _failure(self, item: pytest.Item, problem: str, details: str) -> str:
        return f"{problem}{details}\n\nto accept what was obtained:\n  {self.accept_command(item)}"

    # -- ranks

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """In a rank, send the claims along with the call's report (attribute ``gt_goldens``)."""
        report = yield
        if self._is_rank and call.when in ("call", "teardown"):
            report.gt_goldens = [c.to_json() for c in self._recorded.pop(item.nodeid, [])]  # type: ignore[attr-defined]
        return report

    def judge_ranks(self, item: pytest.Item, claims: Mapping[int, list[dict[str, Any]]]) -> str | None:
        """Judge what the ranks of a test have claimed; returns why the test fails."""
        by_rank = {rank: [Claim(**claim) for claim in claimed] for rank, claimed in claims.items()}
        if not any(by_rank.values()):
            return None
        conflict = disagreement(by_rank)
        if conflict is not None:
            self.late_facts.append({"kind": "golden", "outcome": "different", "name": item.nodeid})
            return conflict
        failures = []
        for claim in by_rank[min(by_rank)]:
            outcome, failure = self._judge(item, claim)
            if outcome is not None:
                self.late_facts.append({"kind": "golden", "outcome": outcome, "name": claim.path})
            failures += [failure] if failure is not None else []
        return "\n\n".join(failures) or None

    # -- after the test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._running, self._outcomes = item.nodeid, []
        try:
            return (yield)
        finally:
            self._running = None
            self.finish_item(item, self._passed())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid != self._running:
            return
        if report.when == "setup":
            self._outcomes = []  # a plugin that runs a test again begins here
        self._outcomes.append((report.when, report.outcome))

    def _passed(self) -> bool:
        phases = {when for when, _ in self._outcomes}
        return {"call", "teardown"} <= phases and all(outcome == "passed" for _, outcome in self._outcomes)

    def finish_item(self, item: pytest.Item, passed: bool) -> None:
        """Write what the test's checks left to write if it has passed, else forget it."""
        for claim in self._pending.pop(item.nodeid, []):
            if not passed:
                continue
            path = self.root / claim.path
            outcome = "updated" if path.exists() else "created"
            try:
                store.write(path, self.root, claim.text)
            except store.GoldenFileError as error:
                _report_error(item, str(error))
            else:
                self.late_facts.append({"kind": "golden", "outcome": outcome, "name": claim.path})

    # -- what the summary reads, also from xdist's workers

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output[_WORKER_OUTPUT] = self.late_facts

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.late_facts += (getattr(node, "workeroutput", None) or {}).get(_WORKER_OUTPUT, [])

    # -- commands

    def accept_command(self, item: pytest.Item) -> str:
        """What to type, here and now, to accept this test's goldens."""
        path, separator, rest = item.nodeid.partition("::")
        here = Path(os.path.relpath(self.root / path, self.config.invocation_params.dir)).as_posix()
        given = []
        for name in ("gpus", "device"):
            value = self.config.getoption(f"--gt-{name}")
            given += [f"--gt-{name}={value}"] if value is not None else []
        return shlex.join(["pytest", here + separator + rest, *given, "--gt-update-goldens"])

    def remake_command(self, item: pytest.Item) -> str:
        """The command for a golden's header: from the root, the same for everyone."""
        return shlex.join(["pytest", item.nodeid, "--gt-update-goldens"])


def _refuse_in_ci(config: pytest.Config) -> None:
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if in_ci and not options.get(config, "goldens-in-ci"):
        raise pytest.UsageError(
            f"--gt-update-goldens is refused where CI is set, as nobody would review {FOLDER}/: "
            "update on your machine, or give --gt-goldens-in-ci too"
        )


def _report_error(item: pytest.Item, message: str) -> None:
    """A failure after the last phase: one more report, of the teardown."""
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "teardown")
    item.ihook.pytest_runtest_logreport(report=report)


def _head(text: str, limit: int = 20) -> str:
    lines = text.splitlines()
    rest = [f"… and {len(lines) - limit} more lines"] if len(lines) > limit else []
    return "\n".join([*lines[:limit], *rest])
