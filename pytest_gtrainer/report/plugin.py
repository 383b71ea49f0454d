"""The plugins for ``--gt-report``, ``--gt-summary``, ``--junitxml``, ``--gt-bisect`` and verdicts.

A test's entry in the JUnit file has the properties ``gt_world``, ``gt_ranks``, ``gt_verdict``,
``gt_golden`` and ``gt_digest``: for each comparison of two records one digest a step and side, over
all phases and ranks. Two CI runs whose digests agree have trained alike.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gtrainer import extensions, facts, options
from pytest_gtrainer.golden import artifacts
from pytest_gtrainer.marker import valid_spec_of
from pytest_gtrainer.report.terminal import bounded, write_section

if TYPE_CHECKING:
    from pytest_gtrainer.report.changes import Earlier
    from pytest_gtrainer.report.collected import Test
    from pytest_gtrainer.report.html import PageContent
    from pytest_gtrainer.report.revision import Revision

TABLE = "differences.tsv"
_MOST_MOVES = 60  # lines on the terminal about tests that moved


@contextmanager
def witnessed(item: pytest.Item) -> Iterator[None]:
    """Record what a test shows inside the block, if this run has a report or a JUnit file.

    Every rank records digests; rank 0 records graphs too.
    """
    worker = getattr(item.config, "workerinput", {})
    wants_graphs = options.wants_report(item.config)
    wants_digests = worker.get("gt_digests") or item.config.getoption("xmlpath", None)
    if not wants_graphs and not wants_digests:
        yield
        return
    from pytest_gtrainer.report.witness import Witness

    spec = valid_spec_of(item)
    witness = Witness(
        graphs=wants_graphs and worker.get("gt_rank", 0) == 0,
        mesh=dict(spec.mesh) if spec else None,
    )
    with facts.watching(witness.watchers):
        yield


class ReportPlugin:
    """``gtrainer-report``: gathers reports, and writes page and summary when the run ends.

    Raises:
        pytest.UsageError: a path cannot be written.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._tests: dict[str, Test] = {}
        self._is_written = False
        self._session: pytest.Session | None = None
        self.paths: dict[str, Path] = {}
        here = config.invocation_params.dir
        is_other_side = options.is_other_side(config)
        files = {"report": "report.html", "summary": "summary.md"}
        if is_other_side:
            del files["summary"]  # the run here may write the same file
        for option, example in files.items():
            path = options.file_to_write(config, option, example)
            if path is not None:
                self.paths[option] = path

        earlier_page = options.get(config, "report-against")
        revision_name = options.get(config, "against")
        self.earlier: Earlier | None = None
        self.revision: Revision | None = None
        if revision_name is not None and not is_other_side:
            from pytest_gtrainer.report import revision

            self.revision = revision.Revision.find(config, revision_name)
        if earlier_page is not None and not is_other_side:
            from pytest_gtrainer.report.changes import Earlier

            self.earlier = Earlier.read(earlier_page, Path(here, earlier_page))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from pytest_gtrainer.report.collected import Test

        self._tests.setdefault(report.nodeid, Test(report.nodeid)).add(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Add a file that cannot be collected as an error, since none of its tests shows up."""
        if report.failed:
            place = report.nodeid, None, report.nodeid
            error = pytest.TestReport(
                report.nodeid,
                place,
                {},
                "failed",
                report.longrepr,
                "collect",  # type: ignore[arg-type]
            )
            self.pytest_runtest_logreport(error)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_report_header(self) -> str | None:
        if self.revision is None:
            return None
        return f"gtrainer: against {self.revision}: here is {self.revision.here}"

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._is_written = True
        if self.revision is not None:
            write_section(terminalreporter, "=", f"against {self.revision}", [])
            self._run_revision(self.revision, terminalreporter.write_line)
        for line, is_problem in self._write():
            terminalreporter.write_line(facts.one_line(f"gtrainer: {line}"), red=is_problem)

    def pytest_unconfigure(self) -> None:
        # pytest calls no terminal summary with ``-p no:terminal``, and makes no session for --help.
        if not self._is_written and self._session is not None:
            if self.revision is not None:
                self._run_revision(self.revision, lambda line: None)
            self._write()

    def _run_revision(self, revision: Revision, write_line: Callable[[str], None]) -> None:
        """Run the tests at the revision and write what moved; a run that cannot is not green."""
        from pytest_gtrainer.report.revision import NotComparable

        assert self._session is not None
        status, tests = self._session.exitstatus, list(self._tests.values())
        write_line(f"here is {revision.here}")
        problem = None
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not tests:
            problem = "nothing compared: the run here has not ended, or no test has run"
        else:
            write_line(f"there: {revision.command(self.config, tests)}")
            try:
                with facts.long_work(f"the same tests at {revision}"):
                    self.earlier = revision.run(self.config, tests)
            except NotComparable as error:
                problem = f"nothing compared: {error}"
            except KeyboardInterrupt:
                problem = "nothing compared: interrupted"
                status = pytest.ExitCode.INTERRUPTED
        if problem is not None:
            write_line(facts.one_line(problem))
            if status == pytest.ExitCode.OK:
                status = pytest.ExitCode.TESTS_FAILED
            self._session.exitstatus = status

    def _describe_moves(self, run: PageContent) -> list[str]:
        """Return what moved against the revision, a line for each test; fail the run if asked."""
        assert run.earlier is not None
        lines, has_moved = [], False
        for details in run.details:
            if details["earlier"]["lines"]:
                lines.append(f"{details['name']}: {'; '.join(details['earlier']['lines'])}")
            has_moved = has_moved or details["earlier"]["moved"]
        shown = ("comparisons", "pipelines", "claims")
        if not any(details[name] for details in run.details for name in shown):
            lines.append(
                "no test recorded numbers, graphs or goldens: outcomes and times were compared"
            )
        lines = bounded(lines, most=_MOST_MOVES)
        alone = {name: None for test in run.tests for name in test.verdicts_alone()}
        if alone:
            names = facts.spell_some(list(alone), 8)
            lines.append(f"of {names} only verdicts were compared, and no numbers")
        is_in_vain = not any(test.name in run.earlier.tests for test in run.tests)
        if is_in_vain:
            lines.append(f"nothing compared: none of these tests ran {run.earlier.where}")
        fails = has_moved and options.get(self.config, "moved") == "fail"
        if fails:
            lines.append("--gt-moved=fail: this run fails, because tests have moved")
        if fails or is_in_vain:
            self._fail_run()
        return lines

    def _write(self) -> list[tuple[str, bool]]:
        """Write the wanted files. Return lines for the terminal, with True for a problem."""
        from pytest_gtrainer.report.html import PageContent, render_page
        from pytest_gtrainer.report.markdown import render_summary

        here = Path(self.config.invocation_params.dir)
        shown = {}
        for name, path in self.paths.items():
            shown[name] = path.relative_to(here) if path.is_relative_to(here) else path

        if not self._tests:  # the file of an earlier run is kept
            return [(f"no {name} in {path}: no test has run", True) for name, path in shown.items()]
        summary = self.config.pluginmanager.getplugin("gtrainer-summary")
        folder = os.path.relpath(self.config.rootpath, here)
        writers = {"report": render_page, "summary": render_summary}
        lines = []
        try:
            run = PageContent(
                title=f"pytest-gtrainer: {self.config.rootpath.name}",
                provenance=describe_run(self.config),
                summary=summary.lines() if summary is not None else [],
                tests=list(self._tests.values()),
                earlier=self.earlier,
                folder="" if folder == "." else f"{folder}/",
                options=options.repeated(self.config),
            )
            if self.revision is not None and self.earlier is not None:
                lines += [(line, False) for line in self._describe_moves(run)]
            if self.earlier is not None:
                lines.append((run.summary[-1], False))
        except Exception as error:
            self._fail_run()
            wanted = " and ".join(shown) or "comparison"
            return [*lines, (f"no {wanted}: {type(error).__name__}: {error}", True)]

        for name, path in self.paths.items():
            try:
                content = writers[name](run).encode("utf-8", "backslashreplace")
                # The page of a job on GitHub is one file, to which each step appends.
                is_job_page = str(path) == os.environ.get("GITHUB_STEP_SUMMARY")
                mode = "ab" if name == "summary" and is_job_page else "wb"
                with path.open(mode) as file:
                    file.write(content)
                lines.append((f"{name} in {shown[name]}", False))
            except Exception as error:  # the other file may still be written
                self._fail_run()
                why = f"{type(error).__name__}: {error}"
                lines.append((f"no {name} in {shown[name]}: {why}", True))

        return lines

    def _fail_run(self) -> None:
        """Let a run fail that was green, as where a file that somebody asked for is missing."""
        if self._session is not None and self._session.exitstatus == pytest.ExitCode.OK:
            self._session.exitstatus = pytest.ExitCode.TESTS_FAILED


def describe_run(config: pytest.Config) -> str:
    """Return the command of a run and the versions that it ran with."""
    parts = []
    for name in ("pytest-gtrainer", "torch", "pytest"):
        parts.append(f"{name} {metadata.version(name)}")
    for name, value in extensions.environment(config).items():
        parts.append(f"{name} {value}")
    parts += [f"Python {platform.python_version()}", platform.machine()]
    command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
    return f"{command} · {', '.join(parts)}"


class JUnitProperties:
    """Adds properties to the last report of a test, in the process that ran the test."""

    def __init__(self) -> None:
        self._tests: dict[str, Test] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "node"):  # set by xdist: the worker has added the properties
            return
        from pytest_gtrainer.report.collected import Test

        test = self._tests.setdefault(report.nodeid, Test(report.nodeid))
        test.add(report)
        if report.when == "teardown":
            report.user_properties = [*report.user_properties, *junit_properties(test)]
            del self._tests[report.nodeid]


def junit_properties(test: Test) -> Iterator[tuple[str, str]]:
    """Yield the properties of a test as name and value; a name may come several times."""
    worlds = facts.of_kind(test.facts, "world")
    if worlds:
        yield "gt_world", test.world
        yield "gt_ranks", str(max(world["size"] for world in worlds))
    for fact in test.facts:
        if fact["kind"] == "golden":
            yield "gt_golden", f"{fact['name']}: {fact['outcome']}"
        elif fact["kind"] == "verdict":
            yield "gt_verdict", f"{fact.get('what') or 'comparison'}: {fact['outcome']}"

    for comparison in test.comparisons():
        by_step: dict[int, list[str]] = {}
        for side in ("actual", "expected"):
            for step, digest in digests_by_step(comparison[side]).items():
                by_step.setdefault(step, []).append(f"{side} {digest}")
        for step, digests in sorted(by_step.items()):
            what = comparison["what"] or "comparison"
            yield "gt_digest", f"{what}, step {step}: {', '.join(digests)}"


def digests_by_step(rows: Iterable[Sequence[Any]]) -> dict[int, str]:
    """Return one digest for each step, from rows of ``step, rank, phase, digest``."""
    lines: dict[int, list[str]] = {}
    for step, rank, phase, digest in rows:
        lines.setdefault(step, []).append(f"{phase} {rank} {digest}")
    digests = {}
    for step, of_step in lines.items():
        digests[step] = hashlib.sha256("\n".join(of_step).encode()).hexdigest()[:16]
    return digests


class VerdictTables:
    """Adds sections to a test that failed with a verdict.

    One names the file with the whole table, if ``--gt-artifacts`` is set. The other names the
    command that finds the pass, if the test ran passes.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._ran_passes = self._is_unproven = False

        def note(given: object, result: object) -> None:
            self._ran_passes = True

        def note_unproven(**objects: object) -> None:
            self._is_unproven = True

        with facts.watching({"graph_passes": note, "unproven": note_unproven}):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, Any, Any]:
        report = yield
        # Not imported here, for they import torch; a test that compares has imported them.
        comparing = sys.modules.get("pytest_gtrainer.numerics.compare")
        proving = sys.modules.get("pytest_gtrainer.proofs.proof")
        error = call.excinfo.value if call.excinfo else None
        if not report.failed:
            return report
        if self._is_unproven and proving and isinstance(error, proving.AnotherFunction):
            self._name_bisection(item, report)
        if not comparing or not isinstance(error, comparing.VerdictError):
            return report
        from pytest_gtrainer.numerics.verdict import table

        verdict = error.verdict
        path = artifacts.save_or_warn(item, TABLE, table(verdict))
        if path is not None:
            saved = f"all of them: {artifacts.path_from_here(path)}"
            report.sections.append(("gtrainer differences", saved))
        if verdict.outcome == "different" and self._ran_passes:
            self._name_bisection(item, report)
        return report

    def _name_bisection(self, item: pytest.Item, report: Any) -> None:
        """Add the command that finds the pass, unless this run was that command."""
        if not options.get(item.config, "bisect"):
            again = shlex.join(
                ["pytest", item.nodeid, *options.repeated(item.config), "--gt-bisect"]
            )
            report.sections.append((facts.NEXT, f"which pass it was: {again}"))


class BisectPlugin:
    """``--gt-bisect``: bisects a failed comparison over passes.

    It costs a copy of the inputs, and a copy of the graph for each pass.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        # A test that rewrites graphs has imported torch while it was collected.
        if "torch" not in sys.modules:
            return (yield)
        from pytest_gtrainer.bisect import PassWitness

        with facts.watching(PassWitness().watchers()):
            return (yield)
