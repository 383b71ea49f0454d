"""``--gt-report``, ``--gt-summary``, ``--gt-report-against``, ``--junitxml``, ``--gt-bisect``, and tables of verdicts.

A test's entry in the JUnit file has the properties ``gt_world``, ``gt_ranks``, ``gt_verdict``, ``gt_golden`` and
``gt_digest``: of each comparison of two records one digest a step and side, over all phases and ranks. Two CI runs
whose digests agree have trained alike.
"""

import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer import extensions, facts, options
from pytest_gtrainer.golden import artifacts
from pytest_gtrainer.marker import valid_spec_of
from pytest_gtrainer.report.changes import Earlier
from pytest_gtrainer.report.collected import Test
from pytest_gtrainer.report.witness import Witness

TABLE = "differences.tsv"


@contextmanager
def witnessed(item: pytest.Item) -> Iterator[None]:
    """Take down what a test shows inside the block, if this run wants it: digests on every rank, graphs on one."""
    worker = getattr(item.config, "workerinput", {})
    wants_graphs = options.wants_report(item.config)
    if (
        not wants_graphs
        and not worker.get("gt_digests")
        and not item.config.getoption("xmlpath", None)
    ):
        yield
        return
    spec = valid_spec_of(item)
    witness = Witness(
        graphs=wants_graphs and worker.get("gt_rank", 0) == 0,
        mesh=dict(spec.mesh) if spec else None,
    )
    with facts.watching(witness.watchers):
        yield


class ReportPlugin:
    """``gtrainer-report``: gathers reports, writes page and summary where the run ends; UsageError for a bad path."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, here = config, config.invocation_params.dir
        self._tests: dict[str, Test] = {}
        self._is_written = False
        self.paths: dict[str, Path] = {}
        for option, example in (("report", "report.html"), ("summary", "summary.md")):
            if (given := options.get(config, option)) is None:
                continue
            path = self.paths[option] = Path(here, given)
            if path.is_dir():
                raise pytest.UsageError(
                    f"--gt-{option}={given} is a directory; name a file, as {given}/{example}"
                )
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise pytest.UsageError(
                    f"--gt-{option}={given}: its directory cannot be made: {error}"
                ) from None
        against = options.get(config, "report-against")
        self.earlier = None if against is None else Earlier.read(against, Path(here, against))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests.setdefault(report.nodeid, Test(report.nodeid)).add(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected has no tests to be missed by: it is told as an error of its own."""
        if report.failed:
            place = report.nodeid, None, report.nodeid
            told = pytest.TestReport(report.nodeid, place, {}, "failed", report.longrepr, "collect")  # type: ignore[arg-type]
            self._tests.setdefault(report.nodeid, Test(report.nodeid)).add(told)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._is_written = True
        for line, is_problem in self._write():
            terminalreporter.write_line(facts.one_line(f"gtrainer: {line}"), red=is_problem)

    def pytest_unconfigure(self) -> None:
        if not self._is_written:  # without a terminal nobody asked for the summary
            self._write()

    def _write(self) -> list[tuple[str, bool]]:
        """Write what is wanted; returns what to say, each with whether it is a problem."""
        from pytest_gtrainer.report.html import Run, render_page
        from pytest_gtrainer.report.markdown import render_summary

        here = Path(self.config.invocation_params.dir)
        shown = {
            name: path.relative_to(here) if path.is_relative_to(here) else path
            for name, path in self.paths.items()
        }
        if not self._tests:  # what an earlier run has written stays
            return [(f"no {name} in {path}: no test has run", True) for name, path in shown.items()]
        summary = self.config.pluginmanager.getplugin("gtrainer-summary")
        lines = summary.lines() if summary is not None else []
        title = f"pytest-gtrainer: {self.config.rootpath.name}"
        folder = os.path.relpath(self.config.rootpath, here)
        folder = "" if folder == "." else f"{folder}/"
        tests = list(self._tests.values())
        writers: dict[str, Callable[[Run], str]] = {
            "report": render_page,
            "summary": render_summary,
        }
        said = []
        try:
            run = Run(title, made_by(self.config), lines, tests, self.earlier, folder)
            if self.earlier is not None:
                said.append((run.summary[-1], False))
            for name, path in shown.items():
                content = writers[name](run).encode("utf-8", "backslashreplace")
                # a job's page on GitHub takes several summaries in one file
                is_more = name == "summary" and os.environ.get("GITHUB_STEP_SUMMARY") == str(
                    self.paths[name]
                )
                with self.paths[name].open("ab" if is_more else "wb") as file:
                    file.write(content)
                said.append((f"{name} in {path}", False))
        except Exception as error:  # whatever it is, the run has ended and its result stands
            said.append(
                (f"no {' and '.join(shown) or 'comparison'}: {type(error).__name__}: {error}", True)
            )
        return said


def made_by(config: pytest.Config) -> str:
    """The command of a run, and the versions that it ran with."""
    versions = [
        f"{name} {metadata.version(name)}" for name in ("pytest-gtrainer", "torch", "pytest")
    ]
    versions += [f"{name} {value}" for name, value in extensions.environment(config).items()]
    command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
    return f"{command} · {', '.join(versions)}, Python {platform.python_version()}, {platform.machine()}"


class JUnitProperties:
    """Adds properties to a test's last report, in the process that ran the test."""

    def __init__(self) -> None:
        self._tests: dict[str, Test] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "node"):  # from a worker of xdist, which has added them
            return
        test = self._tests.setdefault(report.nodeid, Test(report.nodeid))
        test.add(report)
        if report.when == "teardown":
            report.user_properties = [*report.user_properties, *properties_of(test)]
            del self._tests[report.nodeid]


def properties_of(test: Test) -> Iterator[tuple[str, str]]:
    """Name and value of each property; the same name may come several times."""
    if worlds := [fact for fact in test.facts if fact["kind"] == "world"]:
        yield "gt_world", test.world
        yield "gt_ranks", str(max(fact["size"] for fact in worlds))
    for fact in test.facts:
        if fact["kind"] == "golden":
            yield "gt_golden", f"{fact['name']}: {fact['outcome']}"
        elif fact["kind"] == "verdict":
            yield "gt_verdict", f"{fact.get('what') or 'comparison'}: {fact['outcome']}"
    for comparison in test.comparisons():
        sides = {side: digests_by_step(comparison[side]) for side in ("actual", "expected")}
        for step in sorted({step for steps in sides.values() for step in steps}):
            told = ", ".join(
                f"{side} {steps[step]}" for side, steps in sides.items() if step in steps
            )
            yield "gt_digest", f"{comparison['what'] or 'comparison'}, step {step}: {told}"


def digests_by_step(rows: Iterable[Sequence[Any]]) -> dict[int, str]:
    """One digest for each step of a table of ``step, rank, phase, digest``."""
    lines: dict[int, list[str]] = {}
    for step, rank, phase, told in rows:
        lines.setdefault(step, []).append(f"{phase} {rank} {told}")
    return {
        step: hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
        for step, told in lines.items()
    }


class VerdictTables:
    """Of the verdict that a test failed with: its table, if ``--gt-artifacts`` says where, and how to find the pass."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._rewrote = False
        with facts.watching(
            {"graph_passes": lambda given, result: setattr(self, "_rewrote", True)}
        ):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, Any, Any]:
        report = yield
        comparing = sys.modules.get(
            "pytest_gtrainer.numerics.compare"
        )  # a test that compares has imported it
        if (
            report.failed
            and comparing
            and call.excinfo
            and isinstance(call.excinfo.value, comparing.VerdictError)
        ):
            from pytest_gtrainer.numerics.verdict import table

            if (
                path := artifacts.save_or_warn(item, TABLE, table(call.excinfo.value.verdict))
            ) is not None:
                report.sections.append(
                    ("gtrainer differences", f"all of them: {artifacts.shown(path)}")
                )
            is_different = call.excinfo.value.verdict.outcome == "different"
            if is_different and self._rewrote and not options.get(item.config, "bisect"):
                again = shlex.join(["pytest", item.nodeid, "--gt-bisect"])
                report.sections.append(("gtrainer next", f"which pass it was: {again}"))
        return report


class BisectPlugin:
    """``--gt-bisect``: bisects a failed comparison over passes; costs a copy of the inputs, and of a graph a pass."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if (
            "torch" not in sys.modules
        ):  # a test that rewrites graphs has imported it while it was collected
            return (yield)
        from pytest_gtrainer.bisect import PassWitness

        with facts.watching(PassWitness().watchers()):
            return (yield)
