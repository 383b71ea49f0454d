"""``--gt-report FILE`` in a pytest run: who watches a test, who gathers, who writes the page, once."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from pytest_gtrainer import extensions, facts, options
from pytest_gtrainer.marker import spec_of
from pytest_gtrainer.report.collected import Test
from pytest_gtrainer.report.witness import Witness
from pytest_gtrainer.worlds.spec import SpecError

_WANTED = pytest.StashKey[tuple[bool, bool]]()


@contextmanager
def witnessed(config: pytest.Config, item: pytest.Item | None = None) -> Iterator[None]:
    """Take down what a test shows inside the block, if this run wants it.

    Digests on every rank; graphs on one, where they are wanted.
    """
    wants_graphs, wants_digests = _wanted(config)
    if not wants_graphs and not wants_digests:
        yield
        return
    rank = getattr(config, "workerinput", {}).get("gt_rank", 0)
    witness = Witness(graphs=wants_graphs and rank == 0, mesh=_mesh(item))
    with facts.watching(witness.watchers):
        yield


def _wanted(config: pytest.Config) -> tuple[bool, bool]:
    """Whether this run wants graphs and digests; every test asks."""
    if _WANTED not in config.stash:
        worker = getattr(config, "workerinput", {})
        digests = bool(worker.get("gt_digests") or config.getoption("xmlpath", None))
        config.stash[_WANTED] = options.get(config, "report") is not None, digests
    return config.stash[_WANTED]


def _mesh(item: pytest.Item | None) -> dict[str, int] | None:
    try:
        spec = spec_of(item) if item is not None else None
    except SpecError:
        return None
    return dict(spec.mesh) if spec is not None else None


class ReportPlugin:
    """Gathers reports where the run ends, and writes the page; registered as ``gtrainer-report``."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config, self.path = config, path
        self._tests: dict[str, Test] = {}
        self._written = False

    @classmethod
    def of(cls, config: pytest.Config) -> ReportPlugin | None:
        """The plugin of a run that wants a report and ends here, not in a worker or rank.

        Raises:
            pytest.UsageError: the report could not be written where it is wanted.
        """
        given = options.get(config, "report")
        if given is None or hasattr(config, "workerinput"):
            return None
        path = Path(config.invocation_params.dir, given)
        if path.is_dir():
            raise pytest.UsageError(f"--gt-report={given} is a directory; name a file, as {given}/report.html")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"--gt-report={given}: its directory cannot be made: {error}") from None
        return cls(config, path)

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
        from pytest_gtrainer.report.html import RunTold, render_page

        told = RunTold(f"pytest-gtrainer: {self.config.rootpath.name}", self._made(), self._summary())
        try:
            self.path.write_text(render_page(told, list(self._tests.values())), encoding="utf-8")
        except OSError as error:
            return f"gtrainer: no report in {self._shown()}: {error}"
        return None

    def _made(self) -> str:
        versions = [f"{name} {metadata.version(name)}" for name in ("pytest-gtrainer", "torch", "pytest")]
        versions += [f"{name} {value}" for name, value in extensions.environment(self.config).items()]
        command = shlex.join(["pytest", *map(str, self.config.invocation_params.args)])
        return f"{command} · {', '.join(versions)}, Python {platform.python_version()}, {platform.machine()}"

    def _summary(self) -> list[str]:
        summary = self.config.pluginmanager.getplugin("gtrainer-summary")
        return list(summary.lines()) if summary is not None else []
