"""The pytest plugin: hooks only, each one line of work that lives elsewhere.

Loading this module imports neither torch nor anything that does.
"""

import importlib
import re
import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pytest_gtrainer import devices, extensions, facts, fixtures, hookspecs, marker, options
from pytest_gtrainer._pytest_private import use_fixture
from pytest_gtrainer.environment import complaint
from pytest_gtrainer.golden import inline
from pytest_gtrainer.golden.plugin import GoldenPlugin
from pytest_gtrainer.golden.unused import UnusedGoldens
from pytest_gtrainer.leaks import LeakGuard
from pytest_gtrainer.ranks.plugin import RanksPlugin, follow, is_rank
from pytest_gtrainer.report.plugin import (
    BisectPlugin,
    JUnitProperties,
    ReportPlugin,
    VerdictTables,
    witnessed,
)
from pytest_gtrainer.report.terminal import ConformanceTable, SummaryPlugin
from pytest_gtrainer.swallowed import SwallowedChecks
from pytest_gtrainer.worlds import SpecError

USED_LATER = (
    "golden.values",
    "numerics.knobs",
    "numerics.verdict",
    "ranks.inside.session",
    "ranks.merge",
    "ranks.team",
    "report.changes",
    "report.collected",
    "report.repeats",
    "report.witness",
    "worlds.hygiene",
    "worlds.spec",
)
"""Modules that tests of ours use and that other projects need not: imported at their first use."""

FACTS = pytest.StashKey[list[facts.Fact]]()
_SIMULATED = pytest.StashKey[set[Path]]()
"""The test files in which a simulation ran."""
_FAKE_VALUES = (
    "the process groups of a {} world move no data, so values after a collective mean nothing "
    'here: use gt_world("ranks"), or simulate_eager in a simulated world'
)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)
    pluginmanager.register(fixtures, "gtrainer-fixtures")


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)


def pytest_plugin_registered(plugin_name: str) -> None:
    """Import everything now in a run whose tests run pytest in this process.

    Such a run forgets the modules that it has imported, and messages between ranks are recognised
    by their classes.
    """
    if plugin_name == "pytester":
        for name in USED_LATER:
            importlib.import_module(f"pytest_gtrainer.{name}")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    inline.prepare(early_config)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    return follow(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = []
    if warning := complaint():
        lines.append(f"gtrainer: {warning}")
    if options.get(config, "cuda-as"):
        slots = devices.resolve(config).slots
        lines.append(
            f"gtrainer: CUDA is the CPU in this run, as {slots} devices (gt_cuda_as=cpu): "
            "no test of it says anything about a GPU"
        )
    return lines


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", marker.MARKER_HELP)
    options.check(config)
    extensions.remember(config)
    devices.check_launch(config)
    if options.get(config, "gpus") or options.get(config, "device") != "auto":
        # A promise of devices that cannot be kept stops the run here, not at the first test.
        devices.resolve(config)
    if options.get(config, "cuda-as"):
        # Before test files are imported: their skip marks ask whether there is a GPU.
        from pytest_gtrainer._torch.cuda_as_cpu import cuda_as_cpu

        stack = ExitStack()
        stack.enter_context(cuda_as_cpu(devices.resolve(config).slots))
        config.add_cleanup(stack.close)
    goldens = GoldenPlugin(config)
    config.pluginmanager.register(goldens, "gtrainer-goldens")
    inline.register(config)
    if options.compares_runs(config):
        from pytest_gtrainer.report.revision import ChosenTests, Imports

        config.pluginmanager.register(Imports(), "gtrainer-imports")
        if options.is_other_side(config) and not is_rank(config) and not config.option.pyargs:
            config.pluginmanager.register(ChosenTests(config), "gtrainer-chosen-tests")
    if options.get(config, "leaked-flags") != "ignore":
        config.pluginmanager.register(LeakGuard(config), "gtrainer-leaks")
    config.pluginmanager.register(SwallowedChecks(), "gtrainer-swallowed")
    config.pluginmanager.register(VerdictTables(), "gtrainer-verdicts")
    if options.get(config, "bisect"):
        config.pluginmanager.register(BisectPlugin(), "gtrainer-bisect")
    is_repeated = options.get(config, "repeat") > 1
    if is_repeated:
        from pytest_gtrainer.report.repeats import OperatorObserver, Repeats

        config.pluginmanager.register(OperatorObserver(), "gtrainer-operators")
    if not is_rank(config):
        config.pluginmanager.register(RanksPlugin(config), "gtrainer-ranks")
        if is_repeated:
            # After the ranks: pytest asks the plugin first that was registered last.
            config.pluginmanager.register(Repeats(config), "gtrainer-repeats")
        config.pluginmanager.register(UnusedGoldens(config, goldens), "gtrainer-unused-goldens")
        config.pluginmanager.register(SummaryPlugin(config), "gtrainer-summary")
        config.pluginmanager.register(ConformanceTable(config), "gtrainer-conformance")
        if config.getoption("xmlpath", None):
            config.pluginmanager.register(JUnitProperties(), "gtrainer-junit")
        if options.wants_report(config) and not hasattr(config, "workerinput"):
            config.pluginmanager.register(ReportPlugin(config), "gtrainer-report")


def pytest_sessionstart(session: pytest.Session) -> None:
    if is_rank(session.config):
        extensions.rank_starts(session.config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if is_rank(session.config):
        extensions.rank_ends(session.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    extensions.parametrise(metafunc)
    sizes = marker.parametrised_sizes(metafunc.definition)
    if sizes is not None:
        metafunc.fixturenames.append(marker.SIZE_PARAM)
        metafunc.parametrize(marker.SIZE_PARAM, sizes, ids=[f"size{size}" for size in sizes])


def _note_values_without_data(item: pytest.Item, sink: list[facts.Fact]) -> None:
    """Say in the summary that a test compared values in a world whose groups move no data.

    A test that forgets a sum over ranks is equal there to one that does not. In a simulated world
    the results of a simulation have true values, also if a fixture of the module made them.
    """
    if not sink:
        return
    simulated = item.session.stash.setdefault(_SIMULATED, set())
    if facts.of_kind(sink, "simulated"):
        simulated.add(item.path)
    verdicts = facts.of_kind(sink, "verdict")
    is_equal = any(fact["outcome"].startswith("equal") for fact in verdicts)
    if not is_equal and not facts.of_kind(sink, "values"):
        return
    spec = marker.valid_spec_of(item)
    if spec is None or spec.kind not in ("fake", "simulated"):
        return
    if spec.kind == "fake" or item.path not in simulated:
        where = "" if spec.kind == "fake" else " outside of a simulation"
        what = f"values compared in a {spec.kind} world{where}, where collectives move no data"
        sink.append({"kind": "idle", "what": what})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    try:
        spec = marker.spec_of(item)
    except SpecError as error:
        # ``from None``, or pytest would show the SpecError too.
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    # The marker alone gives a test its world.
    if spec is not None and spec.kind != "ranks" and isinstance(item, pytest.Function):
        use_fixture(item, "gt_world")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    repeats = item.config.pluginmanager.getplugin("gtrainer-repeats")
    if repeats is not None and repeats.is_between:
        return (yield)  # this hook is called for each repetition, too
    if "torch" in sys.modules and not options.get(item.config, "trace-log"):
        from pytest_gtrainer.worlds.hygiene import keep_trace_log_quiet

        keep_trace_log_quiet()
    with facts.collecting() as sink, witnessed(item):
        item.stash[FACTS] = sink
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Send the facts of each phase with its report, as the attribute ``gt_facts``.

    An assertion that fails on values of a fake or simulated world gets a note with the way out.
    """
    error = call.excinfo.value if call.excinfo else None
    if type(error) is AssertionError and re.search(r"[tT]ensor(\(| object|-likes)", str(error)):
        spec = marker.valid_spec_of(item)
        if spec is not None and spec.kind in ("fake", "simulated"):
            error.add_note(_FAKE_VALUES.format(spec.kind))
    report = yield
    sink = item.stash.get(FACTS, [])
    _note_values_without_data(item, sink)
    report.gt_facts = sink[:]  # type: ignore[attr-defined]
    sink.clear()
    return report
