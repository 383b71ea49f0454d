"""``--gt-report FILE`` and ``--junitxml`` in a pytest run: who watches a test, who gathers, who writes.

A test's entry in the JUnit file has the properties ``gt_world``, ``gt_ranks``, ``gt_verdict``, ``gt_golden`` and
``gt_digest``: of each comparison of two records one digest a step and side, over all phases and ranks. Two CI runs
whose digests agree have trained alike.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer import extensions, facts, options
from pytest_gtrainer.marker import valid_spec_of
from pytest_gtrainer.report.collected import Test
from pytest_gtrainer.report.witness import Witness


@contextmanager
def witnessed(item: pytest.Item) -> Iterator[None]:
    """Take down what a test shows inside the block, if this run wants it: digests on every rank, graphs on one."""
    worker = getattr(item.config, "workerinput", {})
    wants_graphs = options.get(item.config, "report") is not None
    if not wants_graphs and not worker.get("gt_digests") and not item.config.getoption("xmlpath", None):
        yield
        return
    spec = valid_spec_of(item)
    witness = Witness(graphs=wants_graphs and worker.get("gt_rank", 0) == 0, mesh=dict(spec.mesh) if spec else None)
    with facts.watching(witness.watchers):
        yield


class ReportPlugin:
    """Gathers reports where the run ends, and writes the page; registered as ``gtrainer-report``.

    Raises:
        pytest.UsageError: the report could not be written where it is wanted.
    """

    def __init__(self, config: pytest.Config) -> None:
        given = options.get(config, "report")
        self.config, self.path = config, Path(config.invocation_params.dir, given)
        self._tests: dict[str, Test] = {}
        self._written = False
        if self.path.is_dir():
            raise pytest.UsageError(f"--gt-report={given} is a directory; name a file, as {given}/report.html")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"--gt-report={given}: its directory cannot be made: {error}") from None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests.setdefault(report.nodeid, Test(report.nodeid)).add(report)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        problem = self._write()
        terminalreporter.write_line(problem or f"gtrainer: report in {self._shown()}", red=problem is not None)

    def pytest_unconfigure(self) -> None:
        self._write()  # without a terminal nobody asked for the summary

    def _shown(self) -> str:
        here = Path(self.config.invocation_params.dir)
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

    def _write(self) -> str | None:
        """Write the page once; returns why that was not possible."""
        if self._written:
            return None
        self._written = True
        from pytest_gtrainer.report.html import render_page

        versions = [f"{name} {metadata.version(name)}" for name in ("pytest-gtrainer", "torch", "pytest")]
        versions += [f"{name} {value}" for name, value in extensions.environment(self.config).items()]
        command = shlex.join(["pytest", *map(str, self.config.invocation_params.args)])
        made = f"{command} · {', '.join(versions)}, Python {platform.python_version()}, {platform.machine()}"
        summary = self.config.pluginmanager.getplugin("gtrainer-summary")
        lines = summary.lines() if summary is not None else []
        title = f"pytest-gtrainer: {self.config.rootpath.name}"
        try:
            self.path.write_text(render_page(title, made, lines, list(self._tests.values())), encoding="utf-8")
        except OSError as error:
            return f"gtrainer: no report in {self._shown()}: {error}"
        return None


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
    worlds = [fact for fact in test.facts if fact["kind"] == "world"]
    if worlds:
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
            told = ", ".join(f"{side} {steps[step]}" for side, steps in sides.items() if step in steps)
            yield "gt_digest", f"{comparison['what'] or 'comparison'}, step {step}: {told}"


def digests_by_step(rows: Iterable[Sequence[Any]]) -> dict[int, str]:
    """One digest for each step of a table of ``step, rank, phase, digest``.

    >>> one, other = ([(0, 0, "loss", x), (0, 1, "loss", y)] for x, y in ("ab", "ba"))
    >>> digests_by_step(one) == digests_by_step(other)
    False
    """
    lines: dict[int, list[str]] = {}
    for step, rank, phase, told in rows:
        lines.setdefault(step, []).append(f"{phase} {rank} {told}")
    return {step: hashlib.sha256("\n".join(told).encode()).hexdigest()[:16] for step, told in lines.items()}
